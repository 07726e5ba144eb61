"""Tokens a second of our vLLM backend child against bare `LLM.generate`, on the same prompts with the same settings.

    bare        `LLM.generate` as vLLM is started by default: engine and worker in processes of their own
    in_process  the same in one process whose threads do not spin (VLLM_ENABLE_V1_MULTIPROCESSING=0,
                OMP_WAIT_POLICY=passive), as our backend runs it
    child       our backend child: pipe and frames, one request a completion, its outcomes as they finish

Each way makes `--completions` completions of `--tokens` tokens of each of `--prompts` prompts, `--batch` at once. All
three stay up and take turns, their order turning from round to round, and medians of the rounds' ratios are taken, so
that what else happens on the machine hits all alike. Prompts differ from round to round, so that no prefix cache
answers from an earlier one. Times are of the clock and of the processors: the latter hardly feels other processes.

The model is a folder made by docs/recipes/smollm2.md; the environment comes from `make vllm-env`.
"""

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from subprocess import PIPE
from typing import Any

import anyio
import psutil
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from benchmarks._report import ROOT, write_report
from echo_node.backends.base import Completion, GenerationRequest, PolicyFiles
from echo_node.backends.child import ChildBackend, Patience, start_backend
from echo_node.backends.options import VllmOptions
from echo_node.model_shape import ModelShape
from tools.make_vllm_env import python_in, up_to_date

START_S = 900.0
ROUND_S = 1800.0
BLOCK_TOKENS = 32
"""As the backend sets it on a CPU."""


class Bare:
    """A process that runs `_vllm_bare.py`."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout = process.stdin, BufferedByteReceiveStream(process.stdout)

    async def line(self, limit_s: float) -> str:
        with anyio.fail_after(limit_s):
            return (await self._stdout.receive_until(b"\n", 65_536)).decode()

    async def run(self, prompts: list[list[int]], seeds: list[int]) -> tuple[float, float, int]:
        """Return seconds by the clock, seconds of processors, and tokens."""
        await self._stdin.send(json.dumps({"prompts": prompts, "seeds": seeds}).encode() + b"\n")
        answer = json.loads(await self.line(ROUND_S))
        return answer["seconds"], answer["cpu_seconds"], answer["tokens"]


@asynccontextmanager
async def start_bare(settings: dict[str, Any], environment: dict[str, str], log: Path) -> AsyncGenerator[Bare]:
    command = [str(python_in()), str(ROOT / "benchmarks" / "_vllm_bare.py"), json.dumps(settings)]
    with log.open("wb") as stderr:
        process = await anyio.open_process(
            command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=stderr,
            start_new_session=True,
            env={**os.environ, **environment},
        )
    async with process:
        bare = Bare(process)
        try:
            assert (await bare.line(START_S)).strip() == "ready", f"see {log}"
            yield bare
        finally:
            # With all that vLLM started, which outlives it.
            os.killpg(process.pid, signal.SIGKILL)


async def run_child(
    backend: ChildBackend, prompts: list[list[int]], seeds: list[int], tokens: int
) -> tuple[float, float, int]:
    requests = [
        GenerationRequest(request_id=i, prompt_ids=tuple(ids), max_tokens=tokens, temperature=1.0, seed=seed)
        for i, (ids, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]
    process = psutil.Process(backend.pid)
    before, start_s = process.cpu_times(), time.perf_counter()
    await backend.submit(requests)
    made = 0
    for _ in requests:
        outcome = await backend.next_outcome()
        assert isinstance(outcome, Completion), outcome
        made += len(outcome.token_ids)
    seconds, after = time.perf_counter() - start_s, process.cpu_times()
    return seconds, after.user + after.system - before.user - before.system, made


def make_policy(model: Path, arguments: argparse.Namespace) -> PolicyFiles:
    config = (model / "config.json").read_text(encoding="utf-8")
    last = ModelShape.parse(config).vocabulary_rows - 1
    return PolicyFiles(
        policy_version=0,
        artifact=model / "model.safetensors",
        artifact_digest=bytes(32),
        model_config_json=config,
        # An id that is never sampled, so that all completions have the same length.
        end_token_ids=(last,),
        vocabulary_size=last,
        max_prompt_tokens=arguments.prompt_tokens,
        max_completion_tokens=arguments.tokens,
    )


def bare_settings(model: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine's settings as our backend has them, log-probabilities after temperature included."""
    length = arguments.prompt_tokens + arguments.tokens
    shape = ModelShape.parse((model / "config.json").read_text(encoding="utf-8"))
    cache = (arguments.batch + 1) * (length // BLOCK_TOKENS + 1) * BLOCK_TOKENS * shape.cache_numbers_per_token * 4
    return {
        "tokens": arguments.tokens,
        "engine": {
            "model": str(model),
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "max_model_len": length,
            "max_num_seqs": arguments.batch,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": cache,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "enforce_eager": not arguments.compiled,
        },
    }


def work(arguments: argparse.Namespace, round_number: int) -> tuple[list[list[int]], list[int]]:
    random = Random(round_number)
    prompts: list[list[int]] = []
    for _ in range(arguments.prompts):
        ids = [random.randrange(1000, 40_000) for _ in range(arguments.prompt_tokens)]
        prompts += [ids] * arguments.completions
    return prompts, [random.randrange(2**31) for _ in prompts]


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, list[tuple[float, float]]]:
    """Return seconds of the clock and of processors, by way and round."""
    model = arguments.model.resolve()
    quiet = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    alone = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_WAIT_POLICY": "passive"}
    alone |= {} if arguments.compiled else {"TORCHDYNAMO_DISABLE": "1"}
    settings = bare_settings(model, arguments)
    options = VllmOptions(batch=arguments.batch, precision="float32", eager=not arguments.compiled)
    async with AsyncExitStack() as stack:
        bare = await stack.enter_async_context(start_bare(settings, quiet, folder / "bare.log"))
        near = await stack.enter_async_context(start_bare(settings, {**quiet, **alone}, folder / "near.log"))
        log_path, patience = folder / "child.log", Patience(start_s=START_S)
        child = await stack.enter_async_context(
            start_backend(options, log_path=log_path, nice=0, python=str(python_in()), patience=patience)
        )
        await child.load(make_policy(model, arguments))
        ways = {
            "bare": lambda p, s: bare.run(p, s),
            "in_process": lambda p, s: near.run(p, s),
            "child": lambda p, s: run_child(child, p, s, arguments.tokens),
        }
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for round_number in range(arguments.rounds + 1):
            order = list(ways)[round_number % 3 :] + list(ways)[: round_number % 3]
            prompts, seeds = work(arguments, round_number)
            for name in order:
                seconds, cpu_s, made = await ways[name](prompts, seeds)
                assert made == len(prompts) * arguments.tokens, f"{name} made {made} tokens"
                # The first round warms up.
                if round_number:
                    taken[name].append((seconds, cpu_s))
    return taken


def summarise(taken: dict[str, list[tuple[float, float]]], arguments: argparse.Namespace) -> dict[str, Any]:
    tokens = arguments.prompts * arguments.completions * arguments.tokens
    result: dict[str, Any] = {
        "model": arguments.model.name,
        "batch": arguments.batch,
        "prompts": arguments.prompts,
        "prompt_tokens": arguments.prompt_tokens,
        "completions_each": arguments.completions,
        "tokens_each": arguments.tokens,
        "rounds": arguments.rounds,
        "compiled": arguments.compiled,
    }
    for name, rounds in taken.items():
        result[f"{name}_tokens_per_s"] = round(tokens / statistics.median(seconds for seconds, _ in rounds), 1)
        result[f"{name}_tokens_per_cpu_s"] = round(tokens / statistics.median(cpu for _, cpu in rounds), 1)
    for base in ("bare", "in_process"):
        pairs = list(zip(taken[base], taken["child"], strict=True))
        result[f"child_over_{base}"] = round(statistics.median(b[0] / c[0] for b, c in pairs), 3)
        result[f"child_over_{base}_cpu"] = round(statistics.median(b[1] / c[1] for b, c in pairs), 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face folder, such as models/smollm2")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--completions", type=int, default=8, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=48, help="of each completion")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--compiled", action="store_true", help="torch.compile on both sides")
    arguments = parser.parse_args()
    if not up_to_date():
        parser.error("the environment of the vLLM backend is missing or out of date; make it: make vllm-env")
    with tempfile.TemporaryDirectory() as folder:
        taken = anyio.run(measure, arguments, Path(folder))
    write_report("backend_vllm", summarise(taken, arguments), packages=("torch", "transformers"))


if __name__ == "__main__":
    main()
