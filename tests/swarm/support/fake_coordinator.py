"""A coordinator small enough to read: real manifests, real leases and verdicts, no scoring and no trainer.

It keeps its word about the protocol (hello first, verdicts that repeat, leases that belong to one peer), and has knobs
for what tests need: pause, busy, forgetting everybody as after a restart.
"""

import itertools
import json
import os
import struct
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import anyio

from echo_swarm.checkpoint.safetensors_file import layout_digest, read_header
from echo_swarm.checkpoint.serve import BlobServer
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.clock import SystemClock
from echo_swarm.codec import encode, pack_u32, unpack_u32
from echo_swarm.envelope import seal, unseal
from echo_swarm.errors import RemoteError
from echo_swarm.identity import Identity, PeerId
from echo_swarm.invite import Invite
from echo_swarm.manifest import MANIFEST_LIMITS, Artifact, ArtifactKind, CheckpointManifest, RunManifest
from echo_swarm.trajectory import SUBMISSION_LIMITS, Reason, Submission, Trajectory, Verdict, prompt_digest
from echo_swarm.transport.base import Host
from echo_swarm.transport.rpc import RpcServer, typed
from echo_swarm.work import (
    WORK_PROTOCOL,
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
    Sampling,
    StatusReply,
    StatusRequest,
    WaitReason,
    Welcome,
)

PIECE = 1 << 16
VOCABULARY = 64


@dataclass
class Granted:
    lease: Lease
    peer: PeerId
    deadline_s: float
    verdicts: dict[int, tuple[bytes, Reason]] = field(default_factory=dict)


@dataclass
class Wish:
    """Members of a group that nobody has yet."""

    group: int
    members: list[int]
    pinned: int | None = None
    max_tokens: int = 16


class FakeCoordinator:
    def __init__(
        self,
        folder: Path,
        *,
        max_staleness: int = 2,
        beat_s: float = 0.2,
        lease_s: float = 300.0,
        group_size: int = 4,
        identity: Identity | None = None,
    ):
        self.identity = identity or Identity.generate()
        self.run_id = sha256(self.identity.public_key).hexdigest()[:32]
        self.max_staleness = max_staleness
        self.beat_s = beat_s
        self.lease_s = lease_s
        self.group_size = group_size
        self.mirrors: tuple[str, ...] = ()
        self.clock = SystemClock()
        self.store = VersionStore(folder, self.run_id)
        self.head: int | None = None
        self.known: dict[PeerId, Hello] = {}
        self.hellos: list[Hello] = []
        self.beats: dict[PeerId, Beat] = {}
        self.left: list[PeerId] = []
        self.granted: dict[bytes, Granted] = {}
        self.released: list[Release] = []
        self.accepted: list[Trajectory] = []
        self.counts: dict[PeerId, Counter[str]] = {}
        self.wishes: list[Wish] = []
        self.endless = True
        self.paused = False
        self.finished = False
        self.busy_answers = 0
        self.refuse_hello: RemoteError | None = None
        self.welcome_with: int | None = None
        """The version whose manifest a Welcome hands over, if not the newest."""
        self._groups = itertools.count(1)
        self._changed = anyio.Event()
        self.store.save_run(self.run_envelope)

    # What the run is.

    @property
    def run_envelope(self) -> bytes:
        run = RunManifest(
            protocol=1,
            run_id=self.run_id,
            name="test-run",
            created_at=1.0,
            publisher_key=self.identity.public_key,
            mode="async" if self.max_staleness else "sequential",
            max_staleness=self.max_staleness,
            model_config_json=json.dumps({"model_type": "none"}),
            parameters=1000,
            vocabulary_size=VOCABULARY,
            end_token_ids=(0,),
            max_prompt_tokens=32,
            max_completion_tokens=64,
            environment="none",
            mirrors=self.mirrors,
        )
        return seal(self.identity, run)

    def invite(self, *addresses: str) -> Invite:
        boot = addresses or (f"/memory/1/p2p/{self.identity.peer_id}",)
        return Invite(run=self.run_id, key=self.identity.public_key, boot=boot)

    def publish(
        self,
        version: int,
        *,
        size_bytes: int = 200_000,
        announce: bool = True,
        gguf: Mapping[str, bytes] | None = None,
    ) -> None:
        """Write a version's weights and manifest; `gguf` holds further files by precision."""
        data = version.to_bytes(8, "little") * (size_bytes // 8)
        header = json.dumps({"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
        content = struct.pack("<Q", len(header)) + header + data
        scratch = self.store.folder / "scratch"
        scratch.write_bytes(content)
        artifacts = [_artifact(ArtifactKind.SAFETENSORS, "uint8", content, layout_digest(read_header(scratch)))]
        files = {ArtifactKind.SAFETENSORS.file_name: content}
        for precision, data in (gguf or {}).items():
            artifacts.append(_artifact(ArtifactKind.GGUF, precision, data, bytes(32)))
            files[artifacts[-1].file_name] = data
        manifest = CheckpointManifest(
            run_id=self.run_id,
            policy_version=version,
            parent_digest=None,
            issued_at=self.clock.wall_s(),
            expires_at=self.clock.wall_s() + 3600,
            artifacts=tuple(artifacts),
        )
        signed = unseal(seal(self.identity, manifest), CheckpointManifest, MANIFEST_LIMITS)
        folder = self.store.add(signed)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        self.store.save_head(signed)
        if announce:
            self.head = version
        self.notify()

    def wish(self, members: int, *, pinned: int | None = None, max_tokens: int = 16) -> Wish:
        """Put one group's members up for grabs."""
        wish = Wish(group=next(self._groups), members=list(range(members)), pinned=pinned, max_tokens=max_tokens)
        self.wishes.append(wish)
        self.notify()
        return wish

    def forget_everybody(self) -> None:
        """As after a restart: the peers are unknown, leases and verdicts are still on disk."""
        self.known.clear()

    def notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    # The protocol.

    @asynccontextmanager
    async def serve(self, host: Host) -> AsyncGenerator[None]:
        server = RpcServer(host, WORK_PROTOCOL, max_request_bytes=SUBMISSION_LIMITS.max_bytes + 4096)
        server.method("hello", typed(Hello, self._hello))
        server.method("lease", typed(LeaseRequest, self._lease))
        server.method("push", typed(Push, self._push))
        server.method("beat", typed(Beat, self._beat))
        server.method("release", typed(Release, self._release))
        server.method("status", typed(StatusRequest, self._status))
        async with server, BlobServer(host, self.store):
            yield

    async def _hello(self, peer: PeerId, hello: Hello) -> Welcome:
        if hello.run_id != self.run_id:
            raise RemoteError("unknown_run", f"this is run {self.run_id}")
        if self.refuse_hello is not None:
            raise self.refuse_hello
        self.known[peer] = hello
        self.hellos.append(hello)
        head = self.store.head() if self.welcome_with is None else self.store.manifest(self.welcome_with)
        return Welcome(
            run_manifest=self.run_envelope,
            head_manifest=head.raw if head and self.head is not None else None,
            wall_s=self.clock.wall_s(),
            beat_s=self.beat_s,
        )

    def _check_known(self, peer: PeerId) -> None:
        if peer not in self.known:
            raise RemoteError("hello_first", "say hello first")

    async def _lease(self, peer: PeerId, request: LeaseRequest) -> LeaseReply:
        self._check_known(peer)
        leases: list[Lease] = []
        with anyio.move_on_after(min(request.wait_s, 0.2)):
            while True:
                leases = self._grant(peer, request)
                if leases:
                    break
                await self._changed.wait()
        reason = WaitReason.NONE
        if not leases:
            reason = WaitReason.FINISHED if self.finished else WaitReason.STALENESS_LIMIT
            reason = WaitReason.PAUSED if self.paused else reason
        return LeaseReply(leases=tuple(leases), head_version=self.head, wait_reason=reason, retry_after_s=0.0)

    def _grant(self, peer: PeerId, request: LeaseRequest) -> list[Lease]:
        if self.paused or self.finished or self.head is None or request.held_version is None:
            return []
        left, granted = request.capacity, []
        while left > 0:
            if not self.wishes and self.endless:
                self.wish(self.group_size)
            if not self.wishes:
                break
            wish = self.wishes[0]
            members, wish.members = wish.members[:left], wish.members[left:]
            if not wish.members:
                self.wishes.pop(0)
            left -= len(members)
            granted.append(self._make_lease(peer, wish, members))
        return granted

    def _make_lease(self, peer: PeerId, wish: Wish, members: list[int]) -> Lease:
        assert self.head is not None
        low = max(0, self.head - self.max_staleness) if wish.pinned is None else wish.pinned
        lease = Lease(
            lease_id=os.urandom(16),
            group_id=wish.group,
            prompt_ids=pack_u32([1, wish.group % VOCABULARY]),
            members=tuple(LeaseMember(member=m, seed=wish.group * 1000 + m) for m in members),
            sampling=Sampling(temperature=1.0, max_tokens=wish.max_tokens),
            min_version=low,
            max_version=self.head if self.max_staleness == 0 and wish.pinned is None else wish.pinned,
            expires_in_s=self.lease_s,
        )
        deadline_s = self.clock.monotonic_s() + self.lease_s
        self.granted[lease.lease_id] = Granted(lease=lease, peer=peer, deadline_s=deadline_s)
        return lease

    async def _push(self, peer: PeerId, push: Push) -> PushReply:
        if self.busy_answers:
            self.busy_answers -= 1
            return PushReply(verdicts=(), head_version=self.head, retry_after_s=0.05)
        signed = unseal(push.envelope, Submission, SUBMISSION_LIMITS)
        if signed.peer_id != peer:
            raise RemoteError("bad_signature", "push your own work only")
        verdicts = tuple(
            Verdict(lease_id=t.lease_id, group_id=t.group_id, member=t.member, reason=self._judge(peer, t))
            for t in signed.message.trajectories
        )
        self.notify()
        return PushReply(verdicts=verdicts, head_version=self.head)

    def _judge(self, peer: PeerId, trajectory: Trajectory) -> Reason:
        granted = self.granted.get(trajectory.lease_id)
        digest = sha256(encode(trajectory.to_wire())).digest()
        if granted is not None and trajectory.member in granted.verdicts:
            known, reason = granted.verdicts[trajectory.member]
            if known == digest:
                return reason
        reason = self._reason(peer, granted, trajectory)
        if granted is not None:
            granted.verdicts.setdefault(trajectory.member, (digest, reason))
        self.counts.setdefault(peer, Counter())[reason.value] += 1
        if reason is Reason.ACCEPTED:
            self.accepted.append(trajectory)
        return reason

    def _reason(self, peer: PeerId, granted: Granted | None, trajectory: Trajectory) -> Reason:
        seeds = {m.member: m.seed for m in granted.lease.members} if granted else {}
        if granted is None or granted.peer != peer or trajectory.member not in seeds:
            return Reason.NO_LEASE
        if trajectory.member in granted.verdicts:
            return Reason.DUPLICATE
        if self.clock.monotonic_s() > granted.deadline_s:
            return Reason.LATE
        return self._reason_of_content(granted.lease, seeds[trajectory.member], trajectory)

    def _reason_of_content(self, lease: Lease, seed: int, trajectory: Trajectory) -> Reason:
        assert self.head is not None
        version = trajectory.policy.oldest_version
        signed = self.store.manifest(version)
        if version > self.head:
            return Reason.FUTURE_VERSION
        if lease.max_version is None and self.head - version > self.max_staleness:
            return Reason.STALE
        digests = [artifact.digest for artifact in signed.message.artifacts] if signed else []
        if trajectory.policy.artifact_digest not in digests:
            return Reason.UNKNOWN_POLICY
        if trajectory.prompt_digest != prompt_digest(lease.prompt_ids):
            return Reason.WRONG_PROMPT
        if version < lease.min_version or (lease.max_version is not None and version > lease.max_version):
            return Reason.WRONG_SAMPLING
        if trajectory.seed != seed or trajectory.temperature != lease.sampling.temperature:
            return Reason.WRONG_SAMPLING
        if not trajectory.token_ids or len(trajectory.token_ids) != len(trajectory.logprobs):
            return Reason.BAD_LENGTH
        if max(unpack_u32(trajectory.token_ids)) >= VOCABULARY:
            return Reason.OUT_OF_VOCABULARY
        return Reason.ACCEPTED

    async def _beat(self, peer: PeerId, beat: Beat) -> BeatReply:
        self._check_known(peer)
        self.beats[peer] = beat
        now_s = self.clock.monotonic_s()
        expired = []
        for lease_id in beat.lease_ids:
            granted = self.granted.get(lease_id)
            if granted is None or granted.peer != peer or now_s > granted.deadline_s:
                expired.append(lease_id)
        self.notify()
        return BeatReply(head_version=self.head, expired=tuple(expired), stopping=False, finished=self.finished)

    async def _release(self, peer: PeerId, release: Release) -> Released:
        self.released.append(release)
        if release.leaving:
            self.left.append(peer)
            self.known.pop(peer, None)
        self.notify()
        return Released(count=len(release.lease_ids))

    async def _status(self, _peer: PeerId, request: StatusRequest) -> StatusReply:
        if request.run_id != self.run_id:
            raise RemoteError("unknown_run", f"this is run {self.run_id}")
        status = {
            "run_id": self.run_id,
            "name": "test-run",
            "mode": "async",
            "max_staleness": self.max_staleness,
            "state": "running",
            "policy_version": self.head,
            "trainer": {"state": "training"},
            "accepted": len(self.accepted),
        }
        return StatusReply(protocol=1, status=status)


def _artifact(kind: ArtifactKind, precision: str, content: bytes, layout: bytes) -> Artifact:
    pieces = [sha256(content[start : start + PIECE]).digest() for start in range(0, len(content), PIECE)]
    return Artifact(
        kind=kind,
        precision=precision,
        size_bytes=len(content),
        digest=sha256(content).digest(),
        piece_bytes=PIECE,
        piece_digests=b"".join(pieces),
        layout_digest=layout,
    )
