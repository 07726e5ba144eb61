"""Intake: a signed submission in, one durable verdict a trajectory out. The order of checks is in `intake_rules`.

Memory is changed first (the slot is `storing`), then one job writes the rows; only when they are on disk is the slot
`filled` and the verdict sent. When they cannot be written, memory goes back and the node is told to come again.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from echo_coordinator.state import rows
from echo_coordinator.state.committer import Committer
from echo_coordinator.state.counters import STRANGERS, TOTAL, Counters
from echo_coordinator.state.fault_quota import FAULTS, FaultQuota
from echo_coordinator.state.groups import Group, GroupState, GroupTable, SlotState, Work
from echo_coordinator.state.intake_rules import Demand, Judgement, judge, work_digest
from echo_coordinator.state.leases import Dropped, LeaseBook, LiveLease, StoredVerdict
from echo_coordinator.state.work_settings import MEMBER_OVERHEAD_BYTES
from echo_swarm import envelope
from echo_swarm.clock import Clock
from echo_swarm.envelope import Signed
from echo_swarm.errors import BadSignature, LocalFault, MalformedMessage, RemoteError
from echo_swarm.identity import PeerId
from echo_swarm.trajectory import SUBMISSION_LIMITS, Reason, Submission, Trajectory, Verdict

REMEMBERED_REFUSALS = 1024
"""Submissions with refusals that no lease remembers (`no_lease`, `late`); a re-push is answered, not counted again."""
BUSY_RETRY_S = 1.0
FAULT_RETRY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Nothing was taken; push again later."""

    retry_after_s: float


@dataclass(slots=True)
class _Plan:
    """What one submission changes."""

    stored: list[tuple[LiveLease, Group, Trajectory]] = field(default_factory=list[tuple[LiveLease, Group, Trajectory]])
    rows: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    judged: list[tuple[LiveLease, int]] = field(default_factory=list[tuple[LiveLease, int]])
    """Verdicts that leases now remember."""
    repeats: list[tuple[LiveLease, int, StoredVerdict]] = field(
        default_factory=list[tuple[LiveLease, int, StoredVerdict]]
    )
    demands: dict[bytes, Demand] = field(default_factory=dict[bytes, Demand])
    """By lease."""
    counted: list[Reason] = field(default_factory=list[Reason])
    dropped: list[Dropped] = field(default_factory=list[Dropped])
    forgettable: bool = False
    """A verdict that no lease remembers was given."""


class Intake:
    """Judges, stores and answers. `on_filled` and `on_dropped` tell the run's state what happened to slots."""

    def __init__(
        self,
        *,
        run_id: str,
        clock: Clock,
        groups: GroupTable,
        leases: LeaseBook,
        counters: Counters,
        committer: Committer,
        is_known: Callable[[PeerId], bool],
        why_barred: Callable[[PeerId], str],
        look: Callable[[Trajectory], Judgement],
        demand: Callable[[Group, LiveLease], Demand],
        seed_of: Callable[[LiveLease, int], int],
        on_filled: Callable[[PeerId, list[tuple[Group, int]]], None],
        on_dropped: Callable[[list[Dropped]], None],
    ) -> None:
        self._run_id = run_id
        self._clock = clock
        self._groups = groups
        self._leases = leases
        self._counters = counters
        self._committer = committer
        self._is_known = is_known
        self._why_barred = why_barred
        self.look = look
        self._demand = demand
        self._seed_of = seed_of
        self._on_filled = on_filled
        self._on_dropped = on_dropped
        self._refused: OrderedDict[tuple[PeerId, bytes], tuple[Verdict, ...]] = OrderedDict()
        self._quota = FaultQuota()
        self.fault = ""
        """Why the last write failed; empty when it did not."""

    async def submit(self, peer: PeerId, raw: bytes) -> tuple[Verdict, ...] | Busy:
        """Return the verdicts on `raw`, a sealed Submission that `peer` sent, in its order.

        Raises:
            MalformedMessage, BadSignature, RemoteError: the submission as a whole was refused and counted once.

        """
        if self._quota.is_exhausted(peer, self._clock.monotonic_s()):
            self._count(peer, [Reason.OVER_QUOTA], 1)
            raise RemoteError(Reason.OVER_QUOTA.value, "too many refused completions lately; this push was not read")
        if not self._committer.has_room(len(raw)):
            return Busy(retry_after_s=BUSY_RETRY_S)
        signed = self.open(peer, raw)
        known = self._refused.get((peer, signed.digest))
        if known is not None:
            self._charge_replay(peer, len(known))
            return known
        trajectories = signed.message.trajectories
        past = await self._past_leases(trajectories)
        plan = _Plan()
        judgements = [self._decide(peer, trajectory, past, plan) for trajectory in trajectories]
        now = self._clock.wall_s()
        plan.rows = [rows.trajectory_row(trajectory, peer, now) for _, _, trajectory in plan.stored]
        self._count(peer, plan.counted, 1)
        self._charge_replay(peer, len(plan.repeats))
        self._on_dropped(plan.dropped)
        verdicts = _verdicts(trajectories, judgements)
        if not await self._store(peer, plan, len(raw)):
            return Busy(retry_after_s=FAULT_RETRY_S if self.fault else BUSY_RETRY_S)
        if plan.forgettable:
            self._remember(peer, signed.digest, verdicts)
        return verdicts

    def open(self, peer: PeerId, raw: bytes) -> Signed[Submission]:
        """Check size, form, signature, sender and run. A refusal is counted once and raised."""
        try:
            signed = envelope.unseal(raw, Submission, SUBMISSION_LIMITS)
            if signed.peer_id != peer:
                raise BadSignature(f"signed by {signed.peer_id}, sent by {peer}; push your own work only")
        except MalformedMessage:
            self._count(peer, [Reason.MALFORMED], 1)
            raise
        except BadSignature:
            self._count(peer, [Reason.BAD_SIGNATURE], 1)
            raise
        if signed.message.run_id != self._run_id:
            self._count(peer, [Reason.UNKNOWN_RUN], 1)
            raise RemoteError(Reason.UNKNOWN_RUN.value, f"this is run {self._run_id}, not {signed.message.run_id}")
        return signed

    async def _past_leases(self, trajectories: tuple[Trajectory, ...]) -> dict[bytes, LiveLease]:
        unknown = {t.lease_id for t in trajectories if self._leases.get(t.lease_id) is None}
        if not unknown:
            return {}
        return await self._committer.execute(lambda db: rows.load_leases(db, unknown))

    def _decide(self, peer: PeerId, trajectory: Trajectory, past: dict[bytes, LiveLease], plan: _Plan) -> Judgement:
        member = trajectory.member
        lease = self._leases.get(trajectory.lease_id) or past.get(trajectory.lease_id)
        if lease is None or lease.peer != peer or lease.group_id != trajectory.group_id:
            return _refuse(plan, Reason.NO_LEASE, "this peer has no such lease")
        if member not in lease.draws:
            return _refuse(plan, Reason.NO_LEASE, "the lease does not cover this member")
        digest = work_digest(trajectory)
        stored = lease.verdicts.get(member)
        if stored is not None and stored.digest == digest:
            plan.repeats.append((lease, member, stored))
            return Judgement(reason=stored.reason, detail=stored.detail)
        if stored is not None:
            return _refuse(plan, Reason.DUPLICATE, "this member of the lease has been answered before")
        group = self._groups.by_id.get(lease.group_id)
        if group is None or not _is_free(group, member, lease.lease_id):
            return _refuse(plan, Reason.LATE, "the lease ended and the work was given to somebody else or closed")
        if why := self._why_barred(peer):
            return _refuse(plan, Reason.LATE, why[:1024])
        demand = plan.demands.get(lease.lease_id)
        if demand is None:
            demand = plan.demands[lease.lease_id] = self._demand(group, lease)
        judgement = judge(trajectory, demand, self._seed_of(lease, member))
        if judgement.reason is Reason.ACCEPTED and demand.trains:
            judgement = self.look(trajectory)
        lease.verdicts[member] = StoredVerdict(digest=digest, reason=judgement.reason, detail=judgement.detail)
        self._leases.dirty[lease.lease_id] = lease
        plan.judged.append((lease, member))
        plan.counted.append(judgement.reason)
        if judgement.reason is Reason.ACCEPTED:
            self._reserve(group, lease, trajectory, digest, plan)
        else:
            if judgement.reason in FAULTS:
                self._leases.pace.refused(peer)
            cause, now = f"rejected: {judgement.reason.value}", self._clock.monotonic_s()
            dropped = self._leases.take_back(lease, member, cause, now)
            plan.dropped.extend([dropped] if dropped else [])
        return judgement

    def _reserve(self, group: Group, lease: LiveLease, trajectory: Trajectory, digest: bytes, plan: _Plan) -> None:
        slot = group.slots[trajectory.member]
        slot.state, slot.lease_id = SlotState.STORING, lease.lease_id
        slot.work = Work(
            peer=lease.peer,
            digest=digest,
            tokens_digest=hashlib.sha256(trajectory.token_ids).digest()[:16],
            oldest_version=trajectory.policy.oldest_version,
            tokens=len(trajectory.token_ids) // 4,
            size_bytes=2 * len(trajectory.token_ids) + MEMBER_OVERHEAD_BYTES,
        )
        self._groups.mark(group)
        plan.stored.append((lease, group, trajectory))

    async def _store(self, peer: PeerId, plan: _Plan, size_bytes: int) -> bool:
        """Make the plan durable. Also waits for what others are storing and this submission repeats."""

        def done(_: None) -> None:
            now = self._clock.monotonic_s()
            for lease, group, trajectory in plan.stored:
                group.slots[trajectory.member].state = SlotState.FILLED
                self._leases.delivered(lease, trajectory.member, now)
            self._on_filled(peer, [(group, trajectory.member) for _, group, trajectory in plan.stored])

        def undone() -> None:
            for lease, group, trajectory in plan.stored:
                _undo(group, lease, trajectory.member)
                self._groups.mark(group)
            for lease, member in plan.judged:
                lease.verdicts.pop(member, None)
            self._count(peer, plan.counted, -1)

        try:
            await self._committer.execute(
                lambda db: rows.insert_trajectories(db, plan.rows),
                size_bytes=size_bytes,
                on_commit=done,
                on_fail=undone,
            )
        except LocalFault as e:
            self.fault = str(e)
            return False
        self.fault = ""
        return all(lease.verdicts.get(member) is stored for lease, member, stored in plan.repeats)

    def _charge_replay(self, peer: PeerId, count: int) -> None:
        # What was answered before is not counted again; reading it took time all the same.
        self._quota.charge(peer, [Reason.DUPLICATE] * count, self._clock.monotonic_s())

    def _count(self, peer: PeerId, reasons: list[Reason], sign: int) -> None:
        scope = peer if self._is_known(peer) else STRANGERS
        if sign > 0:
            self._quota.charge(peer, reasons, self._clock.monotonic_s())
        for reason in set(reasons):
            count = sign * reasons.count(reason)
            self._counters.add(TOTAL, reason.value, count)
            self._counters.add(scope, reason.value, count)

    def _remember(self, peer: PeerId, digest: bytes, verdicts: tuple[Verdict, ...]) -> None:
        self._refused[(peer, digest)] = verdicts
        while len(self._refused) > REMEMBERED_REFUSALS:
            self._refused.popitem(last=False)


def _refuse(plan: _Plan, reason: Reason, detail: str) -> Judgement:
    plan.counted.append(reason)
    plan.forgettable = True
    return Judgement(reason=reason, detail=detail)


def _is_free(group: Group, member: int, lease_id: bytes) -> bool:
    slot = group.slots[member]
    mine = slot.state is SlotState.LEASED and slot.lease_id == lease_id
    return group.state is GroupState.ACTIVE and (mine or slot.state is SlotState.OPEN)


def _undo(group: Group, lease: LiveLease, member: int) -> None:
    slot = group.slots[member]
    if slot.state is SlotState.STORING and slot.lease_id == lease.lease_id:
        held = member in lease.outstanding
        slot.state, slot.work = (SlotState.LEASED if held else SlotState.OPEN), None
        slot.lease_id = lease.lease_id if held else None


_VERDICTS: TypeAdapter[tuple[Verdict, ...]] = TypeAdapter(tuple[Verdict, ...])


def _verdicts(trajectories: tuple[Trajectory, ...], judgements: list[Judgement]) -> tuple[Verdict, ...]:
    # On the hot path: pydantic checks maps in a fifth of the time in which it makes objects unchecked.
    return _VERDICTS.validate_python(
        tuple(
            {
                "lease_id": trajectory.lease_id,
                "group_id": trajectory.group_id,
                "member": trajectory.member,
                "reason": judgement.reason,
                "detail": judgement.detail,
            }
            for trajectory, judgement in zip(trajectories, judgements, strict=True)
        )
    )
