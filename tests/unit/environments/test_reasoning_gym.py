import pytest

from echo_coordinator.environments.base import PromptSkipped, Split, Unscorable
from echo_coordinator.environments.reasoning_gym import CHUNK, ReasoningGymEnvironment
from echo_swarm.errors import SettingsError

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2, "prompt": "{expression} =", "eval_size": 32}


def sums(**changes: object) -> ReasoningGymEnvironment:
    return ReasoningGymEnvironment("chain_sum", {**SUMS, **changes})


def text(environment: ReasoningGymEnvironment, split: Split, index: int) -> str | None:
    try:
        prompt = environment.prompt(split, index)
    except PromptSkipped:
        return None
    return prompt.text or prompt.messages[-1].content


def test_prompts_are_the_same_in_every_process_and_in_any_order() -> None:
    one, other = sums(), sums()
    indices = [0, 5, CHUNK - 1, CHUNK, 3 * CHUNK + 7]
    assert [text(one, Split.TRAIN, i) for i in indices] == [text(other, Split.TRAIN, i) for i in indices[::-1]][::-1]


def test_training_never_ends_and_another_seed_gives_other_prompts() -> None:
    environment = sums()
    assert environment.size(Split.TRAIN) is None
    assert text(environment, Split.TRAIN, 10**7)
    assert [text(sums(seed=1), Split.TRAIN, i) for i in range(20)] != [text(sums(), Split.TRAIN, i) for i in range(20)]


def test_no_training_prompt_stands_in_the_evaluation_split_even_where_a_task_has_few_items() -> None:
    environment = sums(min_digits=1, max_digits=1, eval_size=64)
    held_out = {text(environment, Split.EVAL, i) for i in range(64)}
    trained = [text(environment, Split.TRAIN, i) for i in range(300)]
    assert None in trained
    assert not held_out & ({*trained} - {None})


def test_an_evaluation_index_beyond_the_split_is_refused() -> None:
    with pytest.raises(IndexError):
        sums().prompt(Split.EVAL, 32)


def test_rewards_come_from_the_tasks_own_verifier() -> None:
    environment = sums()
    left, operator, right, _ = str(text(environment, Split.TRAIN, 0)).split()
    result = int(left) + int(right) if operator == "+" else int(left) - int(right)
    assert environment.reward(Split.TRAIN, 0, f" {result} ") == 1.0
    assert environment.reward(Split.TRAIN, 0, str(result + 1)) == 0.0
    assert environment.reward(Split.TRAIN, 0, "") == 0.0


def test_the_answer_is_what_stands_between_the_marks() -> None:
    environment = sums(answer_start="<answer>", answer_end="</answer>", full_credit_only=True)
    left, operator, right, _ = str(text(environment, Split.TRAIN, 0)).split()
    result = int(left) + int(right) if operator == "+" else int(left) - int(right)
    assert environment.reward(Split.TRAIN, 0, f"hm <answer>1</answer> <answer> {result}</answer> so") == 1.0
    assert environment.reward(Split.TRAIN, 0, f"{result}") == 1.0
    assert environment.reward(Split.TRAIN, 0, f"hm {result} so") == 0.0
    required = sums(answer_start="<answer>", answer_end="</answer>", answer_required=True)
    assert required.reward(Split.TRAIN, 0, f"{result}") == 0.0


def test_a_verifier_that_fails_is_no_reward_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    from reasoning_gym.arithmetic.chain_sum import ChainSumDataset

    def fail(*_: object) -> float:
        raise RuntimeError("verifier down")

    monkeypatch.setattr(ChainSumDataset, "score_answer", fail)
    with pytest.raises(Unscorable, match="verifier down"):
        sums().reward(Split.TRAIN, 0, "1")


def test_chat_prompts_carry_the_system_prompt_as_a_turn_of_its_own() -> None:
    prompt = sums(system_prompt="Be brief.").prompt(Split.TRAIN, 0)
    assert [message.role for message in prompt.messages] == ["system", "user"]
    assert sums(chat=False).prompt(Split.TRAIN, 0).text is not None


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"min_term": 2}, "min_terms"),
        ({"min_terms": 0}, "min_terms must be positive"),
        ({"size": 5}, "eval_size"),
        ({"eval_size": 0}, "eval_size"),
        ({"prompt": "{expresion}"}, "expression"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(SettingsError, match=complaint):
        sums(**settings)


@pytest.mark.parametrize("task", ["knights_knaves", "spell_backward", "letter_counting", "number_sorting"])
def test_other_tasks_work_with_their_own_defaults(task: str) -> None:
    environment = ReasoningGymEnvironment(task, {"eval_size": 4})
    assert text(environment, Split.EVAL, 3)
    assert 0 <= environment.reward(Split.EVAL, 3, "nonsense") < 1
