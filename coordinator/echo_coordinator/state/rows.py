"""Rows of the database: how what is in memory is written and read back. Plain SQL, one function a purpose."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from sqlite3 import Connection
from typing import Any

import msgpack

from echo_coordinator.state.batch import Evaluation, Event, Prompt, UpdateRecord
from echo_coordinator.state.groups import DropCause, Group, GroupState, Slot, SlotState, Work
from echo_coordinator.state.leases import LiveLease, StoredVerdict
from echo_swarm.identity import PeerId
from echo_swarm.trajectory import Reason, Trajectory, prompt_digest

_msgpack: Any = msgpack

_OPEN_STATES = (GroupState.ACTIVE.value, GroupState.READY.value)


def pack_slots(slots: Sequence[Slot]) -> bytes:
    """Encode the slots of a group. One that is being stored counts as filled: its row is in the same transaction."""
    return _msgpack.packb([_slot_row(slot) for slot in slots])


def unpack_slots(data: bytes) -> list[Slot]:
    """Inverse of `pack_slots`."""
    slots: list[Slot] = []
    for state, attempt, lease_id, reward, work, *more in _msgpack.unpackb(data):
        keys = ("peer", "digest", "tokens_digest", "oldest_version", "tokens", "size_bytes")
        made = None if work is None else Work(**dict(zip(keys, work, strict=True)))
        slot = Slot(state=SlotState(state), attempt=attempt, lease_id=lease_id, reward=reward, work=made)
        slot.spared, slot.redrawn = (*more, *(0, attempt)[len(more) :])  # Not in rows of older versions.
        slots.append(slot)
    return slots


def _slot_row(slot: Slot) -> list[object]:
    state = SlotState.FILLED if slot.state is SlotState.STORING else slot.state
    w = slot.work
    work = w and [w.peer, w.digest, w.tokens_digest, w.oldest_version, w.tokens, w.size_bytes]
    return [
        state,
        slot.attempt,
        slot.lease_id,
        slot.reward,
        work,
        slot.spared,
        slot.redrawn,
    ]  # An enumeration's word is packed as text.


def insert_groups(db: Connection, groups: Iterable[Group]) -> None:
    """Write new groups."""
    db.executemany(
        "INSERT INTO groups (group_id, kind, prompt_index, prompt_ids, pinned_version, state, slots) "
        "VALUES (?, ?, ?, ?, ?, ?, ?)",
        [
            (g.group_id, g.kind, g.prompt_index, g.prompt_ids, g.pinned_version, g.state.value, pack_slots(g.slots))
            for g in groups
        ],
    )


def update_groups(db: Connection, groups: Iterable[Group], update_no: int) -> None:
    """Write the present form of groups. A batch in training counts as ready: it returns if we die now."""
    db.executemany(
        "UPDATE groups SET state = ?, cause = ?, no_signal = ?, update_no = ?, slots = ? WHERE group_id = ?",
        [
            (
                GroupState.READY.value if g.state is GroupState.TRAINING else g.state.value,
                g.cause and g.cause.value,
                g.no_signal,
                update_no if g.state in (GroupState.DROPPED, GroupState.CONSUMED) else None,
                pack_slots(g.slots),
                g.group_id,
            )
            for g in groups
        ],
    )


def load_open_groups(db: Connection) -> list[Group]:
    """Return the groups that are under way, oldest first."""
    rows = db.execute(
        "SELECT group_id, kind, prompt_index, prompt_ids, pinned_version, state, cause, no_signal, slots FROM groups "
        "WHERE state IN (?, ?) OR (kind = 'eval' AND state = 'dropped' AND pinned_version NOT IN "
        "(SELECT version FROM evaluations)) ORDER BY group_id",
        _OPEN_STATES,
    )
    return [
        Group(
            group_id=group_id,
            kind=kind,
            prompt_index=index,
            prompt_ids=ids,
            prompt_digest=prompt_digest(ids),
            pinned_version=pinned,
            slots=unpack_slots(slots),
            state=GroupState(state),
            cause=cause and DropCause(cause),
            no_signal=bool(flat),
        )
        for group_id, kind, index, ids, pinned, state, cause, flat, slots in rows
    ]


def next_group_id(db: Connection, kind: str, first: int) -> int:
    """Return the id for the next group of a kind."""
    highest = db.execute("SELECT max(group_id) FROM groups WHERE kind = ?", (kind,)).fetchone()[0]
    return first if highest is None else highest + 1


def new_group(group_id: int, prompt: Prompt, size: int, pinned_version: int | None) -> Group:
    """Return a fresh group."""
    return Group(
        group_id=group_id,
        kind="train" if pinned_version is None else "eval",
        prompt_index=prompt.index,
        prompt_ids=prompt.prompt_ids,
        prompt_digest=prompt_digest(prompt.prompt_ids),
        pinned_version=pinned_version,
        slots=[Slot() for _ in range(size)],
    )


def write_leases(db: Connection, leases: Iterable[LiveLease]) -> None:
    """Write leases in their present form. Deadlines are not kept: after a restart each gets a full term."""
    db.executemany(
        "INSERT INTO leases (lease_id, peer, group_id, min_version, max_version, orphaned, attempts, verdicts) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (lease_id) DO UPDATE SET "
        "orphaned = excluded.orphaned, verdicts = excluded.verdicts",
        [
            (
                lease.lease_id,
                lease.peer,
                lease.group_id,
                lease.min_version,
                lease.max_version,
                lease.orphaned,
                _msgpack.packb(lease.draws),
                _msgpack.packb({m: (v.digest, v.reason, v.detail) for m, v in lease.verdicts.items()}),
            )
            for lease in leases
        ],
    )


_LEASE_COLUMNS = "lease_id, peer, group_id, min_version, max_version, orphaned, attempts, verdicts"


def load_leases(db: Connection, lease_ids: Iterable[bytes]) -> dict[bytes, LiveLease]:
    """Return leases by id, held slots unknown; those that never existed are absent."""
    found: dict[bytes, LiveLease] = {}
    for lease_id in lease_ids:
        row = db.execute(f"SELECT {_LEASE_COLUMNS} FROM leases WHERE lease_id = ?", (lease_id,)).fetchone()
        if row is not None:
            found[lease_id] = _lease(row, deadline=0.0, hard_deadline=0.0)
    return found


def load_group_leases(db: Connection, group_id: int, *, deadline: float, hard_deadline: float) -> list[LiveLease]:
    """Return all leases ever granted on a group."""
    rows = db.execute(f"SELECT {_LEASE_COLUMNS} FROM leases WHERE group_id = ?", (group_id,))
    return [_lease(row, deadline=deadline, hard_deadline=hard_deadline) for row in rows]


def _lease(row: tuple[Any, ...], *, deadline: float, hard_deadline: float) -> LiveLease:
    lease_id, peer, group_id, low, high, orphaned, draws, verdicts = row
    stored: dict[int, tuple[bytes, str, str]] = _msgpack.unpackb(verdicts, strict_map_key=False)
    return LiveLease(
        lease_id=lease_id,
        peer=PeerId(peer),
        group_id=group_id,
        draws=_msgpack.unpackb(draws, strict_map_key=False),
        outstanding=set(),
        deadline=deadline,
        hard_deadline=hard_deadline,
        min_version=low,
        max_version=high,
        verdicts={m: StoredVerdict(digest=d, reason=Reason(r), detail=t) for m, (d, r, t) in stored.items()},
        orphaned=bool(orphaned),
    )


def insert_trajectories(db: Connection, rows: Iterable[tuple[Any, ...]]) -> None:
    """Write accepted completions, as made by `trajectory_row`. A slot that was scored in vain is filled anew."""
    db.executemany("INSERT OR REPLACE INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)


def trajectory_row(trajectory: Trajectory, peer: str, received_at: float) -> tuple[Any, ...]:
    """Return the row of a completion."""
    policy = trajectory.policy
    return (
        trajectory.group_id,
        trajectory.member,
        peer,
        policy.oldest_version,
        policy.newest_version,
        policy.artifact_digest,
        policy.backend,
        policy.build,
        policy.precision,
        trajectory.temperature,
        trajectory.seed,
        trajectory.finish_reason.value,
        received_at,
        trajectory.token_ids,
        trajectory.logprobs,
    )


@dataclass(frozen=True, slots=True)
class StoredTrajectory:
    """What scoring and training read of a completion."""

    peer: str
    oldest_version: int
    newest_version: int
    backend: str
    precision: str
    finish_reason: str
    token_ids: bytes
    logprobs: bytes
    seed: int


def load_trajectories(db: Connection, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], StoredTrajectory]:
    """Return completions by (group, member); those that are not there are absent."""
    found: dict[tuple[int, int], StoredTrajectory] = {}
    for key in keys:
        row = db.execute(
            "SELECT peer, oldest_version, newest_version, backend, precision, finish_reason, token_ids, logprobs, "
            "seed FROM trajectories WHERE group_id = ? AND member = ?",
            key,
        ).fetchone()
        if row is not None:
            found[key] = StoredTrajectory(*row)
    return found


def insert_update(db: Connection, record: UpdateRecord, group_ids: Iterable[int]) -> None:
    """Write a line of the ledger and mark what it consumed."""
    db.execute(
        "INSERT INTO updates VALUES (?, ?, ?, ?, ?)",
        (record.update_no, record.new_version, record.checkpoint, record.committed_at, json.dumps(record.metrics)),
    )
    db.executemany(
        "UPDATE groups SET state = 'consumed', update_no = ? WHERE group_id = ?",
        [(record.update_no, group_id) for group_id in group_ids],
    )


def load_updates(db: Connection, limit: int) -> list[UpdateRecord]:
    """Return the newest lines of the ledger, newest first."""
    rows = db.execute("SELECT * FROM updates ORDER BY update_no DESC LIMIT ?", (limit,))
    return [
        UpdateRecord(update_no=n, new_version=v, checkpoint=c, committed_at=at, metrics=json.loads(metrics))
        for n, v, c, at, metrics in rows
    ]


def consumed_groups(db: Connection, update_no: int) -> list[int]:
    """Return the ids of the groups that an update consumed."""
    rows = db.execute(
        "SELECT group_id FROM groups WHERE state = 'consumed' AND kind = 'train' AND update_no = ?", (update_no,)
    )
    return sorted(group_id for (group_id,) in rows)


def insert_version(db: Connection, version: int, artifact_digests: Iterable[bytes], at: float) -> None:
    """Write a published version; once more with the same content does nothing new."""
    db.execute("INSERT OR REPLACE INTO versions VALUES (?, ?, ?)", (version, at, b"".join(sorted(artifact_digests))))


def load_versions(db: Connection) -> dict[int, frozenset[bytes]]:
    """Return the artifact digests of each published version."""
    rows = db.execute("SELECT version, artifact_digests FROM versions ORDER BY version")
    return {version: frozenset(d[i : i + 32] for i in range(0, len(d), 32)) for version, d in rows}


def insert_evaluation(db: Connection, evaluation: Evaluation, at: float) -> None:
    """Write an evaluation and close its groups."""
    db.execute(
        "INSERT OR REPLACE INTO evaluations VALUES (?, ?, ?, ?, ?)",
        (evaluation.version, evaluation.accuracy, evaluation.prompts, evaluation.scored, at),
    )


def load_evaluations(db: Connection) -> list[Evaluation]:
    """Return all evaluations by version."""
    rows = db.execute("SELECT version, accuracy, prompts, scored FROM evaluations ORDER BY version")
    return [Evaluation(version=v, accuracy=a, prompts=p, scored=s) for v, a, p, s in rows]


def write_counters(db: Connection, rows: Iterable[tuple[str, str, int]]) -> None:
    """Write (scope, name, value)."""
    db.executemany("INSERT OR REPLACE INTO counters VALUES (?, ?, ?)", rows)


def load_counters(db: Connection) -> list[tuple[str, str, int]]:
    """Return (scope, name, value)."""
    return db.execute("SELECT scope, name, value FROM counters").fetchall()


def set_fact(db: Connection, name: str, value: int) -> None:
    """Write a single number of the run."""
    db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))


def load_facts(db: Connection) -> dict[str, int]:
    """Return all single numbers of the run."""
    return dict(db.execute("SELECT name, value FROM facts").fetchall())


def insert_event(db: Connection, event: Event, keep: int = 10_000) -> None:
    """Write an event and forget the oldest beyond `keep`."""
    cursor = db.execute("INSERT INTO events (at, kind, text) VALUES (?, ?, ?)", (event.at, event.kind, event.text))
    db.execute("DELETE FROM events WHERE event_id <= ?", ((cursor.lastrowid or 0) - keep,))


def load_events(db: Connection, limit: int) -> list[Event]:
    """Return the newest events, newest first."""
    rows = db.execute("SELECT at, kind, text FROM events ORDER BY event_id DESC LIMIT ?", (limit,))
    return [Event(at=at, kind=kind, text=text) for at, kind, text in rows]
