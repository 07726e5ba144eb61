"""From the news of a version to its first token, and what of that time is whose: for each backend, full and LoRA.

    coordinator (real, this process) ─► hivemind streams ─► `echo-node join` (a process) ─► backend child
                                                             swaps: as the node itself reports them

A case joins a node to a run whose "trainer" makes a version of SmolLM2-135M up whenever it is asked, and swaps it
`--swaps` times while the node samples without pause. Beside it, in the same run:

    copy        the same bytes over the same kind of stream into a file, nothing looked at, under the same load
    flush+hash  fsync of that file, and its sha256, under the same load
    bare load   what the backend's library alone needs for the same files, without load (`_swap_bare_load.py`)

It also counts completions that were leased and came back, under which version, and weighs the backend's child after
each swap. The model is a folder made by docs/recipes/smollm2.md; llama.cpp needs the extra `llama-cpp`, vLLM
`make vllm-env`.
"""

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import anyio

from benchmarks._report import ROOT, write_report
from benchmarks._swap_run import PROMPT_TOKENS, Case, Measured, Scale, count, measure
from echo_node.swaps import Swap
from tools.make_vllm_env import python_in, up_to_date

MODEL = ROOT / "models" / "smollm2"
PARTS = ("manifest_s", "fetch_s", "verify_s", "wait_s", "load_s", "first_token_s")
BARE_LOADS = 5
BARE_LOAD_S = 600.0
MEBIBYTE = 1 << 20


def cases(names: Sequence[str]) -> list[Case]:
    """Return what can be measured here; says what is left out, and how to have it."""
    found: list[Case] = []
    if "torch" in names:
        found += [Case(backend="torch", lora=lora) for lora in (False, True)]
    if "llama_cpp" in names:
        if importlib.util.find_spec("llama_cpp"):
            found += [Case(backend="llama_cpp", lora=lora, gguf=g) for g in ("f16", "q8_0") for lora in (False, True)]
        else:
            print("left out: llama_cpp is not installed (extra llama-cpp; make test-backends)", file=sys.stderr)
    if "vllm" in names:
        if up_to_date():
            found += [Case(backend="vllm", lora=lora, python=str(python_in())) for lora in (False, True)]
        else:
            print("left out: vllm, whose environment is missing or out of date (make vllm-env)", file=sys.stderr)
    return found


def run_case(case: Case, scale: Scale) -> dict[str, Any]:
    """Measure one case in a folder of its own, which is left there if it fails: it has the logs."""
    began = time.monotonic()
    print(f"{case.name} ...", file=sys.stderr, flush=True)

    def say(line: str) -> None:
        print(f"  {case.name}: {line} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)

    folder = Path(tempfile.mkdtemp(prefix="echo-version-swap-"))
    measured = anyio.run(measure, case, scale, folder, say)
    count(folder / "run" / "state.db", measured)
    loads = bare_loads(case, scale, measured, folder / "bare.log")
    shutil.rmtree(folder)
    found = figures(case, measured, loads)
    print(json.dumps({"case": case.name, **found["seconds"], **found["ratios"]}), file=sys.stderr, flush=True)
    return found


def bare_loads(case: Case, scale: Scale, measured: Measured, log: Path) -> list[float]:
    """Load the same files with the library alone. Returns seconds of each."""
    job = {
        "backend": case.backend,
        "config": str(scale.model.resolve() / "config.json"),
        "base": None if measured.base is None else str(measured.base),
        "files": [str(path) for path in measured.files[-BARE_LOADS:]],
        "batch": scale.batch,
        "tokens": PROMPT_TOKENS + scale.tokens,
    }
    script = ROOT / "benchmarks" / "_swap_bare_load.py"
    command = [case.python or sys.executable, str(script), json.dumps(job)]
    with log.open("w") as stderr:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=BARE_LOAD_S, check=False
        )
    if done.returncode:
        sys.exit(f"{case.name}: the library alone ended with {done.returncode}; see {log}")
    return json.loads(done.stdout)


def figures(case: Case, measured: Measured, loads: Sequence[float]) -> dict[str, Any]:
    """Return plain values; medians over the swaps."""
    swaps = [swap for swap in measured.swaps if swap.version]
    limits, resident = measured.limits, [size // MEBIBYTE for size in measured.resident_bytes]

    def of(name: str) -> float:
        return median(getattr(swap, name) for swap in swaps)

    def limit(name: str) -> float:
        return median(getattr(one, name) for one in limits)

    # Of the same swaps, pair by pair: the machine's disk is not equally fast all the time.
    pairs = list(zip(swaps, limits, strict=False))
    return {
        "backend": case.backend,
        "weights": "lora" if case.lora else "full",
        "file": case.gguf or "safetensors",
        "size_mb": round(of("size_bytes") / 1e6, 1),
        "swaps": len(swaps),
        "seconds": {name.removesuffix("_s"): round(of(name), 3) for name in ("total_s", *PARTS, "rest_s")},
        "longest_total_s": round(max(swap.total_s for swap in swaps), 2),
        "join": _join(measured.swaps),
        "limits_s": {
            "copy": round(limit("copy_s"), 3),
            "flush": round(limit("flush_s"), 3),
            "hash": round(limit("hash_s"), 3),
            "bare_load": round(median(loads), 3),
        },
        "ratios": {
            "fetch_over_copy": round(median(s.fetch_s / one.copy_s for s, one in pairs), 2),
            "verify_over_flush_and_hash": round(median(s.verify_s / (one.flush_s + one.hash_s) for s, one in pairs), 2),
            "verify_over_hash": round(median(s.verify_s / one.hash_s for s, one in pairs), 2),
            "load_over_bare_load": round(of("load_s") / median(loads), 2),
        },
        "completions": {
            "leased": measured.issued,
            "returned": measured.returned,
            "of_versions": measured.versions,
            "under_another_versions_name": measured.mistagged,
        },
        "tokens_per_s_swaps_included": round(measured.tokens / measured.seconds, 1),
        "resident_mib": resident,
        # The join is no swap: the second one is the third that was loaded.
        "resident_last_over_second_swap": round(resident[-1] / resident[2], 3),
    }


def _join(swaps: Sequence[Swap]) -> dict[str, float] | None:
    """Return the first load of all, of an adapter with its base, if the node still remembers it."""
    first = next((swap for swap in swaps if not swap.version), None)
    return None if first is None else {name: round(getattr(first, name), 2) for name in ("total_s", *PARTS)}


def show(found: Sequence[dict[str, Any]], say: Callable[[str], None] = print) -> None:
    """Print a table."""
    titles = f"{'total':>8} " + " ".join(f"{name.removesuffix('_s')[:8]:>8}" for name in PARTS)
    say(f"\n{'case':24} {'MB':>5} {titles}   fetch/copy load/bare")
    for case in found:
        seconds = case["seconds"]
        parts = " ".join(f"{seconds[name.removesuffix('_s')]:8.2f}" for name in ("total_s", *PARTS))
        name = f"{case['backend']} {case['file']}, {case['weights']}"
        ratios, done = case["ratios"], case["completions"]
        say(
            f"{name:24} {case['size_mb']:5.0f} {parts}   {ratios['fetch_over_copy']:6.2f} "
            f"{ratios['load_over_bare_load']:10.2f}   {done['returned']} of {done['leased']} back, "
            f"memory x {case['resident_last_over_second_swap']:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=MODEL, help="a Hugging Face folder of SmolLM2-135M")
    parser.add_argument("--backends", nargs="+", default=["torch", "llama_cpp", "vllm"])
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16", help="of published weights")
    parser.add_argument("--batch", type=int, default=4, help="completions that the node runs at once")
    parser.add_argument("--tokens", type=int, default=24, help="of the longest completion")
    parser.add_argument("--quick", action="store_true", help="3 swaps, prints only: does it run?")
    arguments = parser.parse_args()
    if not (arguments.model / "model.safetensors").is_file():
        parser.error(f"{arguments.model} has no model.safetensors; docs/recipes/smollm2.md makes such a folder")
    scale = Scale(
        model=arguments.model,
        precision=arguments.precision,
        swaps=3 if arguments.quick else arguments.swaps,
        limits=2 if arguments.quick else 5,
        batch=arguments.batch,
        tokens=arguments.tokens,
        settle=2 * arguments.batch,
    )
    found = [run_case(case, scale) for case in cases(arguments.backends)]
    if not found:
        sys.exit("nothing to measure")
    show(found)
    if not arguments.quick:
        settings = {"batch": scale.batch, "max_tokens": scale.tokens, "prompt_tokens": PROMPT_TOKENS}
        write_report(
            "version_swap",
            {"model": arguments.model.name, "precision": scale.precision, **settings, "cases": found},
            packages=("torch", "transformers", "llama-cpp-python", "hivemind"),
        )


if __name__ == "__main__":
    main()
