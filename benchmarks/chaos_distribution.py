"""Processes are killed with SIGKILL and started again while versions spread: a hundred rounds of it.

    round n: version n is published ─► nodes (and the coordinator) die in the middle of fetching, applying a delta,
             verifying, loading, deleting, publishing ... and start on the same folders ─► everybody has version n
             ─► every file on every disk is compared with its manifest

A real coordinator and real `echo-node join` processes over hivemind's streams on loopback; versions are made up, every
second one is a small change of the one before. Ends with 1 if anything was wrong.
"""

import argparse
import socket
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._chaos_swarm import ChaosSwarm, clean
from benchmarks._distribution_spread import say
from benchmarks._distribution_workers import PartFailed
from benchmarks._report import write_report


def measure(arguments: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Run the rounds and return what was seen; `faults` is empty when all is well."""
    began_s, done = time.monotonic(), 0
    swarm = ChaosSwarm(
        root, nodes=arguments.nodes, megabytes=arguments.megabytes, seed=arguments.seed, port=_free_port()
    )
    try:
        with swarm:
            swarm.begin()
            for version in range(1, arguments.rounds + 1):
                found = swarm.round(version)
                done = version
                minutes = (time.monotonic() - began_s) / 60
                say(f"{version}/{arguments.rounds}, {minutes:.1f} min: {found}")
                if swarm.tally.faults or minutes > arguments.minutes:
                    break
            swarm.finish()
    except PartFailed as e:
        swarm.tally.faults.append(str(e))
    for fault in swarm.tally.faults:
        say(f"FAULT: {fault}")
    return {**_figures(swarm, arguments), "rounds": done, "minutes": round((time.monotonic() - began_s) / 60, 1)}


def _figures(swarm: ChaosSwarm, arguments: argparse.Namespace) -> dict[str, Any]:
    tally, auditor = swarm.tally, swarm.auditor
    by_process: dict[str, int] = {}
    for kill in tally.kills:
        by_process[kill.who] = by_process.get(kill.who, 0) + 1
    return {
        "nodes": arguments.nodes,
        "megabytes": arguments.megabytes,
        "seed": arguments.seed,
        "quota_megabytes": swarm.quota_bytes / 1e6,
        "kills": len(tally.kills),
        "kills_by_process": dict(sorted(by_process.items())),
        "kills_by_phase": dict(tally.hits.most_common()),
        "phase_ms": {phase: round(1000 * tally.usual_s(phase), 1) for phase in sorted(tally.lasted_s)},
        "start_s": _typical(swarm.start_s),
        "recovery_s": _typical(tally.recovery_s),
        "loads_checked": tally.loads,
        "files_hashed": auditor.hashed,
        "versions": len(auditor.manifests),
        "most_megabytes_in_a_store": round(auditor.most_bytes / 1e6, 1),
        "most_unfinished_megabytes_kept": round(auditor.unfinished_bytes / 1e6, 1),
        "resumed_megabytes": round(tally.resumed_bytes / 1e6, 1),
        "made_by_deltas_megabytes": round(tally.made_bytes / 1e6, 1),
        "deltas_given_up": dict(tally.delta_faults),
        "faults": tally.faults,
    }


def _typical(seconds: list[float]) -> dict[str, float]:
    return {"median": round(median(seconds), 1), "longest": round(max(seconds), 1)} if seconds else {}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> int:
    """Run, report, say whether all was well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no round after so many")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=8, help="of each version")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="where files and logs go")
    parser.add_argument("--scratch", action="store_true", help="leave the results of the repository alone")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="echo-chaos-", dir=arguments.folder))
    figures = measure(arguments, root)
    scratch = {"folder": root} if arguments.scratch else {}
    write_report("chaos_distribution", figures, packages=("hivemind",), **scratch)
    clean(root, figures["faults"])
    return int(bool(figures["faults"]))


if __name__ == "__main__":
    sys.exit(main())
