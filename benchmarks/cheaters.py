"""Cheaters among honest peers: who is found, by which rule, and how much of their work is trained on before.

    python -m benchmarks.cheaters [many] [few] [sybils] [reward-honest] [reward-cheated] [--seeds 0 1]

Real coordinator, trainer, hivemind and engines, the demo's model; every cheater is a real node with one thing altered.

many      all kinds of cheaters beside honest torch and llama.cpp peers of all precisions, four of most classes
few       the same with so few peers of a class that the class is not measured by them
sybils    new keys of all cheats, one after another, from one address
reward    the demo's run with and without 30 % cheaters, who come back under new keys, for several seeds
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import anyio

from benchmarks._cheaters_nodes import PUSHED, Crew, Part
from benchmarks._cheaters_run import Plan, rows, run
from benchmarks._report import ROOT, write_report
from echo_coordinator.demo.swarm import prepare_model

LLAMA = "llama_cpp"
FEW = (
    Part(name="torch-float32-0", kind="honest"),
    Part(name="torch-float32-1", kind="honest"),
    Part(name="torch-bfloat16-0", kind="honest", precision="bfloat16"),
    Part(name="llama_cpp-f16-0", kind="honest", backend=LLAMA, precision="f16"),
    Part(name="llama_cpp-q8_0-0", kind="honest", backend=LLAMA, precision="q8_0"),
    Part(name="llama_cpp-q4_0-0", kind="honest", backend=LLAMA, precision="q4_0"),
)
"""Honest peers, too few of a class to measure it by them."""
MANY = (
    *FEW,
    *(Part(name=f"torch-float32-{n}", kind="honest") for n in (2, 3)),
    *(Part(name=f"llama_cpp-f16-{n}", kind="honest", backend=LLAMA, precision="f16") for n in (1, 2, 3)),
    *(Part(name=f"llama_cpp-q8_0-{n}", kind="honest", backend=LLAMA, precision="q8_0") for n in (1, 2, 3)),
)
"""Four of each class that a cheater names."""
TORCH = tuple(part for part in MANY if part.backend == "torch" and part.precision == "float32")
SAMPLED = (
    "turns to made-up values",
    "turns to seeds",
    "other model",
    "first version",
    "version before",
    "greedy",
    "colder",
    "hotter",
    "colder, own values",
    "constant values",
    "made-up values",
    "copied",
    "old work",
    "best of 4 seeds",
    "worst of 4 seeds",
    "best of 4, as vllm",
    "hands wrong ones back",
    "cut",
    "cut, true values",
)
"""Cheats of a torch node in float32."""
NOT_FOUND = ("best of 4, as vllm", "hands wrong ones back")
"""What audits cannot see (docs/adr/0018-seeds.md)."""
MOST = 400
"""Completions after which a cheater that was not found leaves."""
CHEATERS = (
    *(Part(name=f"cheat-{kind}".replace(" ", "-")[:32], kind=kind) for kind in PUSHED),
    *(Part(name=f"cheat-{kind}".replace(" ", "-")[:32], kind=kind) for kind in SAMPLED),
    Part(name="cheat-bf16", kind="bfloat16 as float32", precision="bfloat16"),
    Part(name="cheat-q8_0", kind="q8_0 as f16", backend="llama_cpp", precision="q8_0"),
    Part(name="cheat-q4_0", kind="q4_0 as q8_0", backend="llama_cpp", precision="q4_0"),
)
FOUND = tuple(kind for kind in SAMPLED if kind not in NOT_FOUND and not kind.startswith("turns"))


def endless(seed: int) -> Iterator[Part]:
    """Yield new keys without end, whose cheats take turns."""
    for number in count():
        kind = FOUND[(number + seed) % len(FOUND)]
        yield Part(name=f"sybil-{seed}-{number}", kind=kind)


def classes(folder: Path, plan: Plan, honest_parts: tuple[Part, ...]) -> dict[str, Any]:
    """Run all kinds of cheaters beside honest peers of all classes."""

    async def play(crew: Crew) -> None:
        async with anyio.create_task_group() as tasks:
            for part in honest_parts:
                tasks.start_soon(crew.take_part, part)
            tasks.start_soon(partial(crew.one_after_another, CHEATERS, at_once=8, most=MOST))

    crew, ledger = run(folder, plan, play)
    honest, cheaters = rows(crew, ledger, honest_parts), rows(crew, ledger, CHEATERS)
    show([*honest, *cheaters])
    return {
        "groups_trained": ledger.groups,
        "completions_trained": ledger.consumed,
        "honest": honest,
        "honest_groups": sum(row["groups"] for row in honest),
        "honest_set_aside": sum("set_aside" in row or "by" in row for row in honest),
        "cheaters": cheaters,
    }


def sybils(folder: Path, plan: Plan) -> dict[str, Any]:
    """Let new keys of all cheats join from one address, four at a time, beside four honest peers."""

    async def play(crew: Crew) -> None:
        async with anyio.create_task_group() as tasks:
            for part in TORCH:
                tasks.start_soon(crew.take_part, part)
            tasks.start_soon(partial(crew.one_after_another, endless(plan.seed), at_once=4, most=MOST))

    crew, ledger = run(folder, plan, play)
    cheaters = rows(crew, ledger, [part for part in crew.joined if part.kind != "honest"])
    honest = rows(crew, ledger, TORCH)
    by_kind: dict[str, dict[str, int]] = {}
    for found in cheaters:
        kind = by_kind.setdefault(found["kind"], {"keys": 0, "found": 0, "poison": 0})
        kind["keys"] += 1
        kind["found"] += "by" in found
        kind["poison"] += found["poison"]
    return {
        "by_kind": by_kind,
        "keys": len(cheaters),
        "keys_found": sum("by" in row for row in cheaters),
        "completions_accepted": sum(row["completions_accepted"] for row in cheaters),
        "completions_trained": ledger.consumed,
        "poison": sum(row["poison"] for row in cheaters),
        "poison_share": round(sum(row["poison"] for row in cheaters) / max(1, ledger.consumed), 4),
        "honest_groups": sum(row["groups"] for row in honest),
        "honest_set_aside": sum("set_aside" in row or "by" in row for row in honest),
    }


def reward(folder: Path, plan: Plan, cheaters: int) -> dict[str, Any]:
    """Train with ten peers, so many of them cheaters who come back under new keys; return held-out accuracy."""

    async def play(crew: Crew) -> None:
        async with anyio.create_task_group() as tasks:
            for number in range(10 - cheaters):
                tasks.start_soon(crew.take_part, Part(name=f"honest-{number}", kind="honest"))
            if cheaters:
                tasks.start_soon(partial(crew.one_after_another, endless(plan.seed), at_once=cheaters, most=MOST))

    crew, ledger = run(folder, plan, play)
    found = rows(crew, ledger)
    bad = [row for row in found if row["kind"] != "honest"]
    return {
        "accuracy": {str(version): value for version, value in sorted(ledger.accuracy.items())},
        "cheaters_keys": len(bad),
        "poison_share": round(sum(row["poison"] for row in bad) / max(1, ledger.consumed), 4),
        "honest_groups": sum(row["groups"] for row in found if row["kind"] == "honest"),
        "honest_set_aside": sum("by" in row or "set_aside" in row for row in found if row["kind"] == "honest"),
    }


def show(found: list[dict[str, Any]]) -> None:
    """Print a line for each peer."""
    for row in found:
        said = row.get("by") or ("probe" if "set_aside" in row else "-")
        print(
            f"{row['kind']:26} {row['backend']:10} {row['precision']:9} groups {row['groups']:5} "
            f"audits {row['audits']:4} trained {row['trained']:5} {said:11} at {row.get('caught_at_audit', '-')} "
            f"{row.get('detail', row.get('set_aside', ''))[:90]} {row.get('answers', '')} {row.get('refused', '')}",
            file=sys.stderr,
        )


def main() -> None:
    """Read the command line, and run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "cheaters")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    arguments = parser.parse_args()
    cache = ROOT / "runs" / "models"
    model, other = (
        anyio.run(lambda seed=seed: prepare_model(cache, seed=seed, log_path=cache / "warmup.log", say=print))
        for seed in (0, 1)
    )
    arguments.folder.mkdir(parents=True, exist_ok=True)
    parts = arguments.folder / "parts.json"
    done: dict[str, Any] = json.loads(parts.read_text(encoding="utf-8")) if parts.exists() else {}
    for what, seed in itertools.product(arguments.what, arguments.seeds):
        plan = Plan(model=model, other_model=other, seed=seed, **PLANS[what.partition("-")[0]])
        done.setdefault(what, {})[str(seed)] = SECTIONS[what](arguments.folder / f"{what}-{seed}", plan)
        parts.write_text(json.dumps(done, indent=1), encoding="utf-8")
    write_report("cheaters", figures_of(done), packages=("torch", "llama-cpp-python", "hivemind"))


PLANS: dict[str, dict[str, Any]] = {
    "many": {"updates": 40, "changes": {"work": {"groups_per_update": 32}}},
    "few": {"updates": 34, "changes": {"work": {"groups_per_update": 32}}},
    "sybils": {"updates": 30},
    "reward": {"updates": 32, "evaluate_every": 16},
}
SECTIONS: dict[str, Callable[[Path, Plan], dict[str, Any]]] = {
    "many": partial(classes, honest_parts=MANY),
    "few": partial(classes, honest_parts=FEW),
    "sybils": sybils,
    "reward-honest": partial(reward, cheaters=0),
    "reward-cheated": partial(reward, cheaters=3),
}


def figures_of(done: dict[str, Any]) -> dict[str, Any]:
    """Return all figures, with what they come to."""
    figures: dict[str, Any] = dict(done)
    counted = [run for runs in done.values() for run in runs.values()]
    figures["honest_groups"] = sum(run["honest_groups"] for run in counted)
    figures["honest_set_aside"] = sum(run["honest_set_aside"] for run in counted)
    for what in ("reward-honest", "reward-cheated"):
        finals = [next(reversed(run["accuracy"].values())) for run in done.get(what, {}).values()]
        if finals:
            spread = statistics.stdev(finals) if len(finals) > 1 else None
            figures[f"{what}_final"] = {"mean": statistics.fmean(finals), "deviation": spread}
    return figures


if __name__ == "__main__":
    main()
