"""What must hold at every step, whatever nodes, network and disk do. Stands outside and only looks.

Told by `site` and `trainer` what was answered, taken, trained and published, it keeps its own account:

- `conserved`       accepted = trained + dropped (with their groups, or taken back) + buffered
- `kept`            what was acknowledged is there after a crash
- `trained_once`    no completion is in two updates
- `fresh`           nothing trained is older than max_staleness; in the sequential mode nothing is older at all
- `no_lies`         no lie that the rules can see is accepted; no completion is counted twice
- `told`            what honest nodes were told is what is counted for them, but for what they still have to hear
- `leases`          each leased slot has one lease that holds it, and the other way round
- `deadlines`       no lease outlives its deadline, nor its dead peer
- `in_flight`       a grant stays within the peer's allowance and the run's limits
- `bounded`         groups, leases and queues stay below what settings allow
- `monotonic`       versions only rise, also over a crash
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, cast

from echo_coordinator.simulate.journal import Journal
from echo_coordinator.simulate.scenario import Scenario
from echo_coordinator.simulate.truth import Truth
from echo_coordinator.state.batch import Batch
from echo_coordinator.state.core import RunCore
from echo_coordinator.state.groups import Group, Slot, SlotState
from echo_coordinator.state.leases import Dropped, LiveLease
from echo_coordinator.state.roster import BEATS_TO_LIVE
from echo_coordinator.state.run_state import RunState
from echo_coordinator.state.service import MAX_REQUEST_BYTES, TRIAL_BEATS
from echo_coordinator.state.staleness import is_fresh
from echo_swarm.identity import PeerId
from echo_swarm.trajectory import Reason
from echo_swarm.wire import Message
from echo_swarm.work import LeaseReply, Push, PushReply

SLACK_S = 5.0
"""Expiry is looked at once a second and waits for the disk; messages of the dead are under way for a while."""
SELDOM = 5
"""Seconds between two looks at everything, when not every step is looked at: it takes as long as ten answers."""
_TAKEN_BACK = ("unscorable", "failed audit")


class Broken(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, detail: str) -> None:
        self.invariant, self.detail = invariant, detail
        super().__init__(f"{invariant}: {detail}")


@dataclass(slots=True)
class _Account:
    """Of one life of the coordinator."""

    begun_at: float
    before: int
    """Accepted before, and not buffered at its beginning."""
    gone: int = 0
    """Accepted and let go of with their groups."""
    taken_back: int = 0
    limbo: list[Slot] = field(default_factory=list[Slot])
    """Of groups that were let go of while these were being written; a write that fails takes its work away."""


@dataclass(slots=True)
class Watch:
    """The account of one simulation."""

    scenario: Scenario
    journal: Journal
    truth: Truth
    dead_since: Callable[[PeerId], float | None]
    name_of: Callable[[PeerId], str]
    told: Callable[[], Iterator[tuple[PeerId, int, int]]]
    """Honest peers: acceptances that they were told of, and completions that they sent and know nothing of."""
    every_step: bool
    """Whether all is looked at after each answer; else every few seconds and with each update."""
    account: _Account | None = None
    acknowledged: dict[tuple[int, int], bytes] = field(default_factory=dict[tuple[int, int], bytes])
    """(group, member) → lease; what the coordinator owes us."""
    counted: set[tuple[bytes, int]] = field(default_factory=set[tuple[bytes, int]])
    """(lease, member) that were accepted."""
    used: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """(group, member) → version of the batch that consumed it."""
    highest: tuple[int, int] = (0, -1)
    """Trained and published version."""
    updated_at: list[float] = field(default_factory=list[float])
    """When updates were entered into the ledger."""
    steps: int = 0
    ticks: int = 0
    on_progress: Callable[[], None] = lambda: None

    # Lives of the coordinator.

    def begun(self, state: RunState) -> None:
        """A process has read its database."""
        core, now = state.core, _now()
        self.account = _Account(begun_at=now, before=state.accepted() - _buffered(core))
        self._look_into(core)
        for (group_id, member), _ in self.acknowledged.items():
            group = core.groups.by_id.get(group_id)
            if group is None or group.slots[member].work is None:
                _broken("kept", f"member {member} of group {group_id} was acknowledged and is gone after a crash")
        self.journal.note(now, f"coordinator begins with {_buffered(core)} buffered")
        self.step(state)

    def killed(self, state: RunState) -> None:
        """A process is about to be killed: what follows from its end is not of this run."""
        core = state.core
        for name in ("let_go", "on_dropped"):
            core.__dict__.pop(name, None)
        core.leases.__dict__.pop("grant", None)
        self.account = None
        self.journal.note(_now(), "coordinator killed")

    def _look_into(self, core: RunCore) -> None:
        """Have drops and grants told to us as well. Only this instance is changed, and only in that it tells."""
        let_go, on_dropped, grant = core.let_go, core.on_dropped, core.leases.grant
        core.let_go = partial(self._let_go, core, let_go)
        core.on_dropped = partial(self._dropped, on_dropped)
        core.leases.grant = partial(self._granted, core, grant)

    def _let_go(self, core: RunCore, let_go: Callable[[int], None], group_id: int) -> None:
        group = core.groups.by_id.get(group_id)
        if group is not None and self.account is not None:
            storing = [slot for slot in group.slots if slot.state is SlotState.STORING]
            self.account.gone += _works(group) - len(storing)
            self.account.limbo.extend(storing)
            for member in range(len(group.slots)):
                self.acknowledged.pop((group_id, member), None)
        let_go(group_id)

    def _dropped(self, on_dropped: Callable[[list[Dropped]], None], dropped: list[Dropped]) -> None:
        for drop in dropped:
            if drop.cause in _TAKEN_BACK and self.account is not None:
                self.account.taken_back += 1
                self.acknowledged.pop((drop.group.group_id, drop.member), None)
        on_dropped(dropped)

    def _granted(
        self, core: RunCore, grant: Callable[..., list[LiveLease]], peer: PeerId, **asked: Any
    ) -> list[LiveLease]:
        book, granted = core.leases, grant(peer, **asked)
        if not granted:
            return granted
        held, most = book.in_flight(peer), core.settings.max_in_flight_per_peer
        if not asked["alone"] or peer in book.pace.on_probation:
            most = min(most, book.pace.allowance(peer, asked["now"]))
        if held > most:
            _broken("in_flight", f"{self.name_of(peer)} holds {held} after a grant of {len(granted)}, allowed {most}")
        return granted

    # What is told.

    def answered(self, state: RunState, peer: PeerId, method: str, request: Message, reply: Message) -> None:
        """A request was answered."""
        if isinstance(reply, PushReply):
            self._judged(state, peer, cast(Push, request), reply)
        elif isinstance(reply, LeaseReply):
            count = sum(len(lease.members) for lease in reply.leases)
            self.journal.note(_now(), f"{self.name_of(peer)} granted {count} {reply.wait_reason}")
        elif method != "beat":
            self.journal.note(_now(), f"{self.name_of(peer)} {method}")
        if self.every_step:
            self.step(state)

    def _judged(self, state: RunState, peer: PeerId, push: Push, reply: PushReply) -> None:
        lies = self.truth.lies_in(push.envelope)
        accepted = 0
        for place, verdict in enumerate(reply.verdicts):
            if verdict.reason is not Reason.ACCEPTED:
                continue
            if place in lies:
                _broken("no_lies", f"a lie of {self.name_of(peer)} was accepted for group {verdict.group_id}")
            accepted += 1
            key = (verdict.lease_id, verdict.member)
            if key in self.counted:
                continue
            self.counted.add(key)
            group = state.core.groups.by_id.get(verdict.group_id)
            if group is not None and group.slots[verdict.member].lease_id == verdict.lease_id:
                self.acknowledged[verdict.group_id, verdict.member] = verdict.lease_id
        reasons = ",".join(verdict.reason.value for verdict in reply.verdicts if verdict.reason is not Reason.ACCEPTED)
        self.journal.note(_now(), f"{self.name_of(peer)} pushed {len(reply.verdicts)} accepted {accepted} {reasons}")

    def took(self, state: RunState, batch: Batch) -> None:
        """The trainer has a batch."""
        most, settings = self.scenario.work.max_staleness, self.scenario.work
        if len(batch.groups) > settings.groups_per_update:
            _broken("bounded", f"a batch of {len(batch.groups)} groups")
        for group in batch.groups:
            for member in group.members:
                where = f"member {member.member} of group {group.group_id}"
                if not member.aged and not is_fresh(batch.version, member.oldest_version, most):
                    _broken("fresh", f"{where} is of version {member.oldest_version}, trained at {batch.version}")
                if not most and not member.aged and member.newest_version != batch.version:
                    _broken("fresh", f"{where} is of version {member.newest_version}, not of {batch.version}")
        self.journal.note(_now(), f"batch of {len(batch.groups)} at version {batch.version}")
        self.step(state)

    def trained(self, state: RunState, batch: Batch) -> None:
        """An update is in the ledger."""
        for group in batch.groups:
            for member in group.members:
                key = (group.group_id, member.member)
                if key in self.used:
                    _broken("trained_once", f"{key} was in the batch of version {self.used[key]} and {batch.version}")
                self.used[key] = batch.version
        self.updated_at.append(_now())
        self.journal.note(_now(), f"trained version {batch.version + 1}")
        self.on_progress()
        self.step(state)

    def requeued(self, state: RunState, batch: Batch) -> None:
        """An update failed."""
        self.journal.note(_now(), f"update of version {batch.version} failed")
        self.step(state)

    def published(self, state: RunState, version: int) -> None:
        """A version can be fetched."""
        self.journal.note(_now(), f"published version {version}")
        self.step(state)

    def ticked(self, state: RunState) -> None:
        """Leases and peers have expired."""
        self.ticks += 1
        if not self.every_step and self.ticks % SELDOM:
            return
        for peer, told, unsettled in self.told():
            counted = state.accepted(peer)
            if not told <= counted <= told + unsettled:
                _broken("told", f"{counted} counted for {self.name_of(peer)}, told of {told}, {unsettled} open")
        self.step(state)

    # What is looked at.

    def step(self, state: RunState) -> None:
        """Look at everything. Raises Broken."""
        if self.account is None:
            return
        self.steps += 1
        core = state.core
        self._conserved(state, self.account)
        self._monotonic(core)
        self._leases(core, self.account)
        self._bounded(state)

    def _conserved(self, state: RunState, account: _Account) -> None:
        accepted, buffered = state.accepted(), _buffered(state.core)
        limbo = sum(slot.work is not None for slot in account.limbo)
        known = account.before + account.gone + account.taken_back + buffered + limbo
        if accepted != known:
            _broken(
                "conserved",
                f"{accepted} accepted, but {account.before} before + {account.gone} let go + {account.taken_back} "
                f"taken back + {buffered} buffered + {limbo} in limbo = {known}",
            )

    def _monotonic(self, core: RunCore) -> None:
        versions = core.versions
        now = (versions.trained, -1 if versions.published is None else versions.published)
        if now[0] < self.highest[0] or now[1] < self.highest[1] or now[1] > now[0]:
            _broken("monotonic", f"trained and published are {now} after {self.highest}")
        self.highest = now

    def _leases(self, core: RunCore, account: _Account) -> None:
        now, settings = _now(), core.settings
        holders: dict[tuple[int, int], bytes] = {}
        for lease in core.leases.all():
            if not lease.outstanding:
                continue
            group = core.groups.by_id.get(lease.group_id)
            for member in lease.outstanding:
                slot = None if group is None else group.slots[member]
                if slot is None or slot.lease_id != lease.lease_id or (lease.group_id, member) in holders:
                    _broken("leases", f"a lease holds member {member} of group {lease.group_id}, which has another")
                holders[lease.group_id, member] = lease.lease_id
            if group is not None and any(group.slots[m].state is SlotState.LEASED for m in lease.outstanding):
                self._in_time(lease, now, account, settings.lease_s, settings.beat_s)
        for group in core.groups.by_id.values():
            for member, slot in enumerate(group.slots):
                if slot.state is SlotState.LEASED and holders.get((group.group_id, member)) != slot.lease_id:
                    _broken("leases", f"member {member} of group {group.group_id} is leased, and no lease holds it")

    def _in_time(self, lease: LiveLease, now: float, account: _Account, lease_s: float, beat_s: float) -> None:
        if now > lease.deadline + SLACK_S or lease.deadline > lease.hard_deadline:
            _broken("deadlines", f"a lease of {self.name_of(lease.peer)} ended at {lease.deadline:.1f}, now {now:.1f}")
        died_at = self.dead_since(lease.peer)
        if died_at is None:
            return
        limit = max(died_at + (BEATS_TO_LIVE + TRIAL_BEATS) * beat_s, account.begun_at + lease_s) + SLACK_S
        if now > limit:
            _broken("deadlines", f"{self.name_of(lease.peer)} died at {died_at:.1f} and holds a lease at {now:.1f}")

    def _bounded(self, state: RunState) -> None:
        core, settings = state.core, state.core.settings
        groups = state.admission.in_flight
        if groups > (settings.max_staleness + 1) * settings.groups_per_update:
            _broken("bounded", f"{groups} groups under way")
        slots = sum(len(group.slots) for group in core.groups.by_id.values())
        spared = sum(slot.spared for group in core.groups.by_id.values() for slot in group.slots)
        if len(list(core.leases.all())) > slots * settings.max_attempts + spared:
            _broken("bounded", f"more leases than {slots} slots can have had")
        if len(core.scoring) > slots + settings.group_size:
            _broken("bounded", f"{len(core.scoring)} completions wait for their reward, of {slots} slots")
        if core.committer.pending_bytes > settings.pending_bytes + MAX_REQUEST_BYTES:
            _broken("bounded", f"{core.committer.pending_bytes} bytes wait for the disk")


def _works(group: Group) -> int:
    return sum(slot.work is not None for slot in group.slots)


def _buffered(core: RunCore) -> int:
    return sum(map(_works, core.groups.by_id.values()))


def _broken(invariant: str, detail: str) -> NoReturn:
    raise Broken(invariant, detail)


def _now() -> float:
    return asyncio.get_running_loop().time()
