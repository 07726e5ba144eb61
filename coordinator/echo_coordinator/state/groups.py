"""Groups: the completions of one prompt that are compared with each other, and what becomes of them.

The life of a slot (one member of a group), rules in docs/adr/0003-groups.md:

    open ──lease──► leased ──push──► storing ──on disk──► filled ──reward──► scored
     ▲                │                                     │
     └────────────────┴── expired, released, rejected, unscorable; after `max_attempts` tries: void ◄──┘

A group is settled when no slot is open, leased or being stored and all filled ones are scored, or as soon as too many
slots are void. Nothing here does IO; whoever changes a group marks it in `GroupTable.dirty`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from echo_coordinator.state.work_settings import WorkSettings

Kind = Literal["train", "eval"]

FIRST_EVAL_GROUP_ID = 1 << 62
"""Evaluation groups count from here, so that the ids (hence seeds) of training groups do not depend on them."""


class SlotState(StrEnum):
    """See the drawing above."""

    OPEN = "open"
    LEASED = "leased"
    STORING = "storing"
    FILLED = "filled"
    SCORED = "scored"
    VOID = "void"


MAX_SPARED = 1000
"""Of a slot. Beyond, whatever comes of it counts as a try, so that nothing goes on for ever."""


class GroupState(StrEnum):
    """`active` until settled; then `ready`, `training`, `consumed`; or `dropped`."""

    ACTIVE = "active"
    READY = "ready"
    TRAINING = "training"
    CONSUMED = "consumed"
    DROPPED = "dropped"


class DropCause(StrEnum):
    """Why a whole group was dropped."""

    INCOMPLETE = "incomplete_group"
    NO_SIGNAL = "no_signal"
    STALE = "stale"
    ROLLED_BACK = "rolled_back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is remembered of an accepted completion; its tokens are in the database."""

    peer: str
    digest: bytes
    """16 bytes naming the whole trajectory; an identical push is recognised by it."""
    tokens_digest: bytes
    """16 bytes naming its token ids."""
    oldest_version: int
    tokens: int
    size_bytes: int


@dataclass(slots=True, kw_only=True)
class Slot:
    """One member of a group."""

    state: SlotState = SlotState.OPEN
    attempt: int = 0
    """Tries that failed so far."""
    spared: int = 0
    """Those of them that do not count: handed back unfinished, or a peer's second failure (`tries`)."""
    redrawn: int = 0
    """Those of them whose completion had been accepted before it was taken back."""
    losers: tuple[str, ...] = ()
    """Whose failures were counted. Not kept over a restart."""
    lost_since: float | None = None
    """When the first of them came, monotonic seconds."""
    lease_id: bytes | None = None
    """The lease that holds or filled it."""
    work: Work | None = None
    reward: float | None = None

    @property
    def draw(self) -> int:
        """Number of its seed: what one peer does not deliver is drawn again by another (docs/adr/0018-seeds.md).

        A new seed comes once two tries are used up, since it may be the seed at which backends fail, or when nobody
        can gain by it.
        """
        return self.redrawn + (self.attempt - self.spared) // 2


@dataclass(slots=True, kw_only=True)
class Group:
    """One prompt and its members."""

    group_id: int
    kind: Kind
    prompt_index: int
    """Position in the environment's training or evaluation set."""
    prompt_ids: bytes
    """`codec.pack_u32`."""
    prompt_digest: bytes
    pinned_version: int | None
    """Evaluation: the only version to sample with."""
    slots: list[Slot]
    state: GroupState = GroupState.ACTIVE
    cause: DropCause | None = None
    no_signal: bool = False
    revision: int = 0
    """Rises with each change that the database must learn of."""

    def members(self, state: SlotState) -> list[int]:
        """Return the members in that state, ascending."""
        return [member for member, slot in enumerate(self.slots) if slot.state is state]

    def drop(self, member: int, max_attempts: int, *, spared: bool = False, accepted: bool = False) -> None:
        """Take back a slot: open again, or void when it was tried often enough.

        Args:
            member: whose slot.
            max_attempts: tries after which it is void.
            spared: this was no try. Who hands work back, or fails again and again, could void whatever it leases.
            accepted: its completion had been; the next one has another seed.

        """
        slot = self.slots[member]
        slot.attempt += 1
        slot.redrawn += accepted
        slot.spared += spared and slot.spared < MAX_SPARED
        slot.state = SlotState.VOID if slot.attempt - slot.spared >= max_attempts else SlotState.OPEN
        slot.lease_id, slot.work, slot.reward = None, None, None

    def reopen(self, member: int, max_attempts: int, *, spared: bool = False) -> None:
        """Take back a scored slot; a group that was ready is under way again."""
        self.drop(member, max_attempts, spared=spared, accepted=True)
        if self.state is GroupState.READY:
            self.state, self.no_signal = GroupState.ACTIVE, False

    def rewards(self) -> list[float]:
        """Return the rewards of all scored members."""
        return [slot.reward for slot in self.slots if slot.state is SlotState.SCORED and slot.reward is not None]

    def is_aged(self, member: int, current: int, max_staleness: int) -> bool:
        """Whether a member is too old to be trained on at version `current`."""
        work = self.slots[member].work
        return work is not None and current - work.oldest_version > max_staleness

    def copies(self) -> int:
        """Return how many members have the token ids of a member that another peer sampled."""
        first: dict[bytes, str] = {}
        count = 0
        for slot in self.slots:
            if slot.work and first.setdefault(slot.work.tokens_digest, slot.work.peer) != slot.work.peer:
                count += 1
        return count

    def settle(self, settings: WorkSettings) -> bool:
        """Move on from `active` if nothing more can come. Returns whether it did."""
        if self.state is not GroupState.ACTIVE:
            return False
        counts = {state: 0 for state in SlotState}
        for slot in self.slots:
            counts[slot.state] += 1
        needed = settings.members_needed if self.kind == "train" else 1
        if len(self.slots) - counts[SlotState.VOID] < needed:
            self.state, self.cause = GroupState.DROPPED, DropCause.INCOMPLETE
        elif counts[SlotState.SCORED] + counts[SlotState.VOID] == len(self.slots):
            self.state = GroupState.READY
            rewards = self.rewards()
            self.no_signal = max(rewards) == min(rewards)
        else:
            return False
        return True


@dataclass(slots=True)
class GroupTable:
    """All groups that are under way, oldest first, and which of them the database has not seen yet."""

    by_id: dict[int, Group] = field(default_factory=dict[int, Group])
    dirty: dict[int, Group] = field(default_factory=dict[int, Group])
    _maybe_open: dict[int, Group] = field(default_factory=dict[int, Group])
    """Groups that changed since they were last seen without an open slot."""

    def add(self, group: Group) -> None:
        """Add a group; ids ascend within each kind."""
        self.by_id[group.group_id] = group
        self._maybe_open[group.group_id] = group

    def mark(self, group: Group) -> None:
        """Note that the database must learn of a change."""
        self.dirty[group.group_id] = group
        group.revision += 1
        if group.group_id in self.by_id:
            self._maybe_open[group.group_id] = group

    def forget(self, group_id: int) -> None:
        """Let go of a group that is consumed or dropped."""
        self.by_id.pop(group_id, None)
        self._maybe_open.pop(group_id, None)

    def with_open_slots(self) -> list[Group]:
        """Return the groups with something to lease: evaluation first, then the oldest.

        One change wakes hundreds of nodes that wait for work, so only what changed is looked at again.
        """
        self._maybe_open = {
            group_id: group
            for group_id, group in self._maybe_open.items()
            if group.state is GroupState.ACTIVE and any(slot.state is SlotState.OPEN for slot in group.slots)
        }
        return sorted(self._maybe_open.values(), key=lambda group: (group.kind != "eval", group.group_id))

    def of_kind(self, kind: Kind) -> Iterator[Group]:
        """Iterate over the groups of a kind, oldest first."""
        return (group for group in self.by_id.values() if group.kind == kind)

    def count(self, kind: Kind, *states: GroupState) -> int:
        """Return how many groups of a kind are in one of `states`."""
        return sum(group.state in states and group.kind == kind for group in self.by_id.values())

    def updates_before(self, groups_per_update: int) -> dict[int, int]:
        """Return for each training group how many updates come before the one that consumes it, oldest first."""
        before, in_training = 0, False
        waits: dict[int, int] = {}
        for group in self.of_kind("train"):
            if group.state == "training":
                in_training = True
            else:
                waits[group.group_id] = before // groups_per_update
                before += 1
        return {group_id: updates + in_training for group_id, updates in waits.items()}

    def slot_counts(self, kind: Kind) -> dict[SlotState, int]:
        """Return how many slots of active groups of a kind are in each state."""
        counts = {state: 0 for state in SlotState}
        for group in self.of_kind(kind):
            if group.state is GroupState.ACTIVE:
                for slot in group.slots:
                    counts[slot.state] += 1
        return counts

    def size_bytes(self) -> int:
        """Return the bytes of all stored completions that are not yet trained."""
        return sum(slot.work.size_bytes for group in self.by_id.values() for slot in group.slots if slot.work)
