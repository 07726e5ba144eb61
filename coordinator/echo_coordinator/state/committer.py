"""Group commit: many tasks write, one transaction and one fsync carry them.

    push ──► queue ──► statements of all waiting jobs ──► flush of what changed ──► COMMIT in a thread ──► answers
              ▲            (in the event loop, microseconds)                            (fsync)
              └── bounded by bytes: `has_room`                 meanwhile, new jobs gather for the next round

Statements only touch SQLite's cache, so they run in the loop: in a thread they would release and fight for the
interpreter lock row by row. Only the commit, which waits for the disk, leaves the loop.
"""

import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import anyio
from anyio import to_thread

from echo_coordinator.state.database import database_fault
from echo_swarm.errors import LocalFault
from echo_swarm.transport.tasks import background_tasks

T = TypeVar("T")
Job = Callable[[sqlite3.Connection], T]
Commit = Callable[[sqlite3.Connection], Awaitable[object]]
"""Ends a transaction; whatever waits for the disk waits here."""

COMMIT_TIMEOUT_S = 60.0
"""A disk that takes longer has failed."""
_WATCH_S = 1.0
"""How often what waits is looked at."""


async def commit_in_thread(connection: sqlite3.Connection) -> None:
    """Commit while the event loop does other things."""
    await to_thread.run_sync(connection.execute, "COMMIT")


@dataclass(slots=True, eq=False)
class _Entry:
    job: Job[Any]
    size_bytes: int
    on_commit: Callable[[Any], None] | None
    on_fail: Callable[[], None] | None
    done: anyio.Event
    queued_at: float
    result: Any = None
    error: LocalFault | None = None


class Committer:
    """Runs jobs on the connection, in the order of `execute`; each is durable before its caller goes on."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        path: str,
        *,
        max_pending_bytes: int,
        flush: Callable[[sqlite3.Connection], None],
        flushed: Callable[[bool], None],
        commit: Commit = commit_in_thread,
    ) -> None:
        """Describe it.

        Args:
            connection: in autocommit mode.
            path: for messages.
            max_pending_bytes: bound of the queue, see `has_room`.
            flush: writes what changed in memory; called in each transaction, after its jobs.
            flushed: called with whether that transaction is on disk.
            commit: a simulation has a disk of its own, without threads.

        """
        self._connection = connection
        self._path = path
        self._max_pending_bytes = max_pending_bytes
        self._flush = flush
        self._flushed = flushed
        self._commit = commit
        self._queue: list[_Entry] = []
        self._batch: list[_Entry] = []
        """What the round under way writes."""
        self._closed = False
        self._wake = anyio.Event()
        self._lock = anyio.Lock()
        self.pending_bytes = 0
        """Of jobs that are not on disk yet."""

    def has_room(self, size_bytes: int) -> bool:
        """Whether a job of that size may be queued now. An empty queue takes anything."""
        return self.pending_bytes == 0 or self.pending_bytes + size_bytes <= self._max_pending_bytes

    async def execute(
        self,
        job: Job[T],
        *,
        size_bytes: int = 0,
        on_commit: Callable[[T], None] | None = None,
        on_fail: Callable[[], None] | None = None,
    ) -> T:
        """Run `job` and return its result once it is on disk.

        `on_commit` or `on_fail` is called even if the caller is cancelled meanwhile.

        Raises:
            StorageFull, LocalFault: nothing was written, or not within COMMIT_TIMEOUT_S.

        """
        if self._closed:
            raise LocalFault(f"{self._path} takes no writes any more: the run was closed")
        committed = cast("Callable[[Any], None] | None", on_commit)
        entry = _Entry(job, size_bytes, committed, on_fail, anyio.Event(), anyio.current_time())
        self._queue.append(entry)
        self.pending_bytes += size_bytes
        self._wake.set()
        await entry.done.wait()
        if entry.error is not None:
            raise entry.error
        return cast(T, entry.result)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Commit for the length of the block; what is queued at its end is still written."""
        async with background_tasks() as tasks:
            tasks.start_soon(self._run)
            tasks.start_soon(self._watch)
            try:
                yield
            finally:
                with anyio.CancelScope(shield=True):
                    await self._round()
                    while self._queue:  # Came while that was written.
                        await self._round()
                    self._closed = True

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            # A commit that has begun is carried to its end, so that memory and disk agree.
            with anyio.CancelScope(shield=True):
                await self._round()

    async def _watch(self) -> None:
        # One task for all: a deadline of its own for each entry would cost as much as its statements.
        while True:
            await anyio.sleep(_WATCH_S)
            latest = anyio.current_time() - COMMIT_TIMEOUT_S
            for entry in (*self._batch, *self._queue):
                if entry.queued_at < latest and not entry.done.is_set():
                    # It stays in line: if the disk comes back, `on_commit` or `on_fail` is still called.
                    text = f"{self._path} took no write for {COMMIT_TIMEOUT_S:.0f} s; check the disk"
                    entry.error = LocalFault(text)
                    entry.done.set()

    async def _round(self) -> None:
        async with self._lock:
            batch, self._queue = self._queue, []
            self._batch = batch
            error: LocalFault | None = None
            try:
                self._write(batch)
                await self._commit(self._connection)
            except sqlite3.Error as e:
                error = database_fault(e, self._path)
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
            self._answer(batch, error)

    def _write(self, batch: list[_Entry]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        for entry in batch:
            entry.result = entry.job(self._connection)
        self._flush(self._connection)

    def _answer(self, batch: list[_Entry], error: LocalFault | None) -> None:
        self._flushed(error is None)
        for entry in batch:
            self.pending_bytes -= entry.size_bytes
            entry.error = error
            if error is None and entry.on_commit is not None:
                entry.on_commit(entry.result)
            if error is not None and entry.on_fail is not None:
                entry.on_fail()
            entry.done.set()
