"""Leases: which peer works on which slots until when. Pure: time (monotonic seconds) and random ids are passed in.

A lease covers members of one group. It is renewed by its peer's beats up to a hard limit. When it runs out, the slots
it still holds return to the pool; a push that comes later is still taken as long as nobody else was given the slot,
since finished work is worth more than punctuality (`late` otherwise). Ended leases are kept as long as their group is
under way, so that their pushes can be told from made-up ones. How much a peer may hold is in `pace`.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from echo_coordinator.state.groups import Group, GroupTable, SlotState
from echo_coordinator.state.pace import Pace
from echo_coordinator.state.staleness import VersionWindow
from echo_coordinator.state.tries import Tries
from echo_coordinator.state.work_settings import WorkSettings
from echo_swarm.identity import PeerId
from echo_swarm.trajectory import MAX_TRAJECTORIES, Reason
from echo_swarm.work import MAX_LEASES

Offer = Callable[[Group, list[int], float], list[int]]
"""Which of a group's open members a peer may have at a time (monotonic seconds)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredVerdict:
    """The answer given for one member of a lease; an identical push gets it again."""

    digest: bytes
    reason: Reason
    detail: str


@dataclass(slots=True, kw_only=True)
class LiveLease:
    """A share of a group in the hands of one peer."""

    lease_id: bytes
    peer: PeerId
    group_id: int
    draws: dict[int, int]
    """Number of the seed of each member it covers."""
    outstanding: set[int]
    """Members it still holds."""
    deadline: float
    hard_deadline: float
    min_version: int
    max_version: int | None
    verdicts: dict[int, StoredVerdict] = field(default_factory=dict[int, StoredVerdict])
    granted_at: float = 0.0
    """Or restored, whichever was later."""
    orphaned: bool = False
    """Its process was replaced by another with the same key: no quota, no renewal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """A slot that was taken back."""

    peer: PeerId
    group: Group
    member: int
    cause: str
    """`expired`, `unnamed`, `released`, `failed`, `rejected`, `unscorable`, `failed audit`."""


class LeaseBook:
    """Grants, renews and ends leases over the groups of a table."""

    def __init__(self, groups: GroupTable, settings: WorkSettings) -> None:
        self._groups = groups
        self._settings = settings
        self._leases: dict[bytes, LiveLease] = {}
        self._of_peer: dict[PeerId, dict[bytes, None]] = {}
        """Oldest first: which leases are taken back first must not depend on how bytes hash."""
        self._of_group: dict[int, list[bytes]] = {}
        self._barred: dict[int, dict[PeerId, float]] = {}
        """Group → peers that failed at it, and until when others are asked first."""
        self._mean_tokens = settings.max_tokens / 2
        self.pace = Pace(settings)
        self.tries = Tries(settings.lease_s)
        self.dirty: dict[bytes, LiveLease] = {}
        """Leases that the database has not seen in this form."""

    def get(self, lease_id: bytes) -> LiveLease | None:
        """Return a lease of a group under way, ended or not."""
        return self._leases.get(lease_id)

    def all(self) -> Iterable[LiveLease]:
        """Return all leases of groups under way, ended or not."""
        return self._leases.values()

    def in_flight(self, peer: PeerId) -> int:
        """Return how many completions a peer's present process has been given and not delivered."""
        return sum(len(lease.outstanding) for lease in self._held(peer) if not lease.orphaned)

    def total_in_flight(self) -> int:
        """Return the same for all peers together."""
        return sum(len(lease.outstanding) for lease in self._leases.values())

    def restore(self, lease: LiveLease) -> None:
        """Take a lease back in after a restart."""
        self._leases[lease.lease_id] = lease
        self._of_peer.setdefault(lease.peer, {})[lease.lease_id] = None
        self._of_group.setdefault(lease.group_id, []).append(lease.lease_id)

    def learn_length(self, tokens: int) -> None:
        """Follow the mean length of completions, from which shares are sized."""
        self._mean_tokens += 0.02 * (tokens - self._mean_tokens)

    def grant(
        self,
        peer: PeerId,
        *,
        capacity: int,
        tokens_per_s: float,
        alone: bool,
        window: VersionWindow,
        now: float,
        new_id: Callable[[], bytes],
        offer: Offer | None = None,
    ) -> list[LiveLease]:
        """Hand out open slots: evaluation first, then the oldest group, until the peer's share is full.

        Args:
            peer: who asks.
            capacity: completions it can take now.
            tokens_per_s: its own measurement, 0 when unknown.
            alone: no other node could do the work; it gets all it can take, also what it failed at.
            window: versions that training leases ask for.
            now: monotonic seconds.
            new_id: makes 16 random bytes.
            offer: which of a group's open members it may have; None: all.

        """
        granted: list[LiveLease] = []
        left = self.share(peer, capacity=capacity, tokens_per_s=tokens_per_s, alone=alone, now=now)
        if left <= 0:
            return granted
        pieces = list(self._pieces(peer, left, alone, now, offer))
        waits = self._groups.updates_before(self._settings.groups_per_update) if pieces else {}
        for group, chunk in pieces:
            oldest = window.oldest(waits.get(group.group_id, 0))
            granted.append(self._grant(peer, group, chunk, (oldest, window.newest), now, new_id()))
        if granted:
            self.pace.granted(peer, self.in_flight(peer))
        return granted

    def share(self, peer: PeerId, *, capacity: int, tokens_per_s: float, alone: bool, now: float) -> int:
        """Return how many completions a peer may be given now. 0: its quota is used up.

        What it holds is limited by what it has shown; what it gets at once, by the speed it claims.
        """
        settings, held = self._settings, self.in_flight(peer)
        limit = min(capacity, settings.max_in_flight_per_peer - held)
        if alone and peer not in self.pace.on_probation:
            return max(0, limit)
        limit = min(limit, self.pace.allowance(peer, now) - held)
        if tokens_per_s <= 0:
            return max(0, min(limit, settings.probe_members))
        by_speed = max(1, int(settings.lease_target_s * tokens_per_s / self._mean_tokens))
        return max(0, min(limit, by_speed))

    def renew(self, peer: PeerId, lease_ids: Iterable[bytes], now: float) -> list[bytes]:
        """Extend leases that a beat names. Returns those that no longer hold, in the beat's order."""
        gone: list[bytes] = []
        for lease_id in lease_ids:
            lease = self._leases.get(lease_id)
            if lease is None or lease.peer != peer or not lease.outstanding:
                gone.append(lease_id)
            elif not lease.orphaned:
                lease.deadline = min(now + self._settings.lease_s, lease.hard_deadline)
        return gone

    def drop_unnamed(self, peer: PeerId, named: Iterable[bytes], now: float) -> list[Dropped]:
        """Take back what a beat does not name although its peer has had two beats' time to hear of it.

        Its reply was lost (we were killed, or the stream was): nobody works on it, and it would hold its slots, and at
        the staleness limit the whole run, until it runs out.
        """
        known, heard_by = set(named), now - 2 * self._settings.beat_s
        lost = [
            lease
            for lease in self._held(peer)
            if lease.outstanding and not lease.orphaned and lease.lease_id not in known and lease.granted_at <= heard_by
        ]
        if lost:
            self.pace.failed(peer, now)
        return [dropped for lease in lost for dropped in self._end(lease, "unnamed", now)]

    def expire(self, now: float, *, alone: bool = True) -> list[Dropped]:
        """Take back the slots of leases whose deadline has passed, and earlier what keeps others waiting.

        That is, while a peer is not `alone`: old leases beyond its allowance (it was alone, took all there was and
        showed too little since); and while no slot is open, leases twice as old if nothing came from their peer
        since, and four times as old whatever came.
        """
        overdue = [lease for lease in self._leases.values() if lease.outstanding and now >= lease.deadline]
        if not alone:
            starving = not self._groups.with_open_slots()
            stuck = [lease for peer in self._of_peer for lease in self._stuck(peer, now, starving)]
            overdue += [lease for lease in stuck if now < lease.deadline]
        for peer in {lease.peer: None for lease in overdue}:
            self.pace.expired(peer, now)
        return [dropped for lease in overdue for dropped in self._end(lease, "expired", now)]

    def next_deadline(self) -> float | None:
        """Return when the next lease runs out."""
        return min((lease.deadline for lease in self._leases.values() if lease.outstanding), default=None)

    def release(
        self, peer: PeerId, lease_ids: Iterable[bytes], cause: str, now: float, *, failed: bool = False
    ) -> list[Dropped]:
        """Take back leases that their peer hands over unfinished. Others' are left alone.

        A peer that comes back with them soon may have as much as before, unless it `failed`.
        """
        named = [self._leases.get(lease_id) for lease_id in dict.fromkeys(lease_ids)]
        leases = [lease for lease in named if lease and lease.peer == peer and lease.outstanding]
        if leases and (failed or min(lease.granted_at for lease in leases) < now - self.pace.patience_s):
            self.pace.failed(peer, now)
        return [dropped for lease in leases for dropped in self._end(lease, cause, now, given_back=not failed)]

    def release_all(self, peer: PeerId, cause: str, now: float, *, failed: bool = False) -> list[Dropped]:
        """Take back everything a peer holds, as `release` does."""
        return self.release(peer, [lease.lease_id for lease in self._held(peer)], cause, now, failed=failed)

    def lose(self, peer: PeerId, now: float) -> list[Dropped]:
        """Take back everything that a vanished peer held, as if it had run out."""
        held = [lease for lease in self._held(peer) if lease.outstanding]
        if held:
            self.pace.expired(peer, now)
        return [dropped for lease in held for dropped in self._end(lease, "expired", now)]

    def delivered(self, lease: LiveLease, member: int, now: float) -> None:
        """Note that an accepted completion of a lease is on disk."""
        lease.outstanding.discard(member)
        self.pace.accepted(lease.peer, lease.granted_at, now)

    def orphan(self, peer: PeerId, deadline: float) -> None:
        """Let a replaced process's leases run out by `deadline`, unless its successor still pushes their results."""
        for lease in self._held(peer):
            lease.orphaned = True
            lease.deadline = min(lease.deadline, deadline)

    def take_back(
        self, lease: LiveLease, member: int, cause: str, now: float, *, given_back: bool = False
    ) -> Dropped | None:
        """Take back one slot that a lease holds; None if it does not. `given_back`: it uses up no try (see `tries`).

        For `lease_s`, its peer is offered nothing of this group unless it is alone: others come first.
        """
        group = self._groups.by_id.get(lease.group_id)
        lease.outstanding.discard(member)
        if group is None or group.slots[member].lease_id != lease.lease_id:
            return None
        self._barred.setdefault(lease.group_id, {})[lease.peer] = now + self._settings.lease_s
        spared = given_back or not self.tries.uses_up(group.slots[member], lease.peer, now)
        group.drop(member, self._settings.max_attempts, spared=spared)
        self._groups.mark(group)
        return Dropped(peer=lease.peer, group=group, member=member, cause=cause)

    def forget_group(self, group_id: int) -> None:
        """Let go of the leases of a group that is no longer under way."""
        self._barred.pop(group_id, None)
        for lease_id in self._of_group.pop(group_id, ()):
            lease = self._leases.pop(lease_id)
            self._of_peer[lease.peer].pop(lease_id, None)
            if not self._of_peer[lease.peer]:
                del self._of_peer[lease.peer]

    def _held(self, peer: PeerId) -> Iterator[LiveLease]:
        return (self._leases[lease_id] for lease_id in self._of_peer.get(peer, ()))

    def _stuck(self, peer: PeerId, now: float, starving: bool) -> Iterator[LiveLease]:
        patience_s = self.pace.patience_s
        excess = self.in_flight(peer) - max(self.pace.allowance(peer, now), self._settings.probe_members)
        for lease in self._held(peer):
            age_s = now - lease.granted_at
            if not lease.outstanding or lease.orphaned or age_s <= patience_s:
                continue
            silent = not self.pace.has_delivered_since(peer, lease.granted_at)
            if excess > 0 or (starving and age_s > patience_s * (2 if silent else 4)):
                excess -= len(lease.outstanding)
                yield lease

    def _pieces(
        self, peer: PeerId, left: int, alone: bool, now: float, offer: Offer | None
    ) -> Iterator[tuple[Group, list[int]]]:
        """Cut up to `left` open slots into the parts of a group that a lease can cover."""
        pieces = 0
        for group in self._groups.with_open_slots():
            if not alone and self._barred.get(group.group_id, {}).get(peer, now) > now:
                continue
            found = group.members(SlotState.OPEN)
            members = (found if offer is None else offer(group, found, now))[:left]
            for start in range(0, len(members), MAX_TRAJECTORIES):
                if pieces == MAX_LEASES:
                    return
                pieces += 1
                yield group, members[start : start + MAX_TRAJECTORIES]
            left -= len(members)
            if left <= 0:
                return

    def _grant(
        self,
        peer: PeerId,
        group: Group,
        members: list[int],
        versions: tuple[int, int | None],
        now: float,
        lease_id: bytes,
    ) -> LiveLease:
        pinned = group.pinned_version
        lease = LiveLease(
            lease_id=lease_id,
            peer=peer,
            group_id=group.group_id,
            draws={member: group.slots[member].draw for member in members},
            outstanding=set(members),
            deadline=now + self._settings.lease_s,
            hard_deadline=now + self.pace.longest_s(peer),
            granted_at=now,
            min_version=versions[0] if pinned is None else pinned,
            max_version=versions[1] if pinned is None else pinned,
        )
        for member in members:
            slot = group.slots[member]
            slot.state, slot.lease_id = SlotState.LEASED, lease_id
        self.restore(lease)
        self.dirty[lease_id] = lease
        self._groups.mark(group)
        return lease

    def _end(self, lease: LiveLease, cause: str, now: float, *, given_back: bool = False) -> list[Dropped]:
        group = self._groups.by_id.get(lease.group_id)
        held = [m for m in sorted(lease.outstanding) if group and group.slots[m].state is SlotState.LEASED]
        # A slot that is being stored stays with its lease until the disk has answered.
        storing = {m for m in lease.outstanding if group and group.slots[m].state is SlotState.STORING}
        dropped = [self.take_back(lease, member, cause, now, given_back=given_back) for member in held]
        lease.outstanding = storing
        return [d for d in dropped if d is not None]
