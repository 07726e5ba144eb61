"""The checks of `make check-gpu`, each on whatever device it is given: `python -m tools.gpu_checks NAME DEVICE FOLDER`.

    engines   self-test of the backend ─► versions A, B, A of a small model ─► log-probabilities against transformers
              (torch, vllm; llama_cpp: the self-test with its two files)         in float32 on the CPU
    trainer   the same batches in bfloat16 on the device and in float32 on the CPU ─► gradients, log-probabilities;
              stopped and continued against straight through; an adapter

A check returns its figures, or raises CheckFailed with what is wrong. As a program, it prints one line of JSON.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import anyio
import torch
from safetensors.torch import load_file
from transformers.utils import logging as transformers_logging

from echo_coordinator.trainer import batch as batches
from echo_coordinator.trainer.batch import Group, Member, TrainingBatch
from echo_coordinator.trainer.client import start_trainer
from echo_coordinator.trainer.engine import Trainer
from echo_coordinator.trainer.ranks import Ranks
from echo_coordinator.trainer.settings import TrainerConfig
from echo_node.backends.base import Completion, GenerationRequest, PolicyFiles
from echo_node.backends.child import ChildBackend, Patience, start_backend
from echo_node.backends.options import EngineOptions, LlamaCppOptions, TorchOptions, VllmOptions
from echo_node.backends.self_test import run_self_test
from echo_swarm.codec import pack_f32, pack_u32
from echo_swarm.errors import EchoError
from tools.gpu_models import expected_logprobs, write_folder, write_large, write_policy

LIMITS = {"float32": 1e-3, "float16": 0.01, "bfloat16": 0.06}
"""Mean |log-probability - expected one|, nats; three times what was measured on CPUs, or more."""
APART = 5.0
"""How many times nearer a version must be to its own model than to another."""
VERSIONS = (1, 2, 1)
"""Seeds of the models that are loaded one after the other."""
ALIKE = 0.97
"""Least cosine between the updates of two precisions."""
CONTINUED = 0.02
"""Largest distance between a run that was continued and one that was not, in lengths of what was learned. 0 on CPUs; on
GPUs sums have no fixed order."""


class CheckFailed(EchoError):
    """The device computes something else than it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Where and how a check runs."""

    device: str
    """`cpu` or `cuda`."""
    folder: Path
    """Empty; for files and logs."""
    vllm_python: str = sys.executable
    """Interpreter of an environment with vLLM."""
    speed: bool = True
    """Also take figures of speed with a model of 135 M parameters."""


Check = Callable[[Setup], Awaitable[dict[str, Any]]]


async def check_torch(setup: Setup) -> dict[str, Any]:
    """The torch engine in both precisions that a run may use."""
    figures: dict[str, Any] = {}
    for precision in ("float32", "bfloat16"):
        options = TorchOptions(device=setup.device, precision=precision, batch=32, threads=_threads(setup))
        figures[precision] = await _examine(setup, options, sys.executable, f"torch-{precision}")
    return figures


async def check_vllm(setup: Setup) -> dict[str, Any]:
    """The vLLM engine, in the precision that it would choose itself."""
    options = VllmOptions(batch=32, threads=_threads(setup))
    return await _examine(setup, options, setup.vllm_python, "vllm")


async def check_llama_cpp(setup: Setup) -> dict[str, Any]:
    """The llama.cpp engine with the files that come with this package, F32 and Q8_0."""
    options = LlamaCppOptions(batch=32, threads=_threads(setup), gpu_layers=0 if setup.device == "cpu" else -1)
    async with start_backend(options, log_path=setup.folder / "llama_cpp.log", nice=0) as backend:
        device = backend.report.device
        if setup.device != "cpu" and "gpu" not in device:
            raise CheckFailed(f"llama.cpp runs on {device}; build it with CMAKE_ARGS=-DGGML_CUDA=on")
        findings = await run_self_test(backend, options)
    return {"device": device, "self_test": [asdict(finding) for finding in findings]}


async def check_trainer(setup: Setup) -> dict[str, Any]:
    """The trainer in bfloat16 on the device, against float32 on the CPU."""
    model = write_folder(setup.folder / "model", seed=1)
    batch_list = [_batch(update) for update in range(1, 5)]

    def train(name: str, **changes: Any) -> list[dict[str, Any]]:
        return _train_here(_config(setup, model, name, **changes), batch_list)

    wanted = train("float32-cpu", device="cpu")
    found = train("bfloat16", precision="bfloat16")
    adapted = train("adapter", precision="bfloat16", lora={"rank": 4, "alpha": 8.0})
    name = "bfloat16-continued"
    await _train(setup.folder / name, _config(setup, model, name, precision="bfloat16"), batch_list, cuts=(2, 4))
    gap = found[0]["logprob_gap"]["torch/float32"]
    start = _weights(model / "model.safetensors")
    ends = {
        name: _weights(setup.folder / name / "checkpoints" / f"v{len(batch_list):08d}" / "model.safetensors") - start
        for name in ("float32-cpu", "bfloat16", "bfloat16-continued")
    }
    moved = ends["bfloat16"].norm()
    figures: dict[str, Any] = {
        "logprob_gap_bfloat16": gap,
        "gradient_norms_float32_cpu": [metrics["gradient_norm"] for metrics in wanted],
        "gradient_norms_bfloat16": [metrics["gradient_norm"] for metrics in found],
        "gradient_norms_adapter": [metrics["gradient_norm"] for metrics in adapted],
        "cosine_of_updates": float(torch.cosine_similarity(ends["bfloat16"], ends["float32-cpu"], dim=0)),
        "distance_when_continued": float((ends["bfloat16"] - ends["bfloat16-continued"]).norm() / moved),
        "weights": str(start.dtype).removeprefix("torch."),
    }
    if setup.speed:
        figures["tokens_per_s_135m"] = await _training_speed(setup)
    _require(gap <= LIMITS["bfloat16"], f"log-probabilities are {gap:.2g} nats from those of float32", figures)
    _require(figures["cosine_of_updates"] >= ALIKE, "bfloat16 learns something else than float32 does", figures)
    _require(figures["distance_when_continued"] <= CONTINUED, "a continued run goes another way", figures)
    return figures


CHECKS: dict[str, Check] = {
    "trainer": check_trainer,
    "torch": check_torch,
    "vllm": check_vllm,
    "llama_cpp": check_llama_cpp,
}
"""In the order in which they run."""


# Engines.


async def _examine(setup: Setup, options: EngineOptions, python: str, name: str) -> dict[str, Any]:
    """Self-test, three versions, and speed, in one child."""
    async with start_backend(
        options, log_path=setup.folder / f"{name}.log", nice=0, python=python, patience=Patience(start_s=300.0)
    ) as backend:
        report = backend.report
        findings = await run_self_test(backend, options)
        figures: dict[str, Any] = {"build": report.build, "device": report.device, "precision": report.precision}
        figures["self_test"] = [asdict(finding) for finding in findings]
        figures["versions"] = [await _version(setup, backend, version, name) for version, _ in enumerate(VERSIONS)]
        limit = LIMITS[report.precision]
        for version in figures["versions"]:
            own, other = version["gap_to_its_model"], version["gap_to_another"]
            _require(own <= limit, f"version {version['version']} is {own:.2g} nats from its model", figures)
            _require(other >= APART * own, f"version {version['version']} does not stand out", figures)
        if setup.speed:
            figures["tokens_per_s_135m"] = await _sampling_speed(backend, write_large(setup.folder / "large"))
        return figures


async def _version(setup: Setup, backend: ChildBackend, version: int, name: str) -> dict[str, Any]:
    """Load a version, sample with it, and compare with its model and another."""
    seed = VERSIONS[version]
    policy = write_policy(setup.folder / f"{name}-{version}", seed, version)
    began_s = time.perf_counter()
    await backend.load(policy)
    load_s = time.perf_counter() - began_s
    random = Random(version)
    prompts = [tuple(random.randrange(255) for _ in range(1 + 11 * i % 60)) for i in range(8)]
    requests = [
        GenerationRequest(
            request_id=i, prompt_ids=prompts[i // 6], max_tokens=24, temperature=(1.0, 0.7)[i % 2], seed=i
        )
        for i in range(48)
    ]
    await backend.submit(requests)
    gaps: dict[int, list[float]] = {1: [], 2: []}
    for _ in requests:
        outcome = await backend.next_outcome()
        if not isinstance(outcome, Completion):
            raise CheckFailed(f"version {version}: {outcome.reason}")
        asked, ids = requests[outcome.request_id], outcome.token_ids.tolist()
        for model, found in gaps.items():
            # That another model is far off shows with a few.
            if model == seed or asked.request_id < 6:
                wanted = expected_logprobs(model, asked.prompt_ids, ids, asked.temperature)
                found += (torch.tensor(outcome.logprobs) - wanted).abs().tolist()
    return {
        "version": version,
        "load_s": round(load_s, 2),
        "gap_to_its_model": statistics.fmean(gaps[seed]),
        "largest": max(gaps[seed]),
        "gap_to_another": statistics.fmean(gaps[3 - seed]),
    }


async def _sampling_speed(backend: ChildBackend, policy: PolicyFiles) -> float:
    """Return completion tokens a second, 128 completions of 128 tokens; the second time, when all is warm."""
    await backend.load(policy)
    speeds: list[float] = []
    for turn in range(2):
        requests = [
            GenerationRequest(
                request_id=i, prompt_ids=tuple(range(1, 65)), max_tokens=128, temperature=1.0, seed=1000 * turn + i
            )
            for i in range(128)
        ]
        began_s, tokens = time.perf_counter(), 0
        await backend.submit(requests)
        for _ in requests:
            outcome = await backend.next_outcome()
            tokens += len(outcome.token_ids) if isinstance(outcome, Completion) else 0
        speeds.append(tokens / (time.perf_counter() - began_s))
    return round(speeds[-1], 1)


# The trainer.


def _config(
    setup: Setup, model: Path, name: str, *, device: str = "", precision: str = "float32", **changes: Any
) -> TrainerConfig:
    optimizer = {"learning_rate": 1e-3, "precision": precision, "device": device or setup.device, "threads": 1}
    folder = setup.folder / name / "checkpoints"
    given = {"model_folder": model, "checkpoint_folder": folder, "keep_checkpoints": 10, "optimizer": optimizer}
    return TrainerConfig.model_validate({**given, **changes})


def _train_here(config: TrainerConfig, batch_list: list[TrainingBatch]) -> list[dict[str, Any]]:
    """Train all batches in this process. Returns their metrics; what was learned is in the newest checkpoint."""
    trainer = Trainer(config, Ranks.from_environment(config.optimizer.device))
    metrics = [trainer.train(batch) for batch in batch_list]
    trainer.save()
    return metrics


async def _train(
    folder: Path, config: TrainerConfig, batch_list: list[TrainingBatch], cuts: tuple[int, ...]
) -> list[dict[str, Any]]:
    """Train all batches in trainer processes; a new one begins after each of `cuts`. Returns their metrics."""
    await anyio.Path(folder).mkdir(parents=True)
    metrics: list[dict[str, Any]] = []
    for end in cuts:
        async with start_trainer(config, folder, folder / "trainer.log") as trainer:
            if trainer.ready.update != len(metrics):
                raise CheckFailed(f"the trainer continues at {trainer.ready.update} instead of {len(metrics)}")
            for batch in batch_list[len(metrics) : end]:
                path = folder / f"batch-{batch.update}"
                batches.write(batch, path)
                metrics.append((await trainer.train(path, timeout_s=600)).metrics)
    return metrics


def _batch(update: int, *, groups: int = 6, length: int = 24, vocabulary: int = 256) -> TrainingBatch:
    """Return random completions with rewards of 0 and 1; their log-probabilities are those of the small model."""
    random = Random(update)

    def member(prompt: list[int], reward: float) -> Member:
        ids = [random.randrange(vocabulary - 1) for _ in range(length)]
        small = vocabulary == 256
        logprobs = expected_logprobs(1, prompt, ids, 1.0).tolist() if small else [-10.8] * length
        return Member(
            prompt_ids=pack_u32(prompt),
            token_ids=pack_u32(ids),
            logprobs=pack_f32(logprobs),
            reward=reward,
            oldest_version=0,
            newest_version=0,
            backend="torch",
            precision="float32",
            peer_id="peer",
            finish_reason="length",
        )

    made: list[Group] = []
    for index in range(groups):
        prompt = [random.randrange(vocabulary - 1) for _ in range(8 + index)]
        members = tuple(member(prompt, float(place % 2)) for place in range(4))
        made.append(Group(group_id=100 * update + index, members=members))
    return TrainingBatch(update=update, policy_version=update - 1, groups=tuple(made))


async def _training_speed(setup: Setup) -> float:
    """Return completion tokens a second of the second update of 64 completions of 256 tokens, in bfloat16."""
    write_large(setup.folder / "large")
    large = [_batch(update, groups=16, length=256, vocabulary=49_152) for update in (1, 2)]
    config = _config(setup, setup.folder / "large", "speed", precision="bfloat16")
    metrics = await _train(setup.folder / "speed", config, large, (2,))
    return round(metrics[-1]["tokens_per_s"], 1)


def _weights(path: Path) -> torch.Tensor:
    """Return all weights of a file, end to end."""
    tensors = load_file(path)
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def _require(holds: bool, problem: str, figures: dict[str, Any]) -> None:
    if not holds:
        raise CheckFailed(f"{problem}; {json.dumps(figures)}")


def _threads(setup: Setup) -> int:
    return 1 if setup.device == "cpu" else 0


def main() -> int:
    """Run one check; print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CHECKS)
    parser.add_argument("device", choices=["cpu", "cuda"])
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--no-speed", action="store_true")
    given = parser.parse_args()
    transformers_logging.disable_progress_bar()
    # What is computed here are references with a tiny model, beside the processes that are looked at.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="echo-check-") as folder:
        setup = Setup(device=given.device, folder=Path(folder), vllm_python=given.vllm_python, speed=not given.no_speed)
        try:
            figures = anyio.run(CHECKS[given.name], setup)
        except EchoError as e:
            print(json.dumps({"problem": str(e)}))
            return 1
    print(json.dumps({"figures": figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
