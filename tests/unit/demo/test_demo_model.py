import hashlib
from pathlib import Path

import pytest

from echo_coordinator.demo import warmup
from echo_coordinator.demo.answers import careful, hasty
from echo_coordinator.demo.recipe import ENVIRONMENT, ENVIRONMENT_SETTINGS, MAX_PROMPT_TOKENS, WORK, WarmUp
from echo_coordinator.demo.tokenizer import EOS_ID
from echo_coordinator.environments.base import PromptSkipped, Split
from echo_coordinator.environments.registry import open_environment
from echo_coordinator.model_folder import read_facts
from echo_coordinator.scoring.tokenizer import PromptTokenizer

SHORT = WarmUp(steps=4, careful_steps=2, batch=4)


@pytest.mark.parametrize(
    ("prompt", "worked", "quick"),
    [
        ("58 + 26 =", "[48]84", "74"),
        ("95 + 47 =", "[241]142", "32"),
        ("52 - 17 =", "[53]35", "45"),
        ("17 - 52 =", "[53-]-35", "-45"),
        ("3 - 3 =", "[0]0", "0"),
    ],
)
def test_careful_answers_are_right_and_hasty_ones_forget_the_carry(prompt: str, worked: str, quick: str) -> None:
    assert (careful(prompt), hasty(prompt)) == (worked, quick)


def test_the_environment_pays_for_careful_answers_and_prompts_fit() -> None:
    environment = open_environment(ENVIRONMENT, ENVIRONMENT_SETTINGS)
    hasty_rewards = []
    for index in range(64):
        text = environment.prompt(Split.EVAL, index).text
        assert text is not None and len(text) + 1 <= MAX_PROMPT_TOKENS
        assert len(careful(text)) + 1 <= WORK["max_tokens"]
        assert environment.reward(Split.EVAL, index, careful(text)) == 1.0
        hasty_rewards.append(environment.reward(Split.EVAL, index, hasty(text)))
    assert set(hasty_rewards) == {0.0, 1.0}


def test_the_model_is_the_same_for_a_seed_and_loads_with_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from echo_coordinator.demo.model import make_model

    folders = {name: tmp_path / name for name in ("one", "again", "other")}
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        make_model(folders[name], seed=seed, progress=lambda _: None, warm_up=SHORT)
    digests = {name: hashlib.sha256((f / "model.safetensors").read_bytes()).hexdigest() for name, f in folders.items()}
    assert digests["one"] == digests["again"] != digests["other"]
    assert read_facts(folders["one"]).end_token_ids == (EOS_ID,)
    assert AutoModelForCausalLM.from_pretrained(folders["one"]).config.model_type == "qwen3"
    reference = AutoTokenizer.from_pretrained(folders["one"])
    ids = reference("58 + 26 =")["input_ids"]
    assert PromptTokenizer(folders["one"], [EOS_ID]).decode(ids[1:]) == reference.decode(ids[1:]) == "58 + 26 ="


def test_the_warm_up_never_sees_a_held_out_prompt() -> None:
    from itertools import islice

    from echo_coordinator.demo.model import _prompts

    environment = open_environment(ENVIRONMENT, ENVIRONMENT_SETTINGS)
    held_out = {environment.prompt(Split.EVAL, i).text for i in range(environment.size(Split.EVAL) or 0)}
    assert not held_out & set(islice(_prompts(0), 3000))


def test_a_finished_model_is_kept_and_a_broken_attempt_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from echo_coordinator.demo import model

    def fail(folder: Path, **_: object) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "make_model", fail)
    with pytest.raises(KeyboardInterrupt):
        warmup.make_demo_model(tmp_path, 0, lambda _: None)
    assert list(tmp_path.iterdir()) == []
    kept = warmup.model_folder(tmp_path, 0)
    kept.mkdir()
    assert warmup.make_demo_model(tmp_path, 0, lambda _: None) == kept


def test_the_training_prompts_of_a_run_are_mostly_usable() -> None:
    environment = open_environment(ENVIRONMENT, ENVIRONMENT_SETTINGS)

    def usable(index: int) -> bool:
        try:
            environment.prompt(Split.TRAIN, index)
        except PromptSkipped:
            return False
        return True

    assert sum(map(usable, range(400))) > 250
