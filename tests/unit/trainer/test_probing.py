"""The trainer's values for probes, and how near a torch node comes to them."""

from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from echo_coordinator.state.probe_rules import BOUNDS, judge_answer, measure
from echo_coordinator.trainer.adapter import BASE_FILE
from echo_coordinator.trainer.batch import Member, TrainingBatch
from echo_coordinator.trainer.engine import Trainer
from echo_coordinator.trainer.probe_job import ProbeJob, ProbeText, pack_job, pack_values, unpack_job, unpack_values
from echo_coordinator.trainer.probing import score_probes
from echo_coordinator.trainer.settings import TrainerConfig
from echo_node.backends.base import PolicyFiles, ScoreRequest
from echo_node.backends.options import TorchOptions
from echo_node.backends.torch_engine import TorchEngine
from echo_swarm.codec import pack_u32, unpack_u32
from echo_swarm.errors import BackendFailed, MalformedMessage
from echo_swarm.manifest import sha256
from echo_swarm.probe import ProbeVerdict
from tests.unit.trainer.conftest import VOCABULARY

CPU = torch.device("cpu")
PROMPTS = ((1, 2, 3), (4, 5, 6, 7, 8), (9,), (10, 11))
TEMPERATURE = 0.7


def job(*completions: bytes, tokens: int = 12) -> ProbeJob:
    given = completions or (b"",) * len(PROMPTS)
    return ProbeJob(
        texts=tuple(
            ProbeText(prompt_ids=pack_u32(prompt), completion_ids=ids)
            for prompt, ids in zip(PROMPTS, given, strict=True)
        ),
        tokens=tokens,
        seed=3,
        end_token_ids=(0,),
        vocabulary=VOCABULARY - 2,
    )


def score(trainer: Trainer, asked: ProbeJob) -> "tuple[list[bytes], array[float]]":
    values = score_probes(trainer.model, asked, temperature=TEMPERATURE, autocast=False, device=CPU)
    joined = array("f")
    for value in values:
        joined.extend(value.logprobs)
    return [value.completion_ids for value in values], joined


def policy_of(trainer: Trainer, model_folder: Path) -> PolicyFiles:
    path = trainer.checkpoint.weights_path
    return PolicyFiles(
        policy_version=trainer.state.policy_version,
        artifact=path,
        artifact_digest=sha256(path.read_bytes()),
        model_config_json=(model_folder / "config.json").read_text(),
        end_token_ids=(0,),
        vocabulary_size=VOCABULARY,
        max_prompt_tokens=32,
        max_completion_tokens=32,
    )


def test_completions_are_sampled_once_and_leave_the_trainers_own_randomness_alone(
    config: Callable[..., TrainerConfig],
) -> None:
    trainer = Trainer(config())
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    completions, values = score(trainer, job())
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (completions, values) == score(trainer, job())
    lengths = [len(ids) // 4 for ids in completions]
    assert len(values) == sum(lengths) and all(1 <= length <= 12 for length in lengths)
    assert max(max(unpack_u32(ids)) for ids in completions) < VOCABULARY - 2
    # Given instead of sampled, they get the same values.
    again, same = score(trainer, job(*completions))
    assert (again, same) == (completions, values)


def test_a_torch_node_gives_what_the_trainer_gives_at_each_version(
    config: Callable[..., TrainerConfig],
    member: Callable[..., Member],
    batch: Callable[..., TrainingBatch],
    model_folder: Path,
) -> None:
    trainer, engine = Trainer(config()), TorchEngine(TorchOptions(threads=1))
    completions, first = score(trainer, job())
    references, answers = {0: first}, {}
    items = tuple((prompt, tuple(unpack_u32(ids))) for prompt, ids in zip(PROMPTS, completions, strict=True))
    for version in range(3):
        if version:
            made = batch([member(1.0, version=version - 1), member(0.0, start=9, version=version - 1)], update=version)
            trainer.train(made)
            trainer.save()
            references[version] = score(trainer, job(*completions))[1]
        engine.load(policy_of(trainer, model_folder))
        answers[version] = array("f")
        for piece in engine.score(ScoreRequest(items=items, temperature=TEMPERATURE)):
            answers[version].extend(piece)
    gaps = {version: measure(answers[version], references[version]) for version in references}
    assert max(gap.most for gap in gaps.values()) <= 1e-4
    allowed = BOUNDS["float32"][1]
    for version, answer in answers.items():
        judgement = judge_answer(answer, version, references, allowed)
        assert (judgement.verdict, judgement.confirmed) == (ProbeVerdict.MATCHES, True)
        lie = judge_answer(answer, (version + 1) % 3, references, allowed)
        assert lie.verdict is ProbeVerdict.OTHER_VERSION


def test_a_torch_node_gives_what_a_trainer_of_an_adapter_gives_at_each_version(
    config: Callable[..., TrainerConfig],
    member: Callable[..., Member],
    batch: Callable[..., TrainingBatch],
    model_folder: Path,
) -> None:
    lora = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj", "down_proj"]}
    tuned = {"optimizer": {"learning_rate": 0.03}, "lora": lora}
    trainer, engine = Trainer(config(**tuned)), TorchEngine(TorchOptions(threads=1))
    base = trainer.checkpoint.folder.parent / BASE_FILE
    completions, first = score(trainer, job())
    # Version 0 is the base: an adapter starts as nothing.
    assert (completions, first) == score(Trainer(config(folder="whole")), job())
    references, answers = {0: first}, {}
    items = tuple((prompt, tuple(unpack_u32(ids))) for prompt, ids in zip(PROMPTS, completions, strict=True))
    for version in range(3):
        if version:
            made = batch([member(1.0, version=version - 1), member(0.0, start=9, version=version - 1)], update=version)
            trainer.train(made)
            trainer.save()
            references[version] = score(trainer, job(*completions))[1]
        engine.load(replace(policy_of(trainer, model_folder), base=base, base_digest=sha256(base.read_bytes())))
        answers[version] = array("f")
        for piece in engine.score(ScoreRequest(items=items, temperature=TEMPERATURE)):
            answers[version].extend(piece)
    for version, answer in answers.items():
        assert measure(answer, references[version]).most <= 1e-4
        judgement = judge_answer(answer, version, references, BOUNDS["float32"][1])
        assert (judgement.verdict, judgement.confirmed) == (ProbeVerdict.MATCHES, True)
        lie = judge_answer(answer, (version + 1) % 3, references, BOUNDS["float32"][1])
        assert lie.verdict is ProbeVerdict.OTHER_VERSION


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8, "targets": ["q_proj", "down_proj"]}])
def test_probing_leaves_no_trace_in_what_is_trained(
    config: Callable[..., TrainerConfig],
    member: Callable[..., Member],
    batch: Callable[..., TrainingBatch],
    lora: dict[str, object] | None,
) -> None:
    probed, undisturbed = Trainer(config(lora=lora)), Trainer(config(lora=lora, folder="undisturbed"))
    for update in (1, 2):
        score(probed, job())
        made = batch([member(1.0, version=update - 1), member(0.0, start=9, version=update - 1)], update=update)
        for trainer in (probed, undisturbed):
            trainer.train(made)
    files = [trainer.save().folder for trainer in (probed, undisturbed)]
    for name in {path.name for path in files[0].iterdir()}:
        assert (files[0] / name).read_bytes() == (files[1] / name).read_bytes(), name


LORA = {"rank": 4, "alpha": 8, "targets": ["q_proj", "down_proj"]}


@pytest.mark.parametrize("changes", [{}, {"publish_precision": "bfloat16"}, {"lora": LORA}])
def test_completions_of_a_version_before_are_scored_with_its_published_file(
    config: Callable[..., TrainerConfig],
    member: Callable[..., Member],
    batch: Callable[..., TrainingBatch],
    model_folder: Path,
    changes: dict[str, object],
) -> None:
    trainer, engine = (
        Trainer(config(optimizer={"learning_rate": 0.03}, **changes)),
        TorchEngine(TorchOptions(threads=1)),
    )
    base = trainer.checkpoint.folder.parent / BASE_FILE
    over = {"base": base, "base_digest": sha256(base.read_bytes())} if base.exists() else {}
    trainer.train(batch([member(1.0, version=0), member(0.0, start=9, version=0)], update=1))
    published = trainer.save().weights_path
    policy = replace(policy_of(trainer, model_folder), **over)
    trainer.train(batch([member(0.0, version=1), member(1.0, start=9, version=1)], update=2))
    completions, now = score(trainer, job())
    engine.load(policy)
    items = tuple((prompt, tuple(unpack_u32(ids))) for prompt, ids in zip(PROMPTS, completions, strict=True))
    node = array("f")
    for piece in engine.score(ScoreRequest(items=items, temperature=TEMPERATURE)):
        node.extend(piece)
    with trainer.at(published):
        then = score(trainer, job(*completions))[1]
    # A node of a bfloat16 run computes in bfloat16: only the numbers it computes with are the same.
    assert measure(node, then).mean <= BOUNDS["bfloat16" if changes.get("publish_precision") else "float32"][0]
    assert measure(now, then).mean > 1e-3
    with trainer.at(None):
        assert score(trainer, job(*completions))[1] == now
    with pytest.raises(BackendFailed), trainer.at(model_folder / "config.json"):
        pass
    assert score(trainer, job(*completions))[1] == now, "the numbers of now are back, bit by bit"


def test_the_spread_says_how_likely_drawn_tokens_are(config: Callable[..., TrainerConfig]) -> None:
    trainer = Trainer(config())
    asked = replace(job(tokens=24), spread=True)
    rounds = [
        value
        for seed in range(16)
        for value in score_probes(
            trainer.model, replace(asked, seed=100 * seed), temperature=1.0, autocast=False, device=CPU
        )
    ]
    off = sum(sum(v.logprobs) - sum(v.expected) for v in rounds)
    variance = sum(sum(v.variance) for v in rounds)
    # The completions are its own samples. Only reserved ids are left out of them, which the model rarely means.
    assert abs(off) < 5 * variance**0.5
    assert unpack_values(pack_values(tuple(rounds))) == tuple(rounds)
    assert all(len(v.expected) == len(v.variance) == len(v.logprobs) for v in rounds)


def test_a_prompt_that_the_model_does_not_know_is_refused(config: Callable[..., TrainerConfig]) -> None:
    trainer = Trainer(config())
    for prompt in (b"", pack_u32([VOCABULARY])):
        asked = ProbeJob(
            texts=(ProbeText(prompt_ids=prompt, completion_ids=b""),),
            tokens=4,
            seed=0,
            end_token_ids=(0,),
            vocabulary=VOCABULARY,
        )
        with pytest.raises(MalformedMessage, match="probe 0"):
            score_probes(trainer.model, asked, temperature=1.0, autocast=False, device=CPU)


def test_jobs_and_values_survive_the_socket(config: Callable[..., TrainerConfig]) -> None:
    assert unpack_job(pack_job(job())) == job()
    values = score_probes(Trainer(config()).model, job(), temperature=1.0, autocast=False, device=CPU)
    assert unpack_values(pack_values(values)) == values
    with pytest.raises(MalformedMessage):
        unpack_job({"op": "probe", "texts": [[b""]]})
