"""The trainer as a real child process: one rank, two ranks, and every way in which either side can end."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from echo_coordinator.commands.rollback import roll_back
from echo_coordinator.run_folder import RunFolder
from echo_coordinator.trainer import batch as batches
from echo_coordinator.trainer.batch import Group, Member, TrainingBatch
from echo_coordinator.trainer.client import BatchRefused, TrainerClient, start_trainer
from echo_coordinator.trainer.engine import Trainer
from echo_coordinator.trainer.probe_job import ProbeJob, ProbeRefused, ProbeText
from echo_coordinator.trainer.probing import score_probes
from echo_coordinator.trainer.settings import TrainerConfig
from echo_swarm.codec import pack_f32, pack_u32
from echo_swarm.errors import BackendFailed

pytestmark = pytest.mark.anyio

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 32,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}

PARENT = """
import sys, anyio
from pathlib import Path
from echo_coordinator.trainer.client import start_trainer
from echo_coordinator.trainer.settings import load_config

async def main(folder):
    async with start_trainer(load_config(folder / "given.json"), folder, folder / "trainer.log") as trainer:
        print(trainer.pid, flush=True)
        await anyio.sleep_forever()

anyio.run(main, Path(sys.argv[1]))
"""


@pytest.fixture
def anyio_backend() -> str:
    """The coordinator runs on asyncio only."""
    return "asyncio"


@pytest.fixture
def config(tmp_path: Path) -> TrainerConfig:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return at(tmp_path / "checkpoints", TrainerConfig(model_folder=folder, checkpoint_folder=folder))


def at(
    checkpoints: Path, config: TrainerConfig, *, lora: dict[str, object] | None = None, **optimizer: object
) -> TrainerConfig:
    tuned = {"learning_rate": 1e-3, "threads": 1, "device": "cpu", "micro_batch_size": 4, **optimizer}
    folders = {"model_folder": config.model_folder, "checkpoint_folder": checkpoints}
    return TrainerConfig.model_validate({**folders, "optimizer": tuned, "lora": lora})


def make_batch(update: int, *, members: int = 8, length: int = 6) -> TrainingBatch:
    def member(index: int) -> Member:
        size = length + index
        return Member(
            prompt_ids=pack_u32([1, 2, 3]),
            token_ids=pack_u32([(7 * index + 3 * step) % 32 for step in range(size)]),
            logprobs=pack_f32([-3.4] * size),
            reward=float(index % 3 == 0),
            oldest_version=update - 1,
            newest_version=update - 1,
            backend="torch",
            precision="float32",
            peer_id=f"peer-{index % 2}",
            finish_reason="stop",
        )

    group = Group(group_id=40 + update, members=tuple(member(index) for index in range(members)))
    return TrainingBatch(update=update, policy_version=update - 1, groups=(group,), data_position={"index": update})


def write(folder: Path, batch: TrainingBatch) -> Path:
    path = folder / f"batch-{batch.update}"
    batches.write(batch, path)
    return path


def family(trainer: TrainerClient) -> list[psutil.Process]:
    leader = psutil.Process(trainer.pid)
    return [leader, *leader.children(recursive=True)]


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=20)
    return not alive


async def test_a_fresh_run_trains_stops_cleanly_and_continues_where_it_stood(config: TrainerConfig, tmp_path: Path):
    log = tmp_path / "log" / "trainer.log"
    async with start_trainer(config, tmp_path / "run", log) as trainer:
        ready = trainer.ready
        assert (ready.update, ready.policy_version, ready.checkpoint) == (0, 0, "v00000000")
        assert ready.weights_path.is_file() and ready.parameters > 10_000 and ready.warnings == ()
        processes = family(trainer)
        with pytest.raises(BatchRefused, match="the trainer's next is update 1"):
            await trainer.train(write(tmp_path, make_batch(2)), timeout_s=60)
        with pytest.raises(BatchRefused, match="cannot read batch"):
            await trainer.train(tmp_path / "nowhere", timeout_s=60)
        results = [await trainer.train(write(tmp_path, make_batch(update)), timeout_s=60) for update in (1, 2)]
    assert trainer.exit_code == 0 and gone(processes)
    assert [result.policy_version for result in results] == [1, 2]
    assert results[1].metrics["gradient_norm"] > 0 and results[1].metrics["tokens"] == 76
    json.dumps(results[1].metrics, allow_nan=False)

    # The same code in this process gives the same bits.
    here = Trainer(at(tmp_path / "here", config))
    for update in (1, 2):
        here.train(make_batch(update))
    assert here.save().weights_path.read_bytes() == results[1].weights_path.read_bytes()

    async with start_trainer(config, tmp_path / "run", log) as trainer:
        assert (trainer.ready.update, trainer.ready.policy_version) == (2, 2)
        assert trainer.ready.consumed_groups == (42,) and trainer.ready.data_position == {"index": 2}
        here.train(make_batch(3))
        third = await trainer.train(write(tmp_path, make_batch(3)), timeout_s=60)
    assert here.save().weights_path.read_bytes() == third.weights_path.read_bytes()


async def test_two_ranks_give_the_weights_of_one_and_all_end(config: TrainerConfig, tmp_path: Path):
    one = Trainer(at(tmp_path / "one", config, minibatches=2))
    two = at(tmp_path / "two", config, minibatches=2, ranks=2)
    async with start_trainer(two, tmp_path / "run", tmp_path / "trainer.log") as trainer:
        processes = family(trainer)
        assert len(processes) == 3  # torchrun and two ranks
        for update in (1, 2):
            alone = one.train(make_batch(update))
            together = await trainer.train(write(tmp_path, make_batch(update)), timeout_s=60)
    assert trainer.exit_code == 0 and gone(processes)
    left, right = load_file(one.save().weights_path), load_file(together.weights_path)
    assert left.keys() == right.keys()
    assert all(torch.allclose(left[name], right[name], atol=1e-5) for name in left)
    assert together.metrics["gradient_norm"] == pytest.approx(alone["gradient_norm"], rel=1e-4)
    assert together.metrics["ratio"]["all"]["mean"] == pytest.approx(alone["ratio"]["all"]["mean"], rel=1e-5)
    assert together.metrics["ratio"]["by_peer"].keys() == alone["ratio"]["by_peer"].keys()


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8, "targets": ["q_proj", "down_proj"]}])
async def test_probes_between_the_updates_of_two_ranks_are_answered_by_one_and_change_nothing(
    config: TrainerConfig, tmp_path: Path, lora: dict[str, object] | None
):
    prompts = (pack_u32([1, 2, 3]), pack_u32([9]))
    asked = ProbeJob(
        texts=tuple(ProbeText(prompt_ids=prompt, completion_ids=pack_u32([4, 30, 7])) for prompt in prompts),
        tokens=8,
        seed=1,
        end_token_ids=(0,),
        vocabulary=32,
    )
    sampled = replace(asked, texts=tuple(ProbeText(prompt_ids=prompt, completion_ids=b"") for prompt in prompts))
    unknown = replace(asked, texts=(ProbeText(prompt_ids=pack_u32([32]), completion_ids=b""),))
    one = Trainer(at(tmp_path / "one", config, lora=lora))
    expect = partial(score_probes, one.model, temperature=1.0, autocast=False, device=torch.device("cpu"))
    two = at(tmp_path / "two", config, lora=lora, ranks=2)
    async with start_trainer(two, tmp_path / "run", tmp_path / "trainer.log") as trainer:
        for update in (1, 2):
            for job in (asked, sampled):
                found, expected = await trainer.probe(job, timeout_s=60), expect(job)
                assert [value.completion_ids for value in found] == [value.completion_ids for value in expected]
                for mine, theirs in zip(found, expected, strict=True):
                    assert mine.logprobs.tolist() == pytest.approx(theirs.logprobs.tolist(), abs=1e-5)
            with pytest.raises(ProbeRefused, match="outside the vocabulary of 32"):
                await trainer.probe(unknown, timeout_s=60)
            one.train(make_batch(update))
            together = await trainer.train(write(tmp_path, make_batch(update)), timeout_s=60)
    assert trainer.exit_code == 0
    left, right = load_file(one.save().weights_path), load_file(together.weights_path)
    assert left.keys() == right.keys()
    assert all(torch.allclose(left[name], right[name], atol=1e-5) for name in left)


async def test_a_trainer_that_cannot_start_says_why(config: TrainerConfig, tmp_path: Path):
    (config.model_folder / "config.json").unlink()
    with pytest.raises(BackendFailed, match=r"no config\.json"):
        async with start_trainer(config, tmp_path / "run", tmp_path / "trainer.log"):
            pass


async def test_a_killed_rank_is_an_error_that_names_the_signal_and_nothing_is_lost(
    config: TrainerConfig, tmp_path: Path
):
    async with start_trainer(config, tmp_path / "run", tmp_path / "trainer.log") as trainer:
        await trainer.train(write(tmp_path, make_batch(1)), timeout_s=60)
        os.kill(trainer.pid, signal.SIGKILL)
        with pytest.raises(BackendFailed, match="SIGKILL"):
            await trainer.train(write(tmp_path, make_batch(2)), timeout_s=60)
    assert Trainer(config).state.update == 1


async def test_silence_is_bounded_and_leaving_in_the_middle_ends_the_process(config: TrainerConfig, tmp_path: Path):
    async with start_trainer(config, tmp_path / "run", tmp_path / "trainer.log") as trainer:
        processes = family(trainer)
        os.kill(trainer.pid, signal.SIGSTOP)
        with pytest.raises(BackendFailed, match="no answer"):
            await trainer.train(write(tmp_path, make_batch(1)), timeout_s=0.2)
    assert gone(processes)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_process_dies_with_a_killed_coordinator(config: TrainerConfig, tmp_path: Path, ranks: int):
    given = at(config.checkpoint_folder, config, ranks=ranks)
    (tmp_path / "given.json").write_text(given.model_dump_json())
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        leader = psutil.Process(int(parent.stdout.readline()))
        processes = [leader, *leader.children(recursive=True)]
        assert len(processes) == (1 if ranks == 1 else 3)
        parent.kill()
    assert gone(processes)


def test_rank_zero_ends_when_the_socket_closes_even_without_help_from_the_kernel(config: TrainerConfig, tmp_path: Path):
    (tmp_path / "given.json").write_text(config.model_dump_json())
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/s")
        listener.listen(1)
        arguments = ["--config", str(tmp_path / "given.json"), "--socket", f"{folder}/s"]
        with subprocess.Popen([sys.executable, "-m", "echo_coordinator.trainer.process", *arguments]) as rank:
            connection, _ = listener.accept()
            connection.close()
            assert rank.wait(timeout=60) == 75


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8, "targets": ["q_proj"]}])
async def test_a_trainer_goes_on_from_a_version_that_was_rolled_back_to_with_its_moments(
    config: TrainerConfig, tmp_path: Path, lora: dict[str, object] | None
):
    run = RunFolder(tmp_path / "run")
    run.root.mkdir()
    run.settings.touch()
    config = at(run.checkpoints, config, lora=lora)
    async with start_trainer(config, tmp_path, tmp_path / "first.log") as trainer:
        for update in (1, 2):
            await trainer.train(write(tmp_path, make_batch(update)), timeout_s=120)
    done = roll_back(run.root, 1)
    one, three = run.checkpoints / "v00000001", run.checkpoints / "v00000003"
    weights = "adapter.safetensors" if lora else "model.safetensors"
    async with start_trainer(config, tmp_path, tmp_path / "second.log") as trainer:
        ready = trainer.ready
        assert (ready.policy_version, ready.rolled_back_to, ready.consumed_groups) == (done.version, 1, ())
        for name in (weights, "optimizer.safetensors"):
            assert (three / name).read_bytes() == (one / name).read_bytes()
        batch = replace(make_batch(ready.update + 1), policy_version=done.version)
        result = await trainer.train(write(tmp_path, batch), timeout_s=120)
    assert (result.policy_version, result.update) == (done.version + 1, ready.update + 1)
    before, after = (load_file(folder / "optimizer.safetensors") for folder in (three, run.checkpoints / "v00000004"))
    steps = [name for name in before if "step" in name]
    assert steps and all(after[name] == before[name] + 1 for name in steps)
    state = json.loads((run.checkpoints / "v00000004" / "state.json").read_text())
    assert state["rolled_back_to"] is None
