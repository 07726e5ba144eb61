"""One process of a modelled node: asks for work, samples, keeps what it made in the outbox, pushes, beats.

ask ─► LeaseBook (the node's own) ─► SimSampler ─► ripe ─► outbox ─► push ─► verdicts
           ▲                                         0.5 s, 32, or lease complete
head ─► Held ─► versions
"""

import asyncio
from collections.abc import Collection
from typing import Any, cast

from echo_coordinator.simulate.crew import Crew
from echo_coordinator.simulate.held import Held
from echo_coordinator.simulate.link import CALL_TIMEOUT_S, SimLink
from echo_coordinator.simulate.place import Disk, Entry, Place
from echo_coordinator.simulate.sampler import Made, SimSampler
from echo_coordinator.simulate.truth import artifact, completion, logprobs
from echo_node.lease_book import LeaseBook
from echo_swarm.envelope import seal
from echo_swarm.errors import PeerUnreachable, RemoteError
from echo_swarm.identity import Identity
from echo_swarm.trajectory import BehaviourPolicy, FinishReason, Submission, Trajectory, prompt_digest
from echo_swarm.work import Beat, BeatReply, Lease, LeaseReply, LeaseRequest, Push, PushReply, Release

LEASE_WAIT_S = 10.0
FLUSH_S = 0.5
PUSH_TIMEOUT_S = 60.0
MAX_PER_SUBMISSION = 32


class Life:
    """One process of a node."""

    def __init__(self, place: Place, identity: Identity, disk: Disk, crew: Crew) -> None:
        self.place, self.identity, self.disk, self.crew = place, identity, disk, crew
        self.outbox = disk.outbox
        self.clock = place.clock
        self.began = _now()
        self.book = LeaseBook()
        self.held = Held(fetch_s=place.swarm.fetch_s, keep=place.max_staleness + 2, draws=place.draws, crew=crew)
        self.link = SimLink(place, identity.peer_id, self.held.hear)
        self.ripe: list[tuple[Trajectory, Lease]] = []
        self.dropped_stale = 0
        self._flush_due = False
        self._changed, self._filled = asyncio.Event(), asyncio.Event()
        self._finished_any = False
        self.sampler = SimSampler(
            swarm=place.swarm,
            speed=place.speed,
            draws=place.draws,
            clock=self.clock,
            crew=crew,
            book=self.book,
            held=self.held,
            finished=self._on_made,
            changed=self._changed.set,
        )
        self.held.missing = lambda: self.book.missing(self.held.newest, self.held.versions)
        self.held.arrived = self._advance
        for part in (self.link.run, self._beat, self._ask, self._push):
            crew.start(part())

    def _advance(self) -> None:
        if self.place.behaviour.samples:
            self.sampler.advance()
        self._changed.set()

    async def _beat(self) -> None:
        while True:
            await self.link.up.wait()
            named, sent_s = self._leases_held(), self.clock.monotonic_s()
            beat = Beat(
                lease_ids=named,
                held_version=self.held.newest,
                state="simulated",
                tokens_per_s=self._speed(),
                bytes_served=0,
                bytes_fetched_peers=0,
            )
            try:
                reply = cast(BeatReply, await self.link.call("beat", beat, max(2.0, 2 * self.link.beat_s)))
            except (PeerUnreachable, RemoteError):
                continue
            self.held.hear(reply.head_version)
            self.book.renew(named, sent_s)
            self.book.drop(reply.expired)
            self._hand_back(self.book.drop(self.book.overdue(self.clock.monotonic_s())))
            self._advance()
            await asyncio.sleep(self.link.beat_s)

    def _leases_held(self) -> tuple[bytes, ...]:
        pushed = (made.lease_id for entry in self.outbox for made in entry.submission.trajectories)
        return tuple(dict.fromkeys([*self.book.ids, *pushed]))[:4096]

    def _speed(self) -> float:
        shown = self.place.speed if self._finished_any else 0.0
        return min(1e9, shown * self.place.behaviour.boast) if self.place.behaviour.samples else 1e6

    def _hand_back(self, lease_ids: Collection[bytes]) -> None:
        if lease_ids:
            self.crew.start(self._release(tuple(lease_ids)))

    async def _release(self, lease_ids: tuple[bytes, ...]) -> None:
        try:
            await self.link.call("release", Release(lease_ids=lease_ids, cause="out of time", leaving=False))
        except (PeerUnreachable, RemoteError):
            return  # They run out by themselves.

    # Work.

    async def _ask(self) -> None:
        while True:
            await self.link.up.wait()
            wanted = self._wanted()
            if not wanted:
                self._changed.clear()
                await self._changed.wait()
                continue
            request = LeaseRequest(
                capacity=wanted, held_version=self.held.newest, tokens_per_s=self._speed(), wait_s=LEASE_WAIT_S
            )
            try:
                reply = cast(LeaseReply, await self.link.call("lease", request, LEASE_WAIT_S + CALL_TIMEOUT_S))
            except PeerUnreachable:
                continue
            except RemoteError:
                await asyncio.sleep(1.0)
                continue
            self.held.hear(reply.head_version)
            if not reply.leases:
                await asyncio.sleep(max(0.1, reply.retry_after_s))
                continue
            self._take(reply.leases)

    def _take(self, leases: tuple[Lease, ...]) -> None:
        if self.place.behaviour.kind != "thief":
            self.place.behaviour.overheard.extend(leases)
        self.book.add(leases, self.clock.monotonic_s())
        self.held.fetch()
        if self.place.behaviour.samples:
            self.sampler.advance()

    def _wanted(self) -> int:
        if not self.place.behaviour.samples:
            return 4096 if self.held.newest is not None else 0
        if self.sampler.loaded is None:
            return 0
        prefetch = max(1, self.place.swarm.places // 4)
        wanted = self.sampler.places + prefetch - self.book.running - self.book.waiting
        return wanted if wanted >= prefetch else 0

    def _on_made(self, made: Made) -> None:
        self._finished_any = True
        lease = made.lease
        tokens = self.place.behaviour.length(made.tokens, lease)
        stopped = tokens < lease.sampling.max_tokens
        greedy = lease.sampling.temperature == 0
        fields: dict[str, Any] = dict(
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            member=made.member.member,
            prompt_digest=prompt_digest(lease.prompt_ids),
            policy=BehaviourPolicy(
                oldest_version=made.version,
                newest_version=made.version,
                artifact_digest=artifact(made.version),
                backend="scripted",
                build="simulated",
                precision="float32",
            ),
            temperature=lease.sampling.temperature,
            seed=made.member.seed,
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            token_ids=completion(tokens, made.member.seed, ended=stopped),
            logprobs=logprobs(tokens, greedy=greedy),
        )
        trajectory = Trajectory(**self.place.behaviour.sign(fields, lease))
        self.ripe.append((trajectory, lease))
        if self.book.is_complete(lease.lease_id) or len(self.ripe) >= MAX_PER_SUBMISSION:
            self._flush()
        elif not self._flush_due:
            self._flush_due = True
            self.crew.later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        ripe, self.ripe = self.ripe, []
        by_version: dict[tuple[int, bool], list[tuple[Trajectory, Lease]]] = {}
        for made, lease in ripe:
            by_version.setdefault((made.policy.oldest_version, lease.max_version is None), []).append((made, lease))
        for (version, goes_stale), siblings in by_version.items():
            for start in range(0, len(siblings), MAX_PER_SUBMISSION):
                self._store(siblings[start : start + MAX_PER_SUBMISSION], version, goes_stale)
        self.book.drop([lease_id for lease_id in self.book.ids if self.book.is_complete(lease_id)])

    def _store(self, ripe: list[tuple[Trajectory, Lease]], version: int, goes_stale: bool) -> None:
        submission = Submission(run_id=self.place.run_id, trajectories=tuple(made for made, _ in ripe))
        envelope = seal(self.identity, submission)
        behaviour = self.place.behaviour
        if lies := behaviour.lies_in(ripe):
            behaviour.truth.tell(envelope, lies)
        self.outbox.append(Entry(envelope=envelope, submission=submission, goes_stale=goes_stale, version=version))
        self._filled.set()

    async def _push(self) -> None:
        outbox = self.outbox
        while True:
            self._drop_stale()
            if not outbox:
                self._filled.clear()
                await self._filled.wait()
            await self.link.up.wait()
            if not outbox:
                continue
            entry = outbox[0]
            entry.sent = True
            pause_s = await self._push_once(entry)
            if pause_s is None:
                self._changed.set()
            else:
                await asyncio.sleep(pause_s)

    async def _push_once(self, entry: Entry) -> float | None:
        """Return how long to wait before it is pushed again, None if it has left the outbox."""
        try:
            reply = cast(PushReply, await self.link.call("push", Push(envelope=entry.envelope), PUSH_TIMEOUT_S))
        except PeerUnreachable:
            return 0.0
        except RemoteError as e:
            if e.code == "unavailable":
                return 1.0
            self.disk.settle(entry, 0)
            return None
        self.held.hear(reply.head_version)
        if not reply.verdicts:
            return max(0.1, reply.retry_after_s)
        self.disk.settle(entry, sum(verdict.reason == "accepted" for verdict in reply.verdicts))
        behaviour = self.place.behaviour
        if behaviour.kind and all(verdict.reason == "accepted" for verdict in reply.verdicts):
            extra = behaviour.pushes_beside(self.identity, self.place.run_id, entry.submission, entry.envelope)
            for envelope in extra:
                try:
                    await self.link.call("push", Push(envelope=envelope), PUSH_TIMEOUT_S)
                except (PeerUnreachable, RemoteError):
                    break
        return None

    def _drop_stale(self) -> None:
        lowest = (self.held.head or 0) - self.place.max_staleness
        gone = [e for e in self.outbox if e.goes_stale and not e.sent and e.version < lowest]
        for entry in gone:
            self.outbox.remove(entry)
            self.dropped_stale += len(entry.submission.trajectories)


def _now() -> float:
    return asyncio.get_running_loop().time()
