"""Real limits of memory and processor time for a command of a test, where the machine lets us make cgroups."""

import os
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from echo_swarm.cgroups import MOUNT

LIMITED_S = 300.0
"""For a command under a limit; only a failing test waits that long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A cgroup of ours, in as many folders as the machine's version of cgroups wants."""

    folders: tuple[Path, ...]

    def run(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a command in it to the end."""
        joins = "".join(f"echo $$ > {folder}/cgroup.procs && " for folder in self.folders)
        shell = ["sh", "-c", f'{joins}exec "$@"', "sh", *command]
        environment = {key: text for key, text in os.environ.items() if key != "OMP_NUM_THREADS"}
        return subprocess.run(
            shell, capture_output=True, text=True, check=False, timeout=LIMITED_S, env={**environment, "COLUMNS": "200"}
        )


def _make(memory_bytes: int, cpus: float) -> list[tuple[Path, dict[str, str]]]:
    """Return folders to make and what to write into each."""
    name, quota = f"echo-swarm-test-{os.getpid()}", str(int(cpus * 100_000))
    if (MOUNT / "cgroup.controllers").is_file():
        return [(MOUNT / name, {"memory.max": str(memory_bytes), "cpu.max": f"{quota} 100000"})]
    return [
        (MOUNT / "memory" / name, {"memory.limit_in_bytes": str(memory_bytes)}),
        (MOUNT / "cpu" / name, {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": quota}),
    ]


def _remove(folder: Path) -> None:
    """Remove a group once the kernel has let go of the last process in it."""
    until_s = time.monotonic() + LIMITED_S
    while True:
        try:
            return folder.rmdir()
        except OSError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.02)


@contextmanager
def making_groups() -> Generator[Callable[[int, float], Group]]:
    """Make groups with so much memory and so many processors; they are gone after the block."""
    with ExitStack() as made:

        def make(memory_bytes: int, cpus: float) -> Group:
            folders = _make(memory_bytes, cpus)
            try:
                for folder, limits in folders:
                    folder.mkdir()
                    made.callback(_remove, folder)
                    for file, text in limits.items():
                        (folder / file).write_text(text)
            except OSError as e:
                pytest.skip(f"cgroups cannot be made here: {e}")
            return Group(folders=tuple(folder for folder, _ in folders))

        yield make
