"""Which leases the node holds, what of them waits, runs or is done, and which comes next. No IO; time is passed in.

A member of a lease goes waiting → running → done. A dropped lease (expired, revoked, released) is forgotten at once:
completions of it that still run keep their slot in the backend until they end, and are then thrown away.
"""

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from echo_swarm.work import Lease, LeaseMember

PATIENCE = 0.25
"""Share of its time after which a lease's turn comes even though another version must be loaded for it."""


@dataclass(slots=True, kw_only=True)
class _Open:
    lease: Lease
    since_s: float
    deadline_s: float
    waiting: deque[LeaseMember]
    running: set[int] = field(default_factory=set[int])


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The lease that comes next and the version to sample it with."""

    lease: Lease
    version: int


def version_for(lease: Lease, newest: int | None) -> int:
    """Return the version to sample a lease with: the newest one held, moved into the lease's range.

    With `newest` 12: an open lease from 10 on gets 12, one from 13 on gets 13, one pinned to 11 gets 11.
    """
    version = lease.min_version if newest is None else max(newest, lease.min_version)
    return version if lease.max_version is None else min(version, lease.max_version)


class LeaseBook:
    """The leases of one node."""

    def __init__(self) -> None:
        self._open: dict[bytes, _Open] = {}

    def add(self, leases: Iterable[Lease], now_s: float) -> None:
        """Take new leases; one that is already here is left as it is."""
        for lease in leases:
            if lease.lease_id not in self._open:
                self._open[lease.lease_id] = _Open(
                    lease=lease,
                    since_s=now_s,
                    deadline_s=now_s + lease.expires_in_s,
                    waiting=deque(lease.members),
                )

    @property
    def ids(self) -> tuple[bytes, ...]:
        """Of all leases held, oldest first."""
        return tuple(self._open)

    @property
    def waiting(self) -> int:
        """Completions not yet begun."""
        return sum(len(held.waiting) for held in self._open.values())

    @property
    def running(self) -> int:
        """Completions that a backend works on and that still count."""
        return sum(len(held.running) for held in self._open.values())

    def __contains__(self, lease_id: object) -> bool:
        return lease_id in self._open

    def turn(self, *, loaded: int | None, newest: int | None, held: Container[int], now_s: float) -> Turn | None:
        """Return the lease whose waiting members come next, or None when nothing can begin.

        A lease whose version is not held is passed over (see `missing`). Otherwise the oldest comes first, except
        that leases for the loaded version go ahead of it while it can afford to wait: each load drains the batch.
        """
        first: Turn | None = None
        for entry in self._open.values():
            if not entry.waiting:
                continue
            version = version_for(entry.lease, newest)
            if version not in held:
                continue
            turn = Turn(lease=entry.lease, version=version)
            patience_s = PATIENCE * entry.lease.expires_in_s
            if version == loaded or (first is None and now_s >= entry.since_s + patience_s):
                return turn
            first = first or turn
        return first

    def missing(self, newest: int | None, held: Container[int]) -> set[int]:
        """Return the versions that waiting leases need and that are not held."""
        wanted = {version_for(entry.lease, newest) for entry in self._open.values() if entry.waiting}
        return {version for version in wanted if version not in held}

    def in_vain(self, newest: int | None, refused: Container[int]) -> list[bytes]:
        """Return the leases of which nothing runs and that need a version which can never be used here."""
        return [
            lease_id
            for lease_id, entry in self._open.items()
            if entry.waiting and not entry.running and version_for(entry.lease, newest) in refused
        ]

    def begin(self, lease_id: bytes, count: int) -> list[LeaseMember]:
        """Move up to `count` members of a lease from waiting to running and return them."""
        entry = self._open[lease_id]
        begun = [entry.waiting.popleft() for _ in range(min(count, len(entry.waiting)))]
        entry.running.update(member.member for member in begun)
        return begun

    def finish(self, lease_id: bytes, member: int) -> bool:
        """Note that a completion is done. Returns False when its lease is gone: throw the completion away."""
        entry = self._open.get(lease_id)
        if entry is None or member not in entry.running:
            return False
        entry.running.discard(member)
        return True

    def is_complete(self, lease_id: bytes) -> bool:
        """Whether nothing of the lease is left to do."""
        entry = self._open.get(lease_id)
        return entry is None or not (entry.waiting or entry.running)

    def overdue(self, now_s: float) -> list[bytes]:
        """Return the leases whose deadline has passed."""
        return [lease_id for lease_id, entry in self._open.items() if now_s >= entry.deadline_s]

    def renew(self, lease_ids: Iterable[bytes], now_s: float) -> None:
        """Give leases their full time again, from `now_s` on: the coordinator answered a beat that named them."""
        for lease_id in lease_ids:
            entry = self._open.get(lease_id)
            if entry is not None:
                entry.deadline_s = max(entry.deadline_s, now_s + entry.lease.expires_in_s)

    def next_deadline_s(self) -> float | None:
        """Return when the next lease runs out, on the clock of `now_s`."""
        return min((entry.deadline_s for entry in self._open.values()), default=None)

    def drop(self, lease_ids: Iterable[bytes]) -> list[bytes]:
        """Forget leases, done or not. Returns those that were here."""
        return [lease_id for lease_id in lease_ids if self._open.pop(lease_id, None) is not None]

    def drop_waiting(self) -> list[bytes]:
        """Forget all members that have not begun, and the leases of which nothing runs.

        Returns the leases that lost members: they are to be handed back once the rest of them is done.
        """
        unfinished = [lease_id for lease_id, entry in self._open.items() if entry.waiting]
        for lease_id in unfinished:
            self._open[lease_id].waiting.clear()
            if not self._open[lease_id].running:
                del self._open[lease_id]
        return unfinished


def is_sound(lease: Lease) -> bool:
    """Whether a lease's prompt can be unpacked; everything else about it was checked when it was read."""
    return bool(lease.prompt_ids) and len(lease.prompt_ids) % 4 == 0
