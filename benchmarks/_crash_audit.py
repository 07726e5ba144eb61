"""The recorded history of the crash benchmark: read whenever the coordinator is dead, and compared with itself.

`History.look`: the ledger only grows, its lines are contiguous, each update consumed as many groups as it should, none
of them another update's, and every completion that it trained on is there as it was accepted.
`replay`: training the recorded batches again in one process, without a crash, gives the weights that are on the disk.
"""

import hashlib
import json
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echo_coordinator.run_folder import RunFolder
from echo_coordinator.state import rows
from echo_coordinator.state.groups import SlotState
from echo_coordinator.trainer.batch import Group, Member, TrainingBatch
from echo_coordinator.trainer.settings import load_config
from echo_coordinator.trainer.state import WEIGHTS_FILE

Faults = list[str]


@contextmanager
def copied(database: Path) -> Iterator[sqlite3.Connection]:
    """Open a copy of a database whose owner is dead, so that the original stays as the crash left it."""
    with tempfile.TemporaryDirectory() as folder:
        for suffix in ("", "-wal"):
            if (path := database.with_name(database.name + suffix)).exists():
                shutil.copyfile(path, Path(folder) / path.name)
        with closing(sqlite3.connect(Path(folder) / database.name)) as connection:
            yield connection


@dataclass(slots=True)
class History:
    """What was ever seen of the ledger."""

    run: RunFolder
    groups_per_update: int = 0
    ledger: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    """Update → the groups that it consumed."""
    update_of: dict[int, int] = field(default_factory=dict[int, int])
    """The other way round."""
    weights: dict[int, str] = field(default_factory=dict[int, str])
    """Version → sha256 of the trainer's weights."""
    looks: int = 0
    ahead: int = 0
    """Looks at which the trainer's checkpoint was an update ahead of the ledger."""
    unpublished: int = 0
    """Looks at which the ledger was a version ahead of what is published."""

    def look(self) -> Faults:
        """Read the database of a dead coordinator. Returns what is wrong."""
        if not self.run.database.exists():
            return []
        self.looks += 1
        with copied(self.run.database) as db:
            if db.execute("PRAGMA integrity_check").fetchone()[0] != "ok":
                return ["the database is damaged"]
            faults = self._lines(db)
            for update in range(len(self.ledger) + 1, self._count(db) + 1):
                faults += self._update(db, update)
            faults += self._published(db)
        return [*faults, *self._checkpoints()]

    def _count(self, db: sqlite3.Connection) -> int:
        return int(db.execute("SELECT count(*) FROM updates").fetchone()[0])

    def _lines(self, db: sqlite3.Connection) -> Faults:
        lines = db.execute("SELECT update_no, new_version FROM updates ORDER BY update_no").fetchall()
        faults = [] if lines == [(n, n) for n in range(1, len(lines) + 1)] else [f"the ledger has gaps: {lines[-5:]}"]
        if len(lines) < len(self.ledger):
            faults.append(f"the ledger lost lines: {len(self.ledger)}, now {len(lines)}")
        moved = [
            f"group {group} was update {self.update_of[group]}'s, now {update}'s"
            for group, update, state in db.execute("SELECT group_id, update_no, state FROM groups WHERE kind = 'train'")
            if group in self.update_of and (update, state) != (self.update_of[group], "consumed")
        ]
        return [*faults, *moved]

    def _update(self, db: sqlite3.Connection, update: int) -> Faults:
        groups = tuple(rows.consumed_groups(db, update))
        self.ledger[update] = groups
        faults = [
            f"group {group} is in updates {self.update_of[group]} and {update}"
            for group in groups
            if group in self.update_of
        ]
        self.update_of.update(dict.fromkeys(groups, update))
        if len(groups) != self.groups_per_update:
            faults.append(f"update {update} consumed {len(groups)} groups")
        return [*faults, *(fault for group in groups for fault in _as_accepted(db, group))]

    def _published(self, db: sqlite3.Connection) -> Faults:
        published = db.execute("SELECT max(version) FROM versions").fetchone()[0]
        updates = self._count(db)
        if published is None:
            return []
        self.unpublished += updates - published == 1
        return (
            [] if published in (updates, updates - 1) else [f"version {published} is published, {updates} are trained"]
        )

    def _checkpoints(self) -> Faults:
        faults: Faults = []
        newest = 0
        for folder in sorted(self.run.checkpoints.glob("v*")):
            if not folder.name[1:].isdigit() or not (folder / "state.json").exists():
                continue
            state: dict[str, Any] = json.loads((folder / "state.json").read_text())
            version = int(folder.name[1:])
            newest = max(newest, version)
            digest = hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()
            if self.weights.setdefault(version, digest) != digest:
                faults.append(f"version {version} has other weights than before")
            said = tuple(sorted(state.get("state", state).get("consumed_groups", ())))
            if version in self.ledger and said != self.ledger[version]:
                faults.append(f"checkpoint {version} consumed {said}, the ledger says {self.ledger[version]}")
        self.ahead += newest == len(self.ledger) + 1
        if newest not in (len(self.ledger), len(self.ledger) + 1):
            faults.append(f"the newest checkpoint is {newest}, the ledger has {len(self.ledger)} updates")
        return faults


def _as_accepted(db: sqlite3.Connection, group: int) -> Faults:
    """Compare what a group's slots say of their work with the completions that are stored."""
    (packed,) = db.execute("SELECT slots FROM groups WHERE group_id = ?", (group,)).fetchone()
    faults: Faults = []
    stored = dict(db.execute("SELECT member, token_ids FROM trajectories WHERE group_id = ?", (group,)).fetchall())
    for member, slot in enumerate(rows.unpack_slots(packed)):
        if slot.state is SlotState.SCORED:
            assert slot.work is not None
            if member not in stored:
                faults.append(f"completion {group}/{member} was trained and is not there")
            elif _work(stored[member]) != slot.work.tokens_digest:
                faults.append(f"completion {group}/{member} is another one than was accepted")
    return faults


def _work(token_ids: bytes) -> bytes:
    return hashlib.sha256(token_ids).digest()[:16]


@dataclass(slots=True, kw_only=True)
class Accounts:
    """What became of all that nodes were told was accepted."""

    told: int = 0
    """Different completions."""
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter[str])
    """By cause of their group, or `given up` where their own slot was tried again or not used."""
    waiting: int = 0
    """In groups that are not settled."""
    faults: Faults = field(default_factory=list[str])


def account(run: RunFolder, verdicts: Iterable[Path]) -> Accounts:
    """Look up every completion that a node was told was accepted."""
    found = Accounts()
    told = {
        (line["group"], line["member"], line["work"])
        for path in verdicts
        if path.exists()
        for line in map(json.loads, path.read_text().splitlines())
        if line["verdict"] == "accepted"
    }
    found.told = len(told)
    with copied(run.database) as db:
        groups = {row[0]: row[1:] for row in db.execute("SELECT group_id, state, cause, slots FROM groups")}
        stored = {
            (g, m): _work(ids).hex() for g, m, ids in db.execute("SELECT group_id, member, token_ids FROM trajectories")
        }
        given_up = dict(db.execute("SELECT name, value FROM counters WHERE scope = 'dropped_slots'").fetchall())
    replaced = 0
    for group, member, work in sorted(told):
        if group not in groups or (group, member) not in stored:
            found.faults.append(f"completion {group}/{member} was accepted and is not there")
            continue
        state, cause, slots = groups[group]
        if stored[group, member] != work:
            replaced += 1
            found.dropped["tried again"] += 1
        elif state == "dropped":
            found.dropped[str(cause)] += 1
            if not cause:
                found.faults.append(f"group {group} was dropped without a cause")
        elif state == "consumed":
            scored = rows.unpack_slots(slots)[member].state is SlotState.SCORED
            found.trained += scored
            found.dropped["given up"] += not scored
        else:
            found.waiting += 1
    counted = sum(given_up.values())
    if replaced + found.dropped["given up"] > counted:
        found.faults.append(f"{replaced} completions were tried again, {counted} are counted as dropped: {given_up}")
    return found


def compare_counts(run: RunFolder, nodes: Mapping[str, tuple[str, Path]]) -> Faults:
    """Compare what each node counted as accepted with what the coordinator did. `nodes`: name → peer id, outbox."""
    faults: Faults = []
    with copied(run.database) as db:
        for name, (peer, outbox) in nodes.items():
            row = db.execute("SELECT value FROM counters WHERE scope = ? AND name = 'accepted'", (peer,)).fetchone()
            with copied(outbox) as own:
                counted = own.execute("SELECT value FROM counters WHERE name = 'accepted'").fetchone()
                waiting = own.execute("SELECT count(*) FROM submissions").fetchone()[0]
            if row != counted or waiting:
                faults.append(f"{name} counted {counted} accepted, {waiting} wait; the coordinator counted {row}")
    return faults


def replay(run: RunFolder, history: History, max_staleness: int, scratch: Path) -> tuple[int, Faults]:
    """Train all recorded batches in this process; return how many versions had the same weights, and what differed."""
    from echo_coordinator.trainer.engine import Trainer

    config = load_config(run.root / "trainer.json")
    trainer = Trainer(config.model_copy(update={"checkpoint_folder": scratch, "published_version": 0}))
    same = 0
    with copied(run.database) as db:
        for update, groups in sorted(history.ledger.items()):
            trainer.train(_batch(db, update, groups, max_staleness))
            path = trainer.save().weights_path
            if (known := history.weights.get(update)) is None:
                continue
            if hashlib.sha256(path.read_bytes()).hexdigest() != known:
                return same, [f"version {update} has other weights than its batches give"]
            same += 1
    return same, []


def _batch(db: sqlite3.Connection, update: int, groups: tuple[int, ...], max_staleness: int) -> TrainingBatch:
    version = update - 1
    return TrainingBatch(
        update=update,
        policy_version=version,
        groups=tuple(Group(group_id=group, members=_members(db, group, version, max_staleness)) for group in groups),
    )


def _members(db: sqlite3.Connection, group: int, version: int, max_staleness: int) -> tuple[Member, ...]:
    prompt_ids, packed = db.execute("SELECT prompt_ids, slots FROM groups WHERE group_id = ?", (group,)).fetchone()
    slots = rows.unpack_slots(packed)
    places = [place for place, slot in enumerate(slots) if slot.state is SlotState.SCORED]
    made = rows.load_trajectories(db, [(group, place) for place in places])
    return tuple(
        Member(
            prompt_ids=prompt_ids,
            token_ids=made[group, place].token_ids,
            logprobs=made[group, place].logprobs,
            reward=slots[place].reward,
            trained=version - made[group, place].oldest_version <= max_staleness,
            oldest_version=made[group, place].oldest_version,
            newest_version=made[group, place].newest_version,
            backend=made[group, place].backend,
            precision=made[group, place].precision,
            peer_id=made[group, place].peer,
            finish_reason="stop" if made[group, place].finish_reason == "stop" else "length",
        )
        for place in places
    )
