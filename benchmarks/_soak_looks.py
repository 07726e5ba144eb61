"""What the soak benchmark sees of processes and folders: memory, handles, threads, disk. Each look is JSON."""

import re
import shutil
import sqlite3
import tempfile
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

KINDS = {
    "p2pd": "p2pd",
    "trainer": "echo_coordinator.trainer",
    "scorer": "echo_coordinator.scoring",
    "backend": "echo_node.backends",
}
"""Kind of child → what its command line has."""
HISTORY = ("state.db", "state.db-wal", "metrics.jsonl", "logs")
"""Of a run's folder: what remembers the past, and so grows with it or is cut off somewhere."""
_VERSION = re.compile(r"v\d{8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process at one moment."""

    rss_mb: float
    handles: int
    threads: int


def family(pid: int) -> dict[str, Process]:
    """Return what a process and its children take, the process itself as `main`; children by kind, added up."""
    found: dict[str, list[Process]] = {}
    with suppress(psutil.Error):
        main = psutil.Process(pid)
        for process in (main, *main.children(recursive=True)):
            with suppress(psutil.Error):
                kind = "main" if process.pid == pid else _kind(process)
                found.setdefault(kind, []).append(_look(process))
    return {
        kind: Process(
            rss_mb=round(sum(p.rss_mb for p in processes), 2),
            handles=sum(p.handles for p in processes),
            threads=sum(p.threads for p in processes),
        )
        for kind, processes in found.items()
    }


def _kind(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    return next((kind for kind, part in KINDS.items() if part in line), "other")


def _look(process: psutil.Process) -> Process:
    with process.oneshot():
        return Process(rss_mb=process.memory_info().rss / 1e6, handles=process.num_fds(), threads=process.num_threads())


def folder_bytes(folder: Path) -> int:
    """Return what the files of a folder take on the disk; those that go meanwhile count nothing."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file():
                total += path.stat().st_blocks * 512
    return total


def parts_of(folder: Path) -> dict[str, int]:
    """Return bytes by what lies at a folder's top; the folders of versions are one part."""
    found: dict[str, int] = {}
    with suppress(OSError):
        for path in sorted(folder.iterdir()):
            with suppress(OSError):
                name = "versions" if _VERSION.fullmatch(path.name) else path.name
                size = folder_bytes(path) if path.is_dir() else path.stat().st_blocks * 512
                found[name] = found.get(name, 0) + size
    return found


def rows_by_table(database: Path) -> dict[str, int]:
    """Return the number of rows of each table, read from a copy: a coordinator keeps its database to itself.

    Empty when the copy was taken at a bad moment.
    """
    with tempfile.TemporaryDirectory() as folder, suppress(sqlite3.Error, OSError):
        copy = Path(folder) / database.name
        for suffix in ("", "-wal"):
            if (path := database.with_name(database.name + suffix)).exists():
                shutil.copyfile(path, copy.with_name(copy.name + suffix))
        with closing(sqlite3.connect(copy)) as connection:
            tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            return {name: int(connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0]) for (name,) in tables}
    return {}


def plain(processes: dict[str, Process]) -> dict[str, Any]:
    """Return a family as JSON values."""
    return {kind: {"rss_mb": p.rss_mb, "handles": p.handles, "threads": p.threads} for kind, p in processes.items()}
