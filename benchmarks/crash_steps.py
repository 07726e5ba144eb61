"""A run is killed before each single change of its disk, one after the other, and has to go on as if nothing had been.

    python -m benchmarks.crash_steps

`tests/swarm/killed_in_an_update.py` says how. Ends with 1 if any run ended other than the one that nobody killed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks._report import ROOT, write_report
from tests.swarm.killed_in_an_update import faults_in

WORKERS = 2
"""Processes at a time."""


def sweep(folder: Path, stride: int) -> list[dict[str, Any]]:
    """Kill before every step, or every so many; return what was printed."""
    workers: list[subprocess.Popen[str]] = []
    for number in range(WORKERS):
        own = folder / str(number)
        own.mkdir()
        arguments = [str(own), str(1 + number * stride), str(WORKERS * stride)]
        command = [sys.executable, "-m", "tests.swarm.killed_in_an_update", *arguments]
        with (folder / f"{number}.log").open("wb") as log:
            workers.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True))
    printed = [worker.communicate()[0] for worker in workers]
    return [json.loads(line) for text in printed for line in text.splitlines()]


def main() -> int:
    """Run, report, say whether all was well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stride", type=int, default=1, help="steps from one kill to the next")
    parser.add_argument("--folder", type=Path, default=None, help="where files go meanwhile")
    parser.add_argument("--scratch", action="store_true", help="leave the results of the repository alone")
    arguments = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="echo-crash-steps-", dir=arguments.folder) as folder:
        lines = sweep(Path(folder), arguments.stride)
        undisturbed = next(line for line in lines if not line["step"])
        killed = sorted((line for line in lines if line["step"]), key=lambda line: line["step"])
        faults = [fault for line in [*killed, undisturbed] for fault in faults_in(line, undisturbed)]
        for fault in faults:
            print(f"FAULT: {fault}", file=sys.stderr)
        figures = {
            "steps": json.loads(undisturbed["end"])["steps"],
            "kills": len(killed),
            "kills_before": dict(Counter(line["before"] for line in killed).most_common()),
            "minutes": round((time.monotonic() - began_s) / 60, 1),
            "faults": faults,
        }
        scratch = {"folder": Path(tempfile.gettempdir())} if arguments.scratch else {}
        write_report("crash_steps", figures, packages=("anyio",), **scratch)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
