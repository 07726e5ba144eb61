"""What an audit sees of honest completions, by backend and precision; and how often its rules would be wrong.

    python -m benchmarks.audit_gaps sample models/smollm2 torch/float32 OUT # in the environment of that backend
    python -m benchmarks.audit_gaps judge models/smollm2 OUT...             # where torch and transformers are
    python -m benchmarks.audit_gaps run MODEL[:COMPLETIONS:TOKENS]...       # both, all classes of torch and llama.cpp

`sample` has a backend's engine sample completions of text prompts at temperature 1, as a node does, and writes them
down. `judge` scores them as the trainer does in an audit, cuts them into shares of one peer, and applies
`state.audit_rules` with the bounds of their class, before and after others of it were measured. It also counts what
the signs of `state.plausibility` would have noticed.
"""

import argparse
import json
import random
import statistics
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._report import write_report
from echo_coordinator.state import plausibility
from echo_coordinator.state.audit_rules import (
    NOTHING,
    AuditVerdict,
    Recomputed,
    find,
    strays_of,
    uniforms_of,
)
from echo_coordinator.state.probe_rules import BOUNDS, allowed_gap
from echo_node.backends.base import Completion, Engine, GenerationRequest, PolicyFiles
from echo_swarm.trajectory import DRAW_BY_SEED

TEXTS = (
    "What is 17 + 25? Think step by step.",
    "Write a short story about a lighthouse keeper.",
    "List three reasons why the sky is blue.",
    "Translate to French: the cat sleeps on the roof.",
    "Explain how a bicycle stays upright.",
    "def fibonacci(n):",
    "The capital of Australia is",
    "Give me a recipe for tomato soup.",
)
CLASSES = ("torch/float32", "torch/bfloat16", "llama_cpp/f16", "llama_cpp/q8_0", "llama_cpp/q4_0")
SUMS = tuple(f"{a}+{b}=" for a, b in ((12, 34), (7, 88), (45, 16), (90, 9), (23, 23), (61, 27), (5, 70), (38, 49)))


def prompts(folder: Path) -> list[list[int]]:
    """Return prompts of the model: chat of a model with a template, sums of the demo's."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    if tokenizer.chat_template is None:
        return [list(tokenizer(text)["input_ids"]) for text in SUMS]
    turns = [[{"role": "user", "content": text}] for text in TEXTS]
    return [tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False) for turn in turns]


def _engine(backend: str, precision: str, folder: Path, scratch: Path, threads: int) -> tuple[Engine, Path]:
    weights = folder / "model.safetensors"
    if backend == "torch":
        from echo_node.backends.options import TorchOptions
        from echo_node.backends.torch_engine import TorchEngine

        return TorchEngine(
            TorchOptions.model_validate({"threads": threads, "batch": 8, "precision": precision})
        ), weights
    if backend == "vllm":
        from echo_node.backends.options import VllmOptions
        from echo_node.backends.vllm_engine import VllmEngine

        return VllmEngine(VllmOptions.model_validate({"batch": 8, "precision": precision})), weights
    from echo_coordinator.publisher.gguf.write import write_gguf
    from echo_node.backends.llama_cpp_engine import LlamaCppEngine
    from echo_node.backends.options import LlamaCppOptions

    file = scratch / "model.gguf"
    write_gguf(weights, (folder / "config.json").read_text(encoding="utf-8"), file, precision)
    options = {"batch": 8, "threads": threads, "gpu_layers": 0}
    return LlamaCppEngine(LlamaCppOptions.model_validate(options)), file


def sample(arguments: argparse.Namespace) -> None:
    """Have a class sample, and write its completions down."""
    backend, precision = arguments.kind.split("/")
    asked = prompts(arguments.model)
    config_json = (arguments.model / "config.json").read_text(encoding="utf-8")
    config = json.loads(config_json)
    end = config["eos_token_id"] if isinstance(config["eos_token_id"], int) else config["eos_token_id"][0]
    with tempfile.TemporaryDirectory() as scratch:
        engine, file = _engine(backend, precision, arguments.model, Path(scratch), arguments.threads)
        engine.load(
            PolicyFiles(
                policy_version=0,
                artifact=file,
                artifact_digest=bytes(32),
                model_config_json=config_json,
                end_token_ids=(end,),
                vocabulary_size=config["vocab_size"],
                max_prompt_tokens=max(map(len, asked)),
                max_completion_tokens=arguments.tokens,
            )
        )
        requests = [
            GenerationRequest(
                request_id=i,
                prompt_ids=tuple(asked[i % len(asked)]),
                max_tokens=arguments.tokens,
                temperature=1.0,
                seed=arguments.seed + i,
            )
            for i in range(arguments.completions)
        ]
        engine.submit(requests)
        done: list[Completion] = []
        while engine.pending:
            done += [outcome for outcome in engine.step() if isinstance(outcome, Completion)]
        if close := getattr(engine, "close", None):
            close()
    made = [
        [asked[c.request_id % len(asked)], c.token_ids.tolist(), c.logprobs.tolist(), arguments.seed + c.request_id]
        for c in done
    ]
    arguments.out.write_text(json.dumps({"class": arguments.kind, "completions": made}), encoding="utf-8")
    print(f"{arguments.kind}: {sum(len(ids) for _, ids, _, _ in made)} tokens")


def score(model: Any, made: list[Any], *, follows: bool, temperature: float = 1.0) -> list[dict[str, list[float]]]:
    """Return for each completion what an audit compares; with its seed's uniforms if the class `follows` seeds."""
    import torch

    from echo_coordinator.trainer.probe_job import ProbeJob, ProbeText
    from echo_coordinator.trainer.probing import score_probes
    from echo_swarm.codec import pack_u32

    job = ProbeJob(
        texts=tuple(ProbeText(prompt_ids=pack_u32(p), completion_ids=pack_u32(ids)) for p, ids, *_ in made),
        tokens=1,
        seed=0,
        end_token_ids=(0,),
        vocabulary=1,
        spread=True,
    )
    values = score_probes(model, job, temperature=temperature, autocast=False, device=torch.device("cpu"))
    return [
        {
            "claimed": array("f", claimed).tolist(),
            "logprobs": v.logprobs.tolist(),
            "expected": v.expected.tolist(),
            "variance": v.variance.tolist(),
            "below": v.below.tolist() if follows else [],
            "uniforms": uniforms_of(seed, len(claimed)).tolist() if follows else [],
        }
        for v, (_, _, claimed, seed) in zip(values, made, strict=True)
    ]


def shares(scored: list[dict[str, list[float]]], size: int, rounds: int) -> Iterator[list[Recomputed]]:
    """Draw completions as one peer would have contributed them to a group, `rounds` times all of them."""
    draw = random.Random(size)
    made = [_recomputed(one) for one in scored]
    for _ in range(rounds):
        order = draw.sample(made, len(made))
        yield from (order[i : i + size] for i in range(0, len(order) - size + 1, size))


def _recomputed(one: dict[str, list[float]]) -> Recomputed:
    return Recomputed(**{name: array("d" if name == "uniforms" else "f", values) for name, values in one.items()})


def followed(scored: list[dict[str, list[float]]], bound: float) -> dict[str, float]:
    """Return how far uniforms are from tokens, for the seeds drawn with and for others; 1: as if by chance."""
    honest = [_recomputed(one) for one in scored]
    others = [replace(one, uniforms=uniforms_of(number, len(one.claimed))) for number, one in enumerate(honest)]
    chance = strays_of(honest, 0.5).room / 0.5
    return {
        "own_seeds": float(f"{strays_of(honest, bound).sum / chance:.2g}"),
        "other_seeds": float(f"{strays_of(others, bound).sum / chance:.2g}"),
        "allowed": min(0.5, bound),
    }


def signs(completions: list[Any]) -> dict[str, float]:
    """Return how many honest completions `plausibility` would have noticed, and how many coincided by chance."""
    found: Counter[str] = Counter(completions=len(completions))
    seen: set[tuple[int, ...]] = set()
    coincidences: list[float] = []
    for _, ids, claimed, _ in completions:
        logprobs, tokens = np.array(claimed, dtype="<f4"), np.array(ids, dtype="<u4")
        found["certain"] += plausibility.is_certain(logprobs)
        found["constant"] += plausibility.is_constant(logprobs)
        found["loop"] += plausibility.is_loop(tokens)
        found["improbable"] += plausibility.nats(logprobs) > plausibility.COPY_NATS
        if tuple(ids) in seen:
            coincidences.append(plausibility.nats(logprobs))
        seen.add(tuple(ids))
    found["copied"] = sum(nats > plausibility.COPY_NATS for nats in coincidences)
    most = round(max(coincidences, default=0.0), 1)
    return {**found, "coincidences": len(coincidences), "most_improbable_coincidence": most}


def judge(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Apply the rules of audits to what was sampled, and return how often they say what."""
    import torch

    from echo_coordinator.trainer.model import load_model

    torch.set_num_threads(arguments.threads)
    model = load_model(arguments.model, device=torch.device("cpu"), seed=0)
    runs: list[dict[str, Any]] = []
    for file in arguments.files:
        content = json.loads(file.read_text(encoding="utf-8"))
        backend, precision = content["class"].split("/")
        scored = score(model, content["completions"], follows=backend in DRAW_BY_SEED)
        deltas = [c - r for one in scored for c, r in zip(one["claimed"], one["logprobs"], strict=True)]
        made = {"class": content["class"], "tokens": len(deltas), **_figures(deltas)}
        made["signs"] = signs(content["completions"])
        # While few peers of a class were measured, and once many were, all like these.
        bounds = {"first": allowed_gap([precision], []), "then": allowed_gap([precision], [made["mean"]] * 3)}
        for name, bound in bounds.items():
            verdicts: Counter[str] = Counter()
            for size in (1, 2, 4, 8):
                verdicts.update(find(share, bound, NOTHING).verdict.value for share in shares(scored, size, 4))
            made[name] = {"bound": bound, **verdicts}
        if backend in DRAW_BY_SEED:
            made["strays"] = followed(scored, bounds["then"])
        finer = {of: BOUNDS[of][0] for of in ("float32", "f16", "q8_0") if BOUNDS[of][0] < BOUNDS[precision][0]}
        for of, bound in finer.items():
            found = [find(share, bound, NOTHING).verdict is not AuditVerdict.CLEAN for share in shares(scored, 4, 4)]
            made[f"found_as_{of}"] = round(sum(found) / len(found), 3)
        runs.append(made)
        print(made, flush=True)
    return runs


def run_all(arguments: argparse.Namespace) -> dict[str, Any]:
    """Sample with every class and judge it, for each model; return all figures by model."""
    found: dict[str, Any] = {}
    for text in arguments.models:
        folder, _, amounts = text.partition(":")
        completions, tokens = map(int, (amounts or "64:64").split(":"))
        with tempfile.TemporaryDirectory() as scratch:
            files = [Path(scratch) / f"{number}.json" for number in range(len(CLASSES))]
            for kind, file in zip(CLASSES, files, strict=True):
                asked = {"kind": kind, "out": file, "completions": completions, "tokens": tokens, "seed": 1000}
                sample(argparse.Namespace(model=Path(folder), threads=arguments.threads, **asked))
            judged = judge(argparse.Namespace(model=Path(folder), threads=arguments.threads, files=files))
        found[Path(folder).name] = {"completions": completions, "tokens": tokens, "classes": judged}
    return found


def _figures(deltas: list[float]) -> dict[str, float]:
    sizes = sorted(map(abs, deltas))
    found = {
        "mean": statistics.fmean(sizes),
        "p99": sizes[int(0.99 * len(sizes))],
        "most": sizes[-1],
        "bias": statistics.fmean(deltas),
    }
    return {name: float(f"{value:.2g}") for name, value in found.items()}


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    for name in ("sample", "judge", "run"):
        command = commands.add_parser(name)
        if name == "run":
            command.add_argument("models", nargs="+", help="a folder as below, completions and their longest length")
            command.add_argument("--threads", type=int, default=1)
            continue
        command.add_argument("model", type=Path, help="a Hugging Face folder with model.safetensors and a tokenizer")
        command.add_argument("--threads", type=int, default=1)
        if name == "sample":
            command.add_argument("kind", help="backend/precision")
            command.add_argument("out", type=Path)
            command.add_argument("--completions", type=int, default=64)
            command.add_argument("--tokens", type=int, default=64)
            command.add_argument("--seed", type=int, default=1000)
        else:
            command.add_argument("files", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.what == "run":
        write_report("audit_gaps", run_all(arguments), packages=("torch", "transformers", "llama-cpp-python"))
    elif arguments.what == "sample":
        sample(arguments)
    else:
        runs = judge(arguments)
        write_report("audit_gaps", {"model": arguments.model.name, "runs": runs}, packages=("torch", "transformers"))


if __name__ == "__main__":
    main()
