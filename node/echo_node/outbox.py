"""Finished work on its way to the coordinator: on disk before the first push, gone only with its verdicts.

    worker ──put──► submissions (SQLite, WAL, synchronous=FULL) ──oldest──► pusher ──settle──► counters

The rule that keeps the node's counters equal to the coordinator's: a submission that was ever sent stays until an
answer is here, and pushing it again is harmless; removing it and counting its verdicts is one transaction. Only what
was never sent may be dropped on our own judgement (over-stale, no room), and it is counted under our own names.
"""

import contextlib
import hashlib
import sqlite3
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from echo_swarm.checkpoint.files import make_folder
from echo_swarm.errors import LocalFault, StorageFull, UsageError

DEFAULT_MAX_BYTES = 256 << 20
"""About 25,000 trajectories of 10 KB: many hours of a fast node's work."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS submissions (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    digest BLOB NOT NULL UNIQUE,
    envelope BLOB NOT NULL,
    trajectories INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    oldest_version INTEGER,
    lease_ids BLOB NOT NULL,
    sent INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
"""


class Dropped(StrEnum):
    """Why the node itself gave up finished work that the coordinator never saw."""

    STALE = "node_stale"
    """Older than `max_staleness` against the newest head we know of."""
    FULL = "node_outbox_full"
    """The coordinator was away for so long that the outbox reached its limit; the oldest go first."""
    UNANSWERED = "node_unanswered"
    """The coordinator refused the whole submission without verdicts that can be counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A submission that waits, such as 8 trajectories of version 12 with 2048 tokens."""

    id: int
    """Rising with age: lower is older."""
    envelope: bytes
    """Signed Submission."""
    trajectories: int
    tokens: int
    """Completion tokens of all of them."""
    oldest_version: int | None
    """Every trajectory inside has this one; None if they do not go stale."""


class Outbox:
    """The queue on disk. Blocking; may be used from several threads, one at a time gets in."""

    def __init__(self, path: Path, *, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._path = path
        self._lock = threading.Lock()
        make_folder(path.parent)
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as e:
            raise UsageError(
                f"the outbox {path} cannot be opened ({e}); move it away to start with an empty one"
            ) from e

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def put(
        self, envelope: bytes, *, trajectories: int, tokens: int, oldest_version: int | None, lease_ids: Iterable[bytes]
    ) -> bool:
        """Store a submission durably; the same bytes twice are stored once.

        Makes room by dropping the oldest that were never sent.

        Args:
            envelope: signed Submission.
            trajectories: how many are inside.
            tokens: their completion tokens.
            oldest_version: the same for all of them; None when only the coordinator can tell whether they are stale.
            lease_ids: the leases they belong to.

        Returns:
            Whether it is stored. False when even that leaves no room: it is counted as dropped.

        Raises:
            StorageFull: the disk has no room.

        """
        digest = hashlib.sha256(envelope).digest()
        with self._transaction():
            if not self._make_room(len(envelope)):
                self._count({Dropped.FULL: trajectories})
                return False
            self._db.execute(
                "INSERT OR IGNORE INTO submissions (digest, envelope, trajectories, tokens, oldest_version, lease_ids)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                (digest, envelope, trajectories, tokens, oldest_version, b"".join(sorted(set(lease_ids)))),
            )
        return True

    def oldest(self, beside: Collection[int] = ()) -> Entry | None:
        """Return what is to be pushed next, beside these."""
        left_out = ",".join(str(int(entry_id)) for entry_id in beside)
        return self._entry(f"WHERE id NOT IN ({left_out}) ORDER BY id LIMIT 1")

    def get(self, entry_id: int) -> Entry | None:
        """Return a submission; None if it has left."""
        return self._entry(f"WHERE id = {int(entry_id)}")

    def _entry(self, where: str) -> Entry | None:
        rows = self._read(f"SELECT id, envelope, trajectories, tokens, oldest_version FROM submissions {where}")
        if not rows:
            return None
        row = rows[0]
        return Entry(id=row[0], envelope=row[1], trajectories=row[2], tokens=row[3], oldest_version=row[4])

    def mark_sent(self, entry_id: int) -> bool:
        """Note, before the first byte goes out, that the coordinator may know this submission.

        Returns whether this is news: False if it was marked before.
        """
        with self._transaction():
            changed = self._db.execute("UPDATE submissions SET sent = 1 WHERE id = ? AND sent = 0", (entry_id,))
            return bool(changed.rowcount)

    def unmark_sent(self, entry_id: int) -> None:
        """Take `mark_sent` back: the coordinator said that it took nothing."""
        with self._transaction():
            self._db.execute("UPDATE submissions SET sent = 0 WHERE id = ?", (entry_id,))

    def settle(self, entry_id: int, counts: Mapping[str, int], *, tokens: int = 0) -> bool:
        """Remove a submission and count its outcome, in one transaction. A second call for the same one does nothing.

        Args:
            entry_id: of `oldest`.
            counts: trajectories by reason.
            tokens: completion tokens that were accepted.

        """
        with self._transaction():
            removed = self._db.execute("DELETE FROM submissions WHERE id = ?", (entry_id,)).rowcount
            if removed:
                self._count({**counts, "tokens_accepted": tokens} if tokens else counts)
        return bool(removed)

    def drop_stale(self, lowest_version: int) -> int:
        """Drop what was never sent and is older than `lowest_version`; returns how many trajectories that were."""
        with self._transaction():
            row = self._db.execute(
                "SELECT COALESCE(SUM(trajectories), 0) FROM submissions WHERE sent = 0 AND oldest_version < ?",
                (lowest_version,),
            ).fetchone()
            if row[0]:
                self._db.execute("DELETE FROM submissions WHERE sent = 0 AND oldest_version < ?", (lowest_version,))
                self._count({Dropped.STALE: row[0]})
        return int(row[0])

    def pending(self) -> int:
        """Return how many trajectories wait."""
        return int(self._read("SELECT COALESCE(SUM(trajectories), 0) FROM submissions")[0][0])

    def lease_ids(self) -> set[bytes]:
        """Return the leases of which something waits here."""
        packed = b"".join(row[0] for row in self._read("SELECT lease_ids FROM submissions"))
        return {packed[start : start + 16] for start in range(0, len(packed), 16)}

    def backlogged(self) -> bool:
        """Whether so much waits (half the limit) that no new work should be asked for."""
        with self._faults(), self._lock:
            return self._size_bytes() > self._max_bytes // 2

    def counters(self) -> Counter[str]:
        """Return trajectories by reason since this node first joined the run."""
        return Counter({name: value for name, value in self._read("SELECT name, value FROM counters")})

    def _read(self, query: str) -> list[tuple[Any, ...]]:
        with self._faults(), self._lock:
            return self._db.execute(query).fetchall()

    def _size_bytes(self) -> int:
        return int(self._db.execute("SELECT COALESCE(SUM(LENGTH(envelope)), 0) FROM submissions").fetchone()[0])

    def _make_room(self, needed_bytes: int) -> bool:
        excess = self._size_bytes() + needed_bytes - self._max_bytes
        if excess <= 0:
            return True
        victims: list[tuple[int, int]] = []
        for entry_id, size, count in self._db.execute(
            "SELECT id, LENGTH(envelope), trajectories FROM submissions WHERE sent = 0 ORDER BY id"
        ):
            victims.append((entry_id, count))
            excess -= size
            if excess <= 0:
                break
        if excess > 0:
            return False
        self._db.executemany("DELETE FROM submissions WHERE id = ?", [(entry_id,) for entry_id, _ in victims])
        self._count({Dropped.FULL: sum(count for _, count in victims)})
        return True

    def _count(self, counts: Mapping[str, int]) -> None:
        rows: Sequence[tuple[str, int]] = [(str(name), value) for name, value in counts.items() if value]
        self._db.executemany(
            "INSERT INTO counters (name, value) VALUES (?, ?)"
            " ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
            rows,
        )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._faults(), self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        """Turn what the disk does to the file into our errors."""
        try:
            yield
        except sqlite3.OperationalError as e:
            raise StorageFull(f"the outbox cannot be written ({e}); free some disk space") from e
        except sqlite3.DatabaseError as e:
            if type(e) is not sqlite3.DatabaseError:
                raise  # one of its other kinds: a bug of ours
            raise LocalFault(
                f"the outbox {self._path} is damaged ({e}); move it away to start with an empty one"
            ) from e
