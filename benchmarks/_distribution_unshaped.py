"""One link without a limit: a fetch, verified and on disk, over a bare copy on the same kind of stream."""

import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks._distribution_echo import EchoSwarm
from benchmarks._distribution_files import write_version
from benchmarks._distribution_net import Net
from benchmarks._distribution_spread import Scale, say
from benchmarks._distribution_workers import PartFailed, Workers
from benchmarks._report import ROOT

ROUNDS = 7
COPY_S = 120.0
GUESS_S = 60.0
"""Stands in for the time of a plain copy, from which deadlines follow."""


def run_unshaped(net: Net, folder: Path, *, megabytes: int) -> dict[str, Any]:
    """Let one node fetch version after version; after each, copy the same file bare. Medians."""
    fetched: list[float] = []
    copied: list[float] = []
    verified: list[float] = []
    with Workers(net, folder) as workers:
        size = megabytes * 1_000_000
        swarm = EchoSwarm(net, workers, Scale(nodes=1, size_bytes=size, rate_mbit=0.0, copy_s=GUESS_S))
        swarm.connected()
        for seed in range(ROUNDS):
            path = folder / f"version{seed}"
            write_version(path, megabytes=megabytes, seed=seed)
            spread = swarm.spread(f"unshaped, {seed}", path)
            report = spread.whole[swarm.nodes[0].name].values
            fetched.append(float(report["seconds"]))
            verified.append(float(report["verify_s"]))
            copied.append(_copy(net, swarm.address, folder, path))
            say(f"  fetched in {fetched[-1]:.2f} s, copied in {copied[-1]:.2f} s")
    fetch_s, copy_s = median(fetched), median(copied)
    return {
        "megabytes": megabytes,
        "fetch_mb_per_s": round(megabytes / fetch_s, 1),
        "bare_stream_mb_per_s": round(megabytes / copy_s, 1),
        "fetch_over_bare_stream": round(copy_s / fetch_s, 3),
        "fetch_s": [round(value, 3) for value in fetched],
        "of_which_flush_and_hash_s": [round(value, 3) for value in verified],
        "bare_stream_s": [round(value, 3) for value in copied],
    }


def _copy(net: Net, address: str, folder: Path, path: Path) -> float:
    """Return the seconds that a process with a p2pd of its own takes for a bare copy, on the node's host."""
    command = [*net.inside(1), sys.executable, "-m", "benchmarks._swap_copy", address, str(folder)]
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, input=f"{path}\n", capture_output=True, text=True, timeout=COPY_S, check=True, cwd=ROOT
        )
    except (subprocess.SubprocessError, OSError) as e:
        raise PartFailed(f"the bare copy failed after {time.monotonic() - began:.0f} s: {e}") from e
    ready, seconds = done.stdout.split()
    assert ready == "ready"
    return float(seconds)
