"""The run's one SQLite file: replay buffer, leases, ledger of what was trained, counters, events.

WAL with synchronous=FULL: a commit is on disk when it returns. The schema has a number; a file of a newer one is
refused, an older one is brought forward in one transaction.
"""

import sqlite3
from pathlib import Path

from echo_swarm.errors import LocalFault, StorageFull

SCHEMA_VERSION = 6
APPLICATION_ID = 0x4563686F
"""'Echo', in the file's header: tells our files from other people's."""

_MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE groups (
        group_id INTEGER PRIMARY KEY,
        kind TEXT NOT NULL,
        prompt_index INTEGER NOT NULL,
        prompt_ids BLOB NOT NULL,
        pinned_version INTEGER,
        state TEXT NOT NULL,          -- active, ready, consumed, dropped
        cause TEXT,                   -- of a drop
        no_signal INTEGER NOT NULL DEFAULT 0,
        update_no INTEGER,            -- that consumed it, or during which it was dropped
        slots BLOB NOT NULL           -- msgpack, see rows.pack_slots
    );
    CREATE INDEX groups_by_state ON groups (state, update_no);
    CREATE TABLE leases (
        lease_id BLOB PRIMARY KEY,
        peer TEXT NOT NULL,
        group_id INTEGER NOT NULL,
        min_version INTEGER NOT NULL,
        max_version INTEGER,
        orphaned INTEGER NOT NULL,
        attempts BLOB NOT NULL,       -- msgpack {member: number of its seed}
        verdicts BLOB NOT NULL        -- msgpack {member: [digest, reason, detail]}
    ) WITHOUT ROWID;
    CREATE INDEX leases_by_group ON leases (group_id);
    CREATE TABLE trajectories (
        group_id INTEGER NOT NULL,
        member INTEGER NOT NULL,
        peer TEXT NOT NULL,
        oldest_version INTEGER NOT NULL,
        newest_version INTEGER NOT NULL,
        artifact_digest BLOB NOT NULL,
        backend TEXT NOT NULL,
        build TEXT NOT NULL,
        precision TEXT NOT NULL,
        temperature REAL NOT NULL,
        seed INTEGER NOT NULL,
        finish_reason TEXT NOT NULL,
        received_at REAL NOT NULL,
        token_ids BLOB NOT NULL,
        logprobs BLOB NOT NULL,
        PRIMARY KEY (group_id, member)
    );
    CREATE TABLE updates (
        update_no INTEGER PRIMARY KEY,
        new_version INTEGER NOT NULL,
        checkpoint TEXT NOT NULL,
        committed_at REAL NOT NULL,
        metrics TEXT NOT NULL         -- JSON
    );
    CREATE TABLE versions (
        version INTEGER PRIMARY KEY,
        published_at REAL NOT NULL,
        artifact_digests BLOB NOT NULL  -- 32 bytes each, concatenated
    );
    CREATE TABLE evaluations (
        version INTEGER PRIMARY KEY,
        accuracy REAL,
        prompts INTEGER NOT NULL,
        scored INTEGER NOT NULL,
        recorded_at REAL NOT NULL
    );
    CREATE TABLE peers (
        peer TEXT PRIMARY KEY,
        role TEXT NOT NULL,
        backend TEXT,                 -- JSON of BackendReport
        first_seen_at REAL NOT NULL,
        last_seen_at REAL NOT NULL
    );
    CREATE TABLE counters (
        scope TEXT NOT NULL,
        name TEXT NOT NULL,
        value INTEGER NOT NULL,
        PRIMARY KEY (scope, name)
    ) WITHOUT ROWID;
    CREATE TABLE events (
        event_id INTEGER PRIMARY KEY AUTOINCREMENT,
        at REAL NOT NULL,
        kind TEXT NOT NULL,
        text TEXT NOT NULL
    );
    CREATE TABLE facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
    """,
    """
    CREATE TABLE probe_items (
        place INTEGER PRIMARY KEY,    -- from 0
        prompt_ids BLOB NOT NULL,
        completion_ids BLOB NOT NULL
    );
    CREATE TABLE probe_references (
        version INTEGER PRIMARY KEY,
        logprobs BLOB NOT NULL        -- the trainer's, float32, item after item
    );
    CREATE TABLE probe_answers (
        answer_id INTEGER PRIMARY KEY AUTOINCREMENT,
        at REAL NOT NULL,
        peer TEXT NOT NULL,
        backend TEXT NOT NULL,
        precision TEXT NOT NULL,
        version INTEGER NOT NULL,     -- that the peer names
        verdict TEXT NOT NULL,
        detail TEXT NOT NULL,
        gap_mean REAL,                -- nats a token, as are the next two
        gap_most REAL,
        gap_bias REAL,
        confirmed INTEGER NOT NULL,
        logprobs BLOB NOT NULL        -- as signed by the peer, for whoever wants to look again
    );
    """,
    """
    CREATE TABLE audits (
        group_id INTEGER NOT NULL,
        peer TEXT NOT NULL,
        at REAL NOT NULL,
        version INTEGER NOT NULL,     -- highest that it names
        backend TEXT NOT NULL,
        precision TEXT NOT NULL,
        verdict TEXT NOT NULL,
        detail TEXT NOT NULL,
        seconds REAL NOT NULL,        -- of the trainer
        tokens INTEGER NOT NULL,
        gap REAL NOT NULL,            -- nats a token, as is the next
        bias REAL NOT NULL,
        surprise REAL NOT NULL,       -- summed, nats
        variance REAL NOT NULL,       -- of the sum
        PRIMARY KEY (group_id, peer)
    ) WITHOUT ROWID;
    CREATE TABLE standings (
        peer TEXT PRIMARY KEY,
        clean INTEGER NOT NULL,       -- audits in a row
        failed INTEGER NOT NULL,      -- audits ever, until pardoned
        until REAL NOT NULL,          -- seconds since 1970 at which it may have work again
        detail TEXT NOT NULL,         -- of its last failure
        tokens INTEGER NOT NULL,      -- audited and clean; the next two are theirs
        surprise REAL NOT NULL,
        variance REAL NOT NULL
    ) WITHOUT ROWID;
    CREATE TABLE secrets (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
    """,
    """
    CREATE TABLE bans (
        peer TEXT PRIMARY KEY,
        at REAL NOT NULL,             -- seconds since 1970
        reason TEXT NOT NULL,         -- in the owner's words
        takes_back INTEGER NOT NULL   -- what it delivered and nobody trained on is not used either
    ) WITHOUT ROWID;
    """,
    """
    -- Of the audits that `tokens` counts: how far seeds were from what was drawn, in probability.
    ALTER TABLE standings ADD COLUMN strays REAL NOT NULL DEFAULT 0;
    ALTER TABLE standings ADD COLUMN strays_room REAL NOT NULL DEFAULT 0;
    ALTER TABLE standings ADD COLUMN strays_variance REAL NOT NULL DEFAULT 0;
    """,
    """
    -- Of the same: sum of what log-probabilities were off, as shares of what was allowed.
    ALTER TABLE standings ADD COLUMN gap REAL NOT NULL DEFAULT 0;
    """,
)


def open_database(path: Path, *, busy_timeout_s: float = 5.0, durable: bool = True) -> sqlite3.Connection:
    """Open or create the file. The connection is used by one job at a time (see `committer`).

    Unless `durable`, a commit does not wait for the disk: for simulations.

    Raises:
        LocalFault: the file is not ours, newer than this program, damaged, or in use by another coordinator.
        StorageFull: no room for it.

    """
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=busy_timeout_s)
        try:
            _prepare(connection, path, durable)
        except BaseException:
            connection.close()
            raise
    except sqlite3.Error as e:
        raise database_fault(e, path) from e
    return connection


def database_fault(error: sqlite3.Error, path: Path | str) -> LocalFault:
    """Return our error for one of SQLite's."""
    code = getattr(error, "sqlite_errorcode", 0) or 0
    if code & 0xFF == sqlite3.SQLITE_FULL:
        return StorageFull(f"no room left to write {path}; free some space, nothing that was acknowledged is lost")
    if code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return LocalFault(f"{path} is in use by another process; is a coordinator of this run still running?")
    return LocalFault(f"the database {path} cannot be used: {error}")


def _prepare(connection: sqlite3.Connection, path: Path, durable: bool) -> None:
    found = int(connection.execute("PRAGMA user_version").fetchone()[0])
    owner = int(connection.execute("PRAGMA application_id").fetchone()[0])
    empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    if not empty and owner != APPLICATION_ID:
        raise LocalFault(f"{path} is a database of another program; move it away")
    if found > SCHEMA_VERSION:
        raise LocalFault(
            f"{path} was written by a newer version of this program (schema {found}, this one knows "
            f"{SCHEMA_VERSION}); install that version again"
        )
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
    # One coordinator a run: a second one fails here instead of writing into the first one's book.
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    connection.execute("PRAGMA cache_size = -65536")
    connection.execute("BEGIN IMMEDIATE")
    try:
        for number, script in enumerate(_MIGRATIONS[found:], found + 1):
            for statement in _statements(script):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number}")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise


def _statements(script: str) -> list[str]:
    # Not `executescript`: that commits first, and a migration must be all or nothing.
    lines = [line.split("--")[0] for line in script.splitlines()]
    return [statement for statement in "\n".join(lines).split(";") if statement.strip()]
