"""The work protocol, coordinator's side: each method of `echo_swarm.work`, from checked message to reply.

Errors a node gets beside the verdicts: `banned`, `unknown_run`, `identity_in_use` (its key is live in another process),
`hello_first` (we do not know its process; after our restart, or after it was silent for too long), `full`,
`malformed`, `bad_signature`, `backend_refused` (see `followed_seeds`).
"""

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import anyio

from echo_coordinator.state.counters import TRANSFERS
from echo_coordinator.state.intake import Busy
from echo_coordinator.state.leases import LiveLease
from echo_coordinator.state.roster import Admission, Node
from echo_coordinator.state.run_state import RunState
from echo_swarm.addresses import network_of
from echo_swarm.errors import LocalFault, RemoteError
from echo_swarm.identity import PeerId
from echo_swarm.probe import ProbeReply, ProbeRequest
from echo_swarm.trajectory import SUBMISSION_LIMITS
from echo_swarm.transport.rpc import RpcServer, typed
from echo_swarm.work import (
    Beat,
    BeatReply,
    Hello,
    Lease,
    LeaseMember,
    LeaseReply,
    LeaseRequest,
    Push,
    PushReply,
    Release,
    Released,
    Role,
    Sampling,
    StatusReply,
    StatusRequest,
    WaitReason,
    Welcome,
)

MAX_REQUEST_BYTES = SUBMISSION_LIMITS.max_bytes + 4096
"""A push is the longest request."""
TRIAL_BEATS = 1.2
"""How long a newcomer with a live peer's key waits: that peer, if it lives, beats once within this."""
ORPHAN_BEATS = 3.0
"""How long the leases of a replaced process wait for results that its successor finds in its outbox."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What a Welcome hands over."""

    run_manifest: bytes
    """Envelope of RunManifest."""
    head_manifest: bytes | None
    """Envelope of the newest CheckpointManifest."""
    epoch: bytes | None = None
    """Envelope of this coordinator's Epoch."""


class WorkService:
    """Answers nodes."""

    def __init__(
        self,
        state: RunState,
        *,
        published: Callable[[], Published],
        status: Callable[[], Awaitable[dict[str, Any]]] | None = None,
        new_id: Callable[[], bytes] = lambda: secrets.token_bytes(16),
        hear_epoch: Callable[[bytes | None], None] = lambda _raw: None,
        seen_at: Callable[[PeerId], str | None] = lambda _: None,
    ) -> None:
        """Describe it.

        Args:
            state: the run.
            published: the manifests of this moment.
            status: makes the map of `echo_swarm.status.RunStatus`, of plain values; None for an empty one.
            new_id: makes lease ids, 16 bytes that nobody can guess.
            hear_epoch: told the highest epoch that a node knows, if it knows one; may raise PeerFault.
            seen_at: the address that a peer comes from, if it is known.

        """
        self._state = state
        self._core = state.core
        self._published = published
        self._status = status
        self._new_id = new_id
        self._hear_epoch = hear_epoch
        self._seen_at = seen_at

    def register(self, server: RpcServer) -> None:
        """Answer the work protocol's methods on `server` (made with `max_request_bytes=MAX_REQUEST_BYTES`)."""
        server.method("hello", typed(Hello, self.hello))
        server.method("lease", typed(LeaseRequest, self.lease))
        server.method("push", typed(Push, self.push), finish=True)
        server.method("beat", typed(Beat, self.beat))
        server.method("release", typed(Release, self.release))
        server.method("probe", typed(ProbeRequest, self.probe))
        server.method("status", typed(StatusRequest, self.status))

    async def hello(self, peer: PeerId, hello: Hello) -> Welcome:
        """Take a peer in."""
        core = self._core
        self._check_run(hello.run_id)
        self._hear_epoch(hello.epoch)
        self._state.bans.refuse(peer)
        if hello.role is Role.COORDINATOR:
            return self._welcome()  # Another start of this run looks around: it takes no part, and no place.
        self._state.followed.refuse(hello.backend)
        skew_s = hello.wall_s - core.clock.wall_s()
        admission = core.roster.consider(peer, hello, core.clock.monotonic_s())
        if admission is Admission.FULL:
            raise RemoteError("full", "this run has as many peers as it can keep track of; try again later")
        if admission is Admission.TRIAL:
            await anyio.sleep(TRIAL_BEATS * core.settings.beat_s)
            if not core.roster.on_trial(peer, hello.instance):
                raise RemoteError("identity_in_use", "another process with this key is live")
        now = core.clock.monotonic_s()
        if core.roster.admit(peer, hello, now, skew_s, network_of(self._seen_at(peer) or "")):
            core.leases.orphan(peer, now + ORPHAN_BEATS * core.settings.beat_s)
        await core.write_peer(peer, hello.role, hello.backend)
        core.changed.notify()
        welcome = self._welcome()
        if (node := core.roster.get(peer)) is not None and welcome.head_manifest is not None:
            self._tell_head(node)
        return welcome

    def _welcome(self) -> Welcome:
        core, manifests = self._core, self._published()
        return Welcome(
            run_manifest=manifests.run_manifest,
            head_manifest=manifests.head_manifest,
            wall_s=core.clock.wall_s(),
            beat_s=core.settings.beat_s,
            epoch=manifests.epoch,
        )

    async def lease(self, peer: PeerId, request: LeaseRequest) -> LeaseReply:
        """Grant work, or wait for some for up to `wait_s`, or say why there is none; or that there is a new version."""
        core = self._core
        node = self._known(peer)
        if node.role is not Role.INFERENCE or node.backend is None:
            raise RemoteError("refused", "only inference nodes with a backend get work")
        node.held_version = request.held_version
        granted: list[LiveLease] = []
        with anyio.move_on_after(request.wait_s):
            while not (granted := self._grant(peer, request)) and not self._is_in_vain(node):
                # No await stands between the look and the wait, so no change is missed.
                await core.work_changed.wait(request.wait_s, peer)
                self._state.bans.refuse(peer)
                if core.roster.get(peer) is not node or not node.live:
                    raise _hello_first()  # It left, or another process took its place, while this call waited.
        if granted:
            await self._write_down(peer, granted)
        return self._lease_reply(node, request, granted)

    async def push(self, peer: PeerId, push: Push) -> PushReply:
        """Judge finished work; the verdicts are on disk when they are sent."""
        self._state.bans.refuse(peer)
        self._core.roster.heard(peer, self._core.clock.monotonic_s())
        outcome = await self._state.intake.submit(peer, push.envelope)
        head = self._tell_head(self._core.roster.get(peer))
        if isinstance(outcome, Busy):
            return PushReply(verdicts=(), head_version=head, retry_after_s=outcome.retry_after_s)
        return PushReply(verdicts=outcome, head_version=head)

    async def beat(self, peer: PeerId, beat: Beat) -> BeatReply:
        """Keep a peer and its leases alive."""
        core = self._core
        self._state.bans.refuse(peer)
        now = core.clock.monotonic_s()
        if not core.roster.beat(peer, beat, now):
            raise _hello_first()
        expired = tuple(core.leases.renew(peer, beat.lease_ids, now))
        core.on_dropped(core.leases.drop_unnamed(peer, beat.lease_ids, now))
        core.transfers.holds(peer, beat.held_version, now)
        for refusal in core.transfers.take(peer, beat.transfers, now):
            core.counters.add(TRANSFERS, refusal.value)
        node = core.roster.get(peer)
        return BeatReply(
            head_version=self._tell_head(node),
            expired=expired,
            stopping=core.stopping,
            finished=core.finished,
            probe=node is not None and not core.stopping and self._state.probes.due(node, now),
            standing=self._state.standing(peer)[:1024],
        )

    async def probe(self, peer: PeerId, request: ProbeRequest) -> ProbeReply:
        """Hand out the probe that is due, or judge the answer to one."""
        node, now = self._known(peer), self._core.clock.monotonic_s()
        if request.answer is not None:
            return await self._state.probes.take(node, request.answer, now)
        return ProbeReply(probe=self._state.probes.issue(node, now), verdict=None, detail="")

    async def release(self, peer: PeerId, release: Release) -> Released:
        """Take leases back."""
        core = self._core
        self._state.bans.refuse(peer)
        cause = f"failed: {release.cause}" if release.failed else "released"
        now = core.clock.monotonic_s()
        dropped = core.leases.release(peer, release.lease_ids, cause, now, failed=release.failed)
        if release.leaving:
            dropped += core.leases.release_all(peer, cause, now, failed=release.failed)
            core.roster.leave(peer)
            core.changed.notify()
        core.on_dropped(dropped)
        await core.save()
        return Released(count=len(dropped))

    async def status(self, peer: PeerId, request: StatusRequest) -> StatusReply:
        """Tell the run's health to anybody who knows its id."""
        self._check_run(request.run_id)
        return StatusReply(protocol=1, status={} if self._status is None else await self._status())

    def _check_run(self, run_id: str) -> None:
        if run_id != self._core.facts.run_id:
            raise RemoteError("unknown_run", f"this coordinator serves run {self._core.facts.run_id}")

    def _known(self, peer: PeerId) -> Node:
        self._state.bans.refuse(peer)
        node = self._core.roster.heard(peer, self._core.clock.monotonic_s())
        if node is None:
            raise _hello_first()
        return node

    def _grant(self, peer: PeerId, request: LeaseRequest) -> list[LiveLease]:
        core = self._core
        window = core.window()
        if core.paused or core.stopping or window is None or request.held_version is None:
            return []
        if self._state.bars(peer):
            return []
        alone, newcomers = self._is_alone(), self._state.newcomers
        return core.leases.grant(
            peer,
            capacity=request.capacity if alone else newcomers.take_turn(peer, request.capacity),
            tokens_per_s=request.tokens_per_s,
            alone=alone,
            window=window,
            now=core.clock.monotonic_s(),
            new_id=self._new_id,
            offer=newcomers.offer(peer),
        )

    def _is_in_vain(self, node: Node) -> bool:
        """Whether the answer should not wait for work: it says why there is none, or that there is a new version."""
        core = self._core
        news = node.told_version != core.versions.published
        return news or core.paused or core.stopping or self._state.bars(node.peer)

    def _tell_head(self, node: Node | None) -> int | None:
        """Return the newest version, for an answer to this peer: it need not be told at once any more."""
        head = self._core.versions.published
        if node is not None:
            node.told_version = head
        return head

    def _is_alone(self) -> bool:
        return self._core.roster.alone()

    async def _write_down(self, peer: PeerId, granted: list[LiveLease]) -> None:
        try:
            await self._core.save()
        except LocalFault:
            core, ids = self._core, [lease.lease_id for lease in granted]
            core.on_dropped(core.leases.release(peer, ids, "not written", core.clock.monotonic_s()))
            raise

    def _lease_reply(self, node: Node, request: LeaseRequest, granted: list[LiveLease]) -> LeaseReply:
        # A lease that ended while it was written down (its group was dropped) is left out.
        leases = [lease for lease in granted if lease.outstanding and self._core.leases.get(lease.lease_id)]
        reason = WaitReason.NONE if leases else self._wait_reason(node.peer, request)
        # In these cases the request was parked, and would be again: no need to stay away.
        calm = reason in (WaitReason.STALENESS_LIMIT, WaitReason.QUOTA, WaitReason.STARTING, WaitReason.NONE)
        return LeaseReply(
            leases=tuple(self._to_wire(lease) for lease in leases),
            head_version=self._tell_head(node),
            wait_reason=reason,
            retry_after_s=0.0 if calm else self._core.settings.beat_s,
        )

    def _to_wire(self, lease: LiveLease) -> Lease:
        core = self._core
        group = core.groups.by_id[lease.group_id]
        return Lease(
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            prompt_ids=group.prompt_ids,
            members=tuple(
                LeaseMember(member=member, seed=core.seed_of(lease, member)) for member in sorted(lease.outstanding)
            ),
            sampling=Sampling(temperature=core.temperature(group.kind), max_tokens=core.settings.max_tokens),
            min_version=lease.min_version,
            max_version=lease.max_version,
            expires_in_s=min(86_400.0, max(0.001, lease.deadline - core.clock.monotonic_s())),
        )

    def _wait_reason(self, peer: PeerId, request: LeaseRequest) -> WaitReason:
        core = self._core
        if core.finished:
            return WaitReason.FINISHED
        if core.stopping:
            return WaitReason.STOPPING
        if core.versions.published is None or request.held_version is None:
            return WaitReason.STARTING
        if core.paused:
            return WaitReason.PAUSED
        if self._state.bars(peer):
            return WaitReason.SET_ASIDE
        now, alone = core.clock.monotonic_s(), self._is_alone()
        room = 1 if alone else self._state.newcomers.room(peer, 1)
        if not core.leases.share(peer, capacity=room, tokens_per_s=0, alone=alone, now=now):
            return WaitReason.QUOTA
        return WaitReason.STALENESS_LIMIT


def _hello_first() -> RemoteError:
    return RemoteError("hello_first", "say hello first: this process is not known, or was silent for too long")
