"""Every kind of process is killed with SIGKILL, 100 times and more, while a run trains; then its history is read.

    python -m benchmarks.crashes async
    python -m benchmarks.crashes sequential

A real coordinator (trainer and scorer children, a model of 20,000 parameters) and three real nodes (a scripted backend
child each) over hivemind on loopback. Ends with 1 if anything was lost, doubled, out of order, or left behind.
"""

import argparse
import importlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._chaos_audit import Auditor, leftovers
from benchmarks._chaos_processes import left_over
from benchmarks._crash_audit import account, compare_counts, replay
from benchmarks._crash_processes import IMPORTED, KINDS
from benchmarks._crash_swarm import BACKEND, NODES, CrashSwarm, Tally
from benchmarks._distribution_workers import PartFailed
from benchmarks._report import write_report
from benchmarks._small_run import small_run
from echo_swarm.identity import load
from tests.e2e.support.swarm import Swarm

GROUPS, MEMBERS = 3, 4
MODES = {"async": 2, "sequential": 0}
"""Mode → max_staleness."""
FOR_GOOD = 1_000_000
"""Updates for which everything is kept: the history is what is looked at."""


def _make(folder: Path, mode: str, seed: int) -> Swarm:
    return small_run(
        folder,
        mode=mode,
        max_staleness=MODES[mode],
        group_size=MEMBERS,
        groups_per_update=GROUPS,
        retain_updates=FOR_GOOD,
        retain_leases=FOR_GOOD,
        seed=seed,
    )


def measure(mode: str, arguments: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Run one part and return what was seen; `faults` is empty when all is well."""
    began_s = time.monotonic()
    targets = {kind: arguments.kills for kind in KINDS}
    tally = Tally()
    swarm = CrashSwarm(_make(root, mode, arguments.seed), seed=arguments.seed, tally=tally, targets=targets)
    swarm.history.groups_per_update = GROUPS
    try:
        with swarm:
            swarm.begin()
            while not swarm.done and not tally.faults and time.monotonic() - began_s < 60 * arguments.minutes:
                swarm.wave()
                minutes = (time.monotonic() - began_s) / 60
                killed = ", ".join(f"{kind} {tally.kills[kind]}" for kind in KINDS)
                print(
                    f"{mode}, {minutes:.1f} min, version {swarm.version()}: killed {killed}; "
                    f"{len(tally.faults)} faults",
                    flush=True,
                )
            swarm.settle()
        figures = _history(swarm, mode, root)
    except PartFailed as e:
        tally.faults.append(str(e))
        figures = {}
    for fault in tally.faults:
        print(f"FAULT: {fault}", file=sys.stderr, flush=True)
    return {**_kills(tally), **figures, "faults": tally.faults, "minutes": round((time.monotonic() - began_s) / 60, 1)}


def _kills(tally: Tally) -> dict[str, Any]:
    return {
        "kills": {kind: tally.kills[kind] for kind in KINDS},
        "kills_while_starting": dict(tally.while_starting),
        "waves": tally.waves,
        "ended_by_themselves": dict(tally.ended.most_common()),
        "coordinator_ready_s": _typical(tally.ready_s),
        "next_version_after_a_wave_s": _typical(tally.updated_s),
    }


def _history(swarm: CrashSwarm, mode: str, root: Path) -> dict[str, Any]:
    """Read everything that is on the disks, with all processes gone."""
    tally, history = swarm.tally, swarm.history
    accounts = account(swarm.run, map(swarm.verdicts_of, NODES))
    run_id = next((swarm.run.store).iterdir()).name
    peers = {
        name: (
            load(swarm.state_of(name) / "identity.key").peer_id,
            swarm.state_of(name) / "runs" / run_id / "outbox.sqlite",
        )
        for name in NODES
    }
    tally.faults += accounts.faults + compare_counts(swarm.run, peers)
    same, differs = replay(swarm.run, history, MODES[mode], root / "replay")
    tally.faults += differs + _order(history.ledger, mode) + _disks(swarm, run_id)
    tally.faults += [f"left at the end: {line}" for line in left_over(os.environ["ECHO_CHAOS_PROCESS"])]
    return {
        "updates": len(history.ledger),
        "trained_groups": len(history.update_of),
        "looks_at_the_database_of_a_dead_coordinator": history.looks,
        "of_these_checkpoint_ahead_of_the_ledger": history.ahead,
        "of_these_ledger_ahead_of_what_is_published": history.unpublished,
        "completions_told_accepted": accounts.told,
        "of_these_trained": accounts.trained,
        "of_these_dropped": dict(accounts.dropped),
        "of_these_in_groups_under_way": accounts.waiting,
        "versions_with_the_weights_of_an_undisturbed_replay": same,
        "versions_compared": len([v for v in history.weights if 0 < v <= len(history.ledger)]),
    }


def _order(ledger: dict[int, tuple[int, ...]], mode: str) -> list[str]:
    """Sequential updates take the groups in the order in which they were begun."""
    if mode != "sequential":
        return []
    taken = [group for _, groups in sorted(ledger.items()) for group in groups]
    return [] if taken == sorted(taken) else ["sequential updates took groups out of order"]


def _disks(swarm: CrashSwarm, run_id: str) -> list[str]:
    """Nothing lies about that belongs to nothing."""
    auditor = Auditor()
    faults = leftovers("coordinator", swarm.run.checkpoints, swarm.run.batches)
    faults += auditor.store("coordinator", swarm.run.store / run_id, quota_bytes=None)
    for name in NODES:
        faults += auditor.store(name, swarm.state_of(name) / "runs" / run_id, quota_bytes=None)
    return faults


def _typical(seconds: list[float]) -> dict[str, float]:
    return {"median": round(median(seconds), 1), "longest": round(max(seconds), 1)} if seconds else {}


def main() -> int:
    """Run, report, say whether all was well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=list(MODES))
    parser.add_argument("--kills", type=int, default=100, help="of each kind of process")
    parser.add_argument("--minutes", type=float, default=240.0, help="begin no wave after so many")
    parser.add_argument("--seed", type=int, default=1, help="another one than 1 has a report of its own")
    parser.add_argument("--folder", type=Path, default=None, help="where files and logs go")
    parser.add_argument("--scratch", action="store_true", help="leave the results of the repository alone")
    arguments = parser.parse_args()
    for module in IMPORTED:
        importlib.import_module(module)
    root = Path(tempfile.mkdtemp(prefix=f"echo-crashes-{arguments.mode}-", dir=arguments.folder))
    seen = measure(arguments.mode, arguments, root)
    figures = {"mode": arguments.mode, "nodes": len(NODES), "backend": BACKEND, "seed": arguments.seed, **seen}
    scratch = {"folder": root} if arguments.scratch else {}
    name = f"crashes_{arguments.mode}" + (f"_{arguments.seed}" if arguments.seed > 1 else "")
    write_report(name, figures, packages=("torch", "hivemind"), **scratch)
    if seen["faults"] or arguments.scratch:
        print(f"files and logs: {root}", file=sys.stderr)
    else:
        shutil.rmtree(root, ignore_errors=True)
    return int(bool(seen["faults"]))


if __name__ == "__main__":
    sys.exit(main())
