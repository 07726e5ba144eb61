"""Cheaters among honest peers: who is found, by which rule, and how much of their work is trained on before.

    python -m benchmarks.cheaters [classes] [sybils] [reward]

Real coordinator, trainer, hivemind and engines, the demo's model; every cheater is a real node with one thing altered.

classes   one run with all kinds of cheaters beside honest torch and llama.cpp peers of all precisions
sybils    new keys of all cheats, one after another, from one address
reward    the demo's run with and without 30 % cheaters, who come back under new keys, for several seeds
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from benchmarks._cheaters_nodes import PUSHED, Crew, Part
from benchmarks._cheaters_run import Plan, rows, run
from benchmarks._report import ROOT, write_report
from echo_coordinator.demo.swarm import prepare_model

HONEST = (
    Part(name="torch-float32-a", kind="honest"),
    Part(name="torch-float32-b", kind="honest"),
    Part(name="torch-bfloat16", kind="honest", precision="bfloat16"),
    Part(name="llama_cpp-f16", kind="honest", backend="llama_cpp", precision="f16"),
    Part(name="llama_cpp-q8_0", kind="honest", backend="llama_cpp", precision="q8_0"),
    Part(name="llama_cpp-q4_0", kind="honest", backend="llama_cpp", precision="q4_0"),
)
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
MOST = 800
"""Completions after which a cheater that was not found leaves."""
CHEATERS = (
    *(Part(name=f"cheat-{kind}".replace(" ", "-")[:32], kind=kind) for kind in (*SAMPLED, *PUSHED)),
    Part(name="cheat-bf16", kind="bfloat16 as float32", precision="bfloat16"),
    Part(name="cheat-q8_0", kind="q8_0 as f16", backend="llama_cpp", precision="q8_0"),
    Part(name="cheat-q4_0", kind="q4_0 as q8_0", backend="llama_cpp", precision="q4_0"),
)


def classes(folder: Path, plan: Plan) -> dict[str, Any]:
    """Run all kinds of cheaters beside honest peers of all classes."""

    async def play(crew: Crew) -> None:
        async with anyio.create_task_group() as tasks:
            for part in HONEST:
                tasks.start_soon(crew.take_part, part)
            tasks.start_soon(partial(crew.one_after_another, CHEATERS, at_once=5, most=MOST))

    crew, ledger = run(folder, plan, play)
    honest, cheaters = rows(crew, ledger, HONEST), rows(crew, ledger, CHEATERS)
    return {
        "groups_trained": ledger.groups,
        "completions_trained": ledger.consumed,
        "honest": honest,
        "honest_groups": sum(row["groups"] for row in honest),
        "honest_set_aside": sum("set_aside" in row or "by" in row for row in honest),
        "cheaters": cheaters,
    }


def show(figures: dict[str, Any]) -> None:
    """Print a line for each peer."""
    for row in (*figures["honest"], *figures["cheaters"]):
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
    parser.add_argument("what", nargs="*", default=["classes"], choices=["classes", "sybils", "reward"])
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "cheaters")
    parser.add_argument("--updates", type=int, default=66)
    arguments = parser.parse_args()
    cache = ROOT / "runs" / "models"
    model, other = (
        anyio.run(lambda seed=seed: prepare_model(cache, seed=seed, log_path=cache / "warmup.log", say=print))
        for seed in (0, 1)
    )
    figures: dict[str, Any] = {}
    if "classes" in arguments.what:
        changes = {"work": {"groups_per_update": 32}}
        plan = Plan(model=model, other_model=other, seed=0, updates=arguments.updates, changes=changes)
        figures["classes"] = classes(arguments.folder / "classes", plan)
        show(figures["classes"])
    write_report("cheaters", figures, packages=("torch", "llama-cpp-python", "hivemind"), folder=arguments.folder)


if __name__ == "__main__":
    main()
