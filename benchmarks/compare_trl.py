"""The demo's task trained three ways on one machine: TRL's GRPOTrainer, the swarm asynchronously, and sequentially.

Same warmed-up model, prompts in the same order, rewards, learning rate, objective and number of completions a seed;
held-out greedy accuracy of the saved weights afterwards, by one code for all. Runs never overlap.

    python -m benchmarks.compare_trl [--seeds 0 1 2] [--quick] [--trl-python PATH]

    demo's model ──► run folders of both modes ──► prompts as JSONL ──► TRL worker (own environment) ──┐
                                       └──► coordinator and nodes, mode by mode ──────────────────────┤
                                                   weights by version ──► judge ──► table, plot, JSON ◄┘
"""

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from benchmarks import _compare_show as show
from benchmarks._compare_differences import differences
from benchmarks._compare_swarm import run_swarm, write_run
from benchmarks._report import RESULTS, ROOT, write_report
from benchmarks._trl_environment import trl_python
from echo_coordinator.config import RunSettings, load_settings
from echo_coordinator.demo import recipe
from echo_coordinator.demo.swarm import prepare_model
from echo_coordinator.environments.base import Environment, PromptSkipped, Split
from echo_coordinator.environments.registry import open_environment
from echo_coordinator.model_folder import read_facts
from echo_coordinator.run_folder import RunFolder
from echo_coordinator.scoring.tokenizer import PromptTokenizer

NAME = "compare_trl"
MODES = ("async", "sequential")
QUICK_UPDATES = 6
QUICK_EVERY = 3
TRL_LIMIT_S = 3600.0
JUDGE_LIMIT_S = 600.0
TRIAL_UPDATES = 6
"""For finding TRL's best number of threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run for every seed."""

    updates: int
    every: int
    """Versions between two that are judged."""
    nodes: int
    threads: int | None
    """TRL's; None: whichever of one and all cores is faster."""
    python: Path
    """TRL's."""
    folder: Path

    @property
    def versions(self) -> list[int]:
        """Those that are judged: the first, every so many, the last."""
        return sorted({*range(0, self.updates, self.every), self.updates})


def main() -> None:
    arguments = _arguments()
    quick: bool = arguments.quick
    results = RESULTS / "scratch" if quick else RESULTS
    if arguments.show:
        figures: dict[str, Any] = json.loads((results / f"{NAME}.json").read_text(encoding="utf-8"))["figures"]
        _show(figures, results)
        return
    plan = Plan(
        updates=arguments.updates or (QUICK_UPDATES if quick else recipe.UPDATES),
        every=arguments.every or (QUICK_EVERY if quick else recipe.EVALUATION["every"]),
        nodes=arguments.nodes,
        threads=arguments.trl_threads,
        python=arguments.trl_python or trl_python(),
        folder=ROOT / "runs" / NAME,
    )
    seeds: list[int] = arguments.seeds or ([0] if quick else [0, 1, 2])
    runs = [run for seed in seeds for run in _run_seed(plan, seed)]
    figures = _figures(plan, seeds, runs)
    write_report(NAME, figures, packages=("torch", "transformers", "hivemind", "reasoning-gym"), folder=results)
    _show(figures, results)


def _run_seed(plan: Plan, seed: int) -> list[dict[str, Any]]:
    """Return the runs of one seed, one after the other."""
    folder = plan.folder / f"seed{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "trl").mkdir(parents=True)
    _say(f"seed {seed}: the model")
    prepare = functools.partial(prepare_model, seed=seed, log_path=folder / "warmup.log", say=_say)
    model = anyio.run(prepare, ROOT / "runs" / "models")
    settings = {
        mode: write_run(folder / mode, model=model, seed=seed, mode=mode, updates=plan.updates) for mode in MODES
    }
    job = _job(plan, settings["sequential"], model, folder / "trl")
    found: list[dict[str, Any]] = []
    for arm in show.ARMS:
        _say(f"seed {seed}: {show.ARMS[arm]}")
        if arm == "trl":
            result = _run_best_trl(plan, job, folder / "trl")
        else:
            result = run_swarm(folder / arm, settings[arm], nodes=plan.nodes)
        run = {"arm": arm, "seed": seed, **_judged(plan, job, result, folder / arm)}
        _say("  " + "  ".join(f"v{p['version']}: {p['accuracy']:.3f} ({p['seconds']:.0f} s)" for p in run["points"]))
        found.append(run)
    return found


def _job(plan: Plan, settings: RunSettings, model: Path, folder: Path) -> dict[str, Any]:
    """Return what TRL's worker and the judge are told, with the prompts written to files."""
    environment = open_environment(settings.environment.name, settings.environment.settings)
    tokenizer = PromptTokenizer(model, read_facts(model).end_token_ids)
    wanted = plan.updates * settings.work.groups_per_update
    limit = settings.environment.max_prompt_tokens
    train, held_out = folder / "train.jsonl", folder / "held_out.jsonl"
    _export(environment, tokenizer, train, split=Split.TRAIN, count=wanted, limit=limit)
    _export(environment, tokenizer, held_out, split=Split.EVAL, count=recipe.EVALUATION["prompts"], limit=limit)
    parts = settings.model_dump(mode="json")
    return {
        "model": str(model),
        "seed": settings.work.seed,
        "updates": plan.updates,
        "versions": plan.versions,
        "train": str(train),
        "held_out": str(held_out),
        "max_tokens": settings.work.max_tokens,
        **{name: parts[name] for name in ("environment", "work", "objective", "optimizer")},
    }


def _export(
    environment: Environment, tokenizer: PromptTokenizer, path: Path, *, split: Split, count: int, limit: int
) -> None:
    """Write prompts in the order in which the coordinator takes them: the usable ones by index."""
    size, index, rows = environment.size(split), 0, list[str]()
    # For training as many as are wanted; of the held-out ones those among the first `count`, as the coordinator does.
    while (len(rows) < count) if split is Split.TRAIN else (index < min(count, size or count)):
        try:
            prompt = environment.prompt(split, index)
            ids = tokenizer.encode(prompt)
            if ids and len(ids) <= limit:
                rows.append(json.dumps({"index": index, "text": tokenizer.render(prompt), "prompt_ids": ids}))
        except PromptSkipped:
            pass  # held out, or not to be had; the coordinator skips it too
        index += 1
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def _run_best_trl(plan: Plan, job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run TRL with the asked number of threads, else with the faster of one and all cores in a short trial."""
    updates_per_s: dict[int, float] = {}
    trial = {**job, "updates": min(TRIAL_UPDATES, plan.updates), "versions": []}
    for threads in sorted({1, os.cpu_count() or 1}) if plan.threads is None else ():
        versions = _run_trl(plan, trial, folder / f"trial-{threads}", threads)["versions"]
        # The first update is left out: it also warms up.
        seconds = [versions[str(version)]["seconds"] for version in (1, trial["updates"])]
        updates_per_s[threads] = round((trial["updates"] - 1) / (seconds[1] - seconds[0]), 3)
    threads = plan.threads or max(updates_per_s, key=lambda tried: updates_per_s[tried])
    return {**_run_trl(plan, job, folder, threads), "threads": threads, "trial_updates_per_s": updates_per_s}


def _run_trl(plan: Plan, job: dict[str, Any], folder: Path, threads: int) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    path = folder / "job.json"
    path.write_text(json.dumps({**job, "threads": threads}), encoding="utf-8")
    code = os.pathsep.join(str(ROOT / part) for part in (".", "coordinator"))
    variables = {**os.environ, "PYTHONPATH": code, "OMP_NUM_THREADS": str(threads)}
    command = [str(plan.python), str(ROOT / "benchmarks" / "_trl_worker.py"), str(path)]
    _run_logged(command, folder / "trl.log", TRL_LIMIT_S, variables)
    result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return result


def _judged(plan: Plan, job: dict[str, Any], result: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the result with its judged versions as `points`, in place of all versions and their files."""
    versions = {int(version): entry for version, entry in result.pop("versions").items()}
    task = {key: job[key] for key in ("model", "held_out", "environment", "max_tokens")}
    task["weights"] = {version: versions[version]["weights"] for version in plan.versions}
    path = folder / "judge.json"
    path.write_text(json.dumps(task), encoding="utf-8")
    _run_logged([sys.executable, "-m", "benchmarks._compare_judge", str(path)], folder / "judge.log", JUDGE_LIMIT_S)
    accuracy: dict[str, float] = json.loads((folder / "accuracy.json").read_text(encoding="utf-8"))
    points = [
        {
            "version": version,
            "samples": versions[version]["samples"],
            "seconds": round(versions[version]["seconds"], 2),
            "accuracy": accuracy[str(version)],
        }
        for version in plan.versions
    ]
    return {**result, "startup_s": round(result["startup_s"], 1), "points": points}


def _run_logged(command: list[str], log_path: Path, limit_s: float, variables: dict[str, str] | None = None) -> None:
    with log_path.open("wb") as log:
        done = subprocess.run(
            command, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT, timeout=limit_s, check=False
        )
    if done.returncode:
        last = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise SystemExit(f"{command[1]} ended with {done.returncode}: {' '.join(last)} (log: {log_path})")


def _figures(plan: Plan, seeds: list[int], runs: list[dict[str, Any]]) -> dict[str, Any]:
    settings = load_settings(RunFolder(plan.folder / f"seed{seeds[-1]}" / "async" / "run"))
    told = settings.model_dump(mode="json", include={"environment", "work", "objective", "optimizer"})
    return {
        "updates": plan.updates,
        "samples_an_update": settings.work.group_size * settings.work.groups_per_update,
        "held_out_prompts": recipe.EVALUATION["prompts"],
        "nodes": plan.nodes,
        "differences": differences(settings, nodes=plan.nodes),
        "summary": show.summarise(runs),
        "runs": runs,
        "settings": told,
    }


def _show(figures: dict[str, Any], folder: Path) -> None:
    print(show.markdown(figures))
    path = folder / f"{NAME}.png"
    if show.plot(figures, path):
        _say(f"plot: {path}")
    else:
        _say("no plot: matplotlib is not installed (it comes with the `coordinator` extra); then run with --show")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2")
    parser.add_argument(
        "--quick", action="store_true", help=f"one seed, {QUICK_UPDATES} updates; results go to scratch/"
    )
    parser.add_argument("--updates", type=int, help="default: the recipe's")
    parser.add_argument("--every", type=int, help="versions between two that are judged; default: the recipe's")
    parser.add_argument("--nodes", type=int, default=3, help="of the swarm, in both modes")
    parser.add_argument("--trl-threads", type=int, help="default: the faster of 1 and all cores, tried for each seed")
    parser.add_argument(
        "--trl-python", type=Path, help="an interpreter that has TRL; default: .venv-trl, made if missing"
    )
    parser.add_argument("--show", action="store_true", help="print the table and plot of the last results again")
    return parser.parse_args()


if __name__ == "__main__":
    main()
