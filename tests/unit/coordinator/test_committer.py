"""Writes are answered once they are on disk, in time or not at all, and none after the end."""

import sqlite3
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest

from echo_coordinator.state import committer as module
from echo_coordinator.state.committer import Committer
from echo_swarm.errors import LocalFault

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """The coordinator runs on asyncio."""
    return "asyncio"


class SlowDisk(sqlite3.Connection):
    """Commits only while `ready` is set."""

    ready: threading.Event

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        if sql == "COMMIT":
            self.ready.wait(60)
        return super().execute(sql, *parameters)


def open_disk(folder: Path) -> SlowDisk:
    connection = sqlite3.connect(
        folder / "x.sqlite", factory=SlowDisk, isolation_level=None, check_same_thread=False, timeout=1
    )
    connection.ready = threading.Event()
    connection.ready.set()
    connection.execute("CREATE TABLE numbers (number)")
    return connection


def committer_on(connection: SlowDisk) -> Committer:
    return Committer(connection, "x.sqlite", max_pending_bytes=1000, flush=lambda _: None, flushed=lambda _: None)


def insert(number: int):
    return lambda db: db.execute("INSERT INTO numbers VALUES (?)", (number,)).rowcount


async def test_a_disk_that_takes_nothing_is_told_and_what_it_takes_later_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMMIT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(module, "_WATCH_S", 0.01)
    connection, noted = open_disk(tmp_path), []
    committer = committer_on(connection)
    async with committer.running():
        connection.ready.clear()
        with anyio.fail_after(60):
            for number in (1, 2):  # The first is being committed, the second waits behind it.
                with pytest.raises(LocalFault, match="took no write"):
                    await committer.execute(insert(number), size_bytes=10, on_commit=noted.append)
            assert committer.pending_bytes == 20 and not noted
            connection.ready.set()
            monkeypatch.setattr(module, "COMMIT_TIMEOUT_S", 60)
            assert await committer.execute(insert(3), on_commit=noted.append) == 1
    assert noted == [1, 1, 1] and committer.pending_bytes == 0
    assert connection.execute("SELECT number FROM numbers ORDER BY rowid").fetchall() == [(1,), (2,), (3,)]
    connection.close()


async def test_what_comes_while_the_run_is_closed_is_written_and_what_comes_after_is_refused(tmp_path: Path) -> None:
    connection = open_disk(tmp_path)
    committer = committer_on(connection)
    results: list[int] = []

    async def write(number: int) -> None:
        results.append(await committer.execute(insert(number)))

    async with anyio.create_task_group() as tasks, committer.running():
        connection.ready.clear()
        tasks.start_soon(write, 1)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(write, 2)
        await anyio.wait_all_tasks_blocked()
        connection.ready.set()
    assert results == [1, 1]
    with pytest.raises(LocalFault, match="was closed"):
        await committer.execute(insert(3))
    assert connection.execute("SELECT count(*) FROM numbers").fetchone() == (2,)
    connection.close()
