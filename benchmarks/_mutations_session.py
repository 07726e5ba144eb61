"""Peers that send a real coordinator's work service what no honest peer sends, and count what they are told.

    RunState + WorkService ◄── RpcServer ◄── memory network or hivemind on loopback ◄── RpcClient ◄── Session

Each wrong message has to be refused with a code; after each batch a good completion has to be accepted. What could have
been valid by chance (bytes of a submission altered before it was signed) is judged again by rules written here.
"""

import math
import struct
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import psutil

from benchmarks._mutations_make import Broken, broken_bytes, broken_values
from echo_coordinator.state.batch import Prompt
from echo_coordinator.state.groups import SlotState
from echo_coordinator.state.run_state import RunFacts, RunState, open_run
from echo_coordinator.state.service import MAX_REQUEST_BYTES, Published, WorkService
from echo_coordinator.state.work_settings import WorkSettings
from echo_swarm import codec
from echo_swarm.clock import ManualClock
from echo_swarm.errors import EchoError, MalformedMessage, PeerUnreachable, RemoteError
from echo_swarm.identity import Identity
from echo_swarm.trajectory import SUBMISSION_LIMITS, Reason, Submission, prompt_digest
from echo_swarm.transport.base import Host
from echo_swarm.transport.rpc import RpcClient, RpcServer
from echo_swarm.work import WORK_PROTOCOL, Lease, LeaseReply

RUN_ID = "ab" * 16
ARTIFACT = b"a" * 32
VOCABULARY, END, MAX_TOKENS = 50, 2, 16
ANSWER_S = 60.0
FORGIVEN_S = 600.0
"""By which the run's clock goes on after a batch: refusals are forgiven, so that the next one is looked at, too."""
OPEN_GROUPS = 16
OpenHost = Callable[[Identity], AbstractAsyncContextManager[Host]]
_CODES = frozenset(Reason) - {Reason.ACCEPTED} | {"stream ended, malformed", "busy", "unknown_method"}
"""What may come of a wrong message: reasons that are documented."""
_HARMLESS = frozenset(
    {
        ("held_version", "None"),
        ("backend", "None"),
        ("epoch", "left out"),
        ("epoch", "None"),
        ("failed", "left out"),
        ("transfers", "left out"),
        ("addresses", "[]"),
        ("lease_ids", "[]"),
        ("transfers", "[]"),
    }
)


@dataclass(slots=True)
class Tally:
    """What was sent and what came of it."""

    sent: int = 0
    outcomes: Counter[str] = field(default_factory=Counter[str])
    """`method: code` → messages."""
    valid_by_chance: int = 0
    good: int = 0
    """Good completions that were accepted, one after each batch."""
    faults: list[str] = field(default_factory=list[str])
    """What must not have happened."""


@dataclass(frozen=True, slots=True)
class _Peer:
    identity: Identity
    client: RpcClient
    number: int

    def hello(self) -> dict[str, Any]:
        backend = {"backend": "scripted", "build": "1", "precision": "float32", "device": "cpu", "batch": 64}
        return {
            "run_id": RUN_ID,
            "software": "mutations",
            "role": "inference",
            "instance": self.number.to_bytes(16, "big"),
            "wall_s": 1_000_000.0,
            "backend": backend,
            "addresses": ["/ip4/127.0.0.1/tcp/1"],
        }

    def seal(self, payload: bytes, kind: str = "Submission") -> dict[str, Any]:
        """Sign bytes as they are, whatever they are."""
        name = kind.encode()
        signed = b"".join(
            (b"echo-swarm/1", struct.pack("<I", len(name)), name, struct.pack("<Q", len(payload)), payload)
        )
        key = self.identity.public_key
        return {"v": 1, "type": kind, "payload": payload, "key": key, "sig": self.identity.sign(signed)}


class Session:
    """Sends batches. Made by `open_session`."""

    def __init__(self, state: RunState, clock: ManualClock, peers: list[_Peer], random: Random) -> None:
        self.tally = Tally()
        self._state, self._clock, self._random = state, clock, random
        self._peers = cycle(peers)
        self._all = peers
        self._structures = _endless(self._structural)

    async def batch(self, size: int) -> None:
        """Send so many wrong messages, then a good one."""
        peer = next(self._peers)
        await self._call(peer, "hello", peer.hello())
        lease = await self._lease(peer)
        for _ in range(size):
            if lease is None:
                lease = await self._lease(peer)
            if await self._wrong(peer, lease):
                lease = None
        self._clock.advance(FORGIVEN_S)
        await self._good(peer)

    async def _wrong(self, peer: _Peer, lease: Lease) -> bool:
        """Send one; return whether the lease is used up by it."""
        kind = self._random.randrange(10)
        submission = self.submission(lease)
        if kind < 5:
            method, broken = next(self._structures)(peer, submission)
            return await self._send(peer, method, broken)
        payload = codec.encode(submission)
        if kind < 7:
            broken = broken_bytes(codec.encode(peer.seal(payload)), self._random)
            return await self._send(
                peer, "push", Broken(what=f"envelope: {broken.what}", value={"envelope": broken.value})
            )
        if kind < 9:
            broken = broken_bytes(payload, self._random)
            envelope = codec.encode(peer.seal(broken.value))
            valid = is_valid(broken.value, lease)
            what = f"signed submission: {broken.what}"
            return await self._send(peer, "push", Broken(what=what, value={"envelope": envelope}), may_pass=valid)
        other = self._random.choice([p for p in self._all if p is not peer])
        envelope = codec.encode(other.seal(payload))
        return await self._send(peer, "push", Broken(what="signed by another", value={"envelope": envelope}))

    def _structural(self) -> Iterator[Callable[[_Peer, dict[str, Any]], tuple[str, Broken]]]:
        """Yield makers of one structurally wrong message after the other, of all methods."""
        like = self._all[0]
        lease_id = b"\x01" * 16
        beat = {"lease_ids": [lease_id], "held_version": 0, "state": "sampling", "tokens_per_s": 1.0}
        beat |= {"bytes_served": 1, "bytes_fetched_peers": 1}
        plain: dict[str, dict[str, Any]] = {
            "hello": like.hello(),
            "lease": {"capacity": 1, "held_version": 0, "tokens_per_s": 1.0, "wait_s": 0.0},
            "beat": beat,
            "release": {"lease_ids": [lease_id], "cause": "test", "leaving": False, "failed": False},
            "push": {"envelope": b"x" * 300},
            "status": {"run_id": RUN_ID},
        }
        for method, message in plain.items():
            for broken in broken_values(message, harmless=_HARMLESS):
                yield lambda peer, _, method=method, broken=broken: (method, broken)
        count = sum(1 for _ in broken_values(self.submission(None)))
        for index in range(count):
            yield lambda peer, submission, index=index: ("push", self._broken_submission(peer, submission, index))
        for index in range(sum(1 for _ in broken_values(like.seal(b"x")))):
            yield lambda peer, submission, index=index: ("push", self._broken_envelope(peer, submission, index))

    def _broken_submission(self, peer: _Peer, submission: dict[str, Any], index: int) -> Broken:
        broken = next(b for i, b in enumerate(broken_values(submission)) if i == index)
        try:
            payload = codec.encode(broken.value)
        except TypeError:
            payload = codec.encode(broken.value, canonical=False)
        return Broken(what=f"submission: {broken.what}", value={"envelope": codec.encode(peer.seal(payload))})

    def _broken_envelope(self, peer: _Peer, submission: dict[str, Any], index: int) -> Broken:
        envelope = peer.seal(codec.encode(submission))
        broken = next(b for i, b in enumerate(broken_values(envelope)) if i == index)
        raw = codec.encode(broken.value, canonical=False)
        return Broken(what=f"envelope: {broken.what}", value={"envelope": raw})

    async def _send(self, peer: _Peer, method: str, broken: Broken, *, may_pass: bool = False) -> bool:
        self.tally.sent += 1
        code, judged = await self._call(peer, method, broken.value)
        self.tally.outcomes[f"{method}: {code}"] += 1
        if code in ("ok", "accepted"):
            if not may_pass:
                self.tally.faults.append(f"{method}, {broken.what}: {code}")
            else:
                self.tally.valid_by_chance += 1
        elif code not in _CODES:
            self.tally.faults.append(f"{method}, {broken.what}: {code}")
        elif may_pass and code not in ("busy", "duplicate", "late"):
            self.tally.faults.append(f"{method}, {broken.what}: valid by the rules, and yet {code}")
        return judged

    async def _call(self, peer: _Peer, method: str, payload: Any) -> tuple[str, bool]:
        """Return what came of it, and whether a completion was judged."""
        try:
            reply = await peer.client.call(method, payload, timeout_s=ANSWER_S)
        except RemoteError as e:
            return e.code, False
        except MalformedMessage:
            return "refused before it was sent", False
        except PeerUnreachable as e:
            return ("stream ended, malformed" if "malformed" in str(e) else f"stream ended, {e}"), False
        if method != "push":
            return "ok", False
        verdicts = reply["verdicts"]
        return (verdicts[0]["reason"], True) if verdicts else ("busy", False)

    async def _lease(self, peer: _Peer) -> Lease:
        request = {"capacity": 1, "held_version": 0, "tokens_per_s": 0.0, "wait_s": 0.0}
        reply: LeaseReply | None = None
        for _ in range(3):
            await self._refill()
            reply = LeaseReply.from_wire(await peer.client.call("lease", request, timeout_s=ANSWER_S))
            if reply.leases:
                return reply.leases[0]
            # What is promised from before runs out.
            self._clock.advance(FORGIVEN_S)
            await self._state.tick()
            await self._call(peer, "hello", peer.hello())
        raise EchoError(f"no work for peer {peer.number}: {reply}")

    async def _refill(self) -> None:
        """Keep a few prompts open."""
        admission = self._state.admission
        groups = self._state.core.groups.by_id.values()
        if admission.wanted and sum(bool(group.members(SlotState.OPEN)) for group in groups) < 2:
            first = admission.next_prompt_index
            prompts = [
                Prompt(index=first + i, prompt_ids=codec.pack_u32([5, 6, (first + i) % 40]))
                for i in range(min(OPEN_GROUPS, admission.wanted))
            ]
            await admission.add(prompts)

    async def _good(self, peer: _Peer) -> None:
        """Push a good completion, twice: it is accepted, answered alike the second time and counted once."""
        await self._call(peer, "hello", peer.hello())
        lease = await self._lease(peer)
        before = self._state.accepted()
        push = {"envelope": codec.encode(peer.seal(codec.encode(self.submission(lease))))}
        told = [(await self._call(peer, "push", push))[0] for _ in range(2)]
        if told != ["accepted", "accepted"] or self._state.accepted() != before + 1:
            self.tally.faults.append(f"a good completion after a batch, pushed twice: {told}")
        self.tally.good += 1

    def submission(self, lease: Lease | None) -> dict[str, Any]:
        """Return a good submission of one completion, as plain values; for no lease, one of the same form."""
        count = self._random.randint(2, MAX_TOKENS - 1)
        ids = [self._random.choice([1, *range(3, VOCABULARY)]) for _ in range(count)] + [END]
        policy = {"oldest_version": 0, "newest_version": 0, "artifact_digest": ARTIFACT}
        policy |= {"backend": "scripted", "build": "1", "precision": "float32"}
        trajectory = {
            "lease_id": lease.lease_id if lease else bytes(16),
            "group_id": lease.group_id if lease else 0,
            "member": lease.members[0].member if lease else 0,
            "prompt_digest": prompt_digest(lease.prompt_ids) if lease else bytes(32),
            "policy": policy,
            "temperature": 1.0,
            "seed": lease.members[0].seed if lease else 0,
            "finish_reason": "stop",
            "token_ids": codec.pack_u32(ids),
            "logprobs": codec.pack_f32([-self._random.expovariate(1) for _ in ids]),
        }
        return {"run_id": RUN_ID, "trajectories": [trajectory]}


def _endless(make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    while True:
        yield from make()


def is_valid(payload: bytes, lease: Lease) -> bool:
    """Say whether an altered submission of one completion is one that the peer might as well have meant."""
    try:
        submission = Submission.from_wire(codec.decode(payload, SUBMISSION_LIMITS))
    except MalformedMessage:
        return False
    if submission.run_id != RUN_ID or len(submission.trajectories) != 1:
        return False
    (made,) = submission.trajectories
    asked = (lease.lease_id, lease.group_id, lease.members[0].member, lease.members[0].seed, lease.sampling.temperature)
    if (made.lease_id, made.group_id, made.member, made.seed, made.temperature) != asked:
        return False
    policy = made.policy
    if (policy.oldest_version, policy.newest_version, policy.artifact_digest) != (0, 0, ARTIFACT):
        return False
    if made.prompt_digest != prompt_digest(lease.prompt_ids):
        return False
    if len(made.token_ids) % 4 or len(made.token_ids) != len(made.logprobs):
        return False
    count = len(made.token_ids) // 4
    ids = struct.unpack(f"<{count}I", made.token_ids)
    logprobs = struct.unpack(f"<{count}f", made.logprobs)
    if not 1 <= count <= MAX_TOKENS or max(ids) >= VOCABULARY:
        return False
    if not all(math.isfinite(value) and value <= 1e-4 for value in logprobs):
        return False
    if made.finish_reason == "stop":
        return ids.index(END) == count - 1 if END in ids else False
    return END not in ids and count == MAX_TOKENS


@asynccontextmanager
async def open_session(folder: Path, open_host: OpenHost, *, peers: int, seed: int) -> AsyncGenerator[Session]:
    """Run a coordinator's work service and its peers for the length of the block."""
    settings = WorkSettings(group_size=4, groups_per_update=1024, max_tokens=MAX_TOKENS, beat_s=0.05, max_attempts=100)
    clock, coordinator = ManualClock(), Identity.generate()
    facts = RunFacts(run_id=RUN_ID, vocabulary_size=VOCABULARY, end_token_ids=(END,))
    async with (
        open_run(folder / "run.sqlite", settings, facts, clock) as state,
        open_host(coordinator) as host,
        RpcServer(host, WORK_PROTOCOL, max_request_bytes=MAX_REQUEST_BYTES) as server,
    ):
        manifests = Published(run_manifest=b"run", head_manifest=None)
        WorkService(state, published=lambda: manifests).register(server)
        await state.updates.publish(0, [ARTIFACT])
        async with _open_peers(open_host, host, peers) as made:
            yield Session(state, clock, made, Random(seed))


@asynccontextmanager
async def _open_peers(open_host: OpenHost, coordinator: Host, count: int) -> AsyncGenerator[list[_Peer]]:
    async with AsyncExitStack() as stack:
        made: list[_Peer] = []
        for number in range(count):
            identity = Identity.generate()
            host = await stack.enter_async_context(open_host(identity))
            await host.connect(coordinator.addresses[0], timeout_s=30)
            client = RpcClient(host, coordinator.peer_id, WORK_PROTOCOL, max_reply_bytes=4 << 20)
            made.append(_Peer(identity, await stack.enter_async_context(client), number))
        yield made


def resident_bytes() -> int:
    """Return the memory of this process."""
    return psutil.Process().memory_info().rss
