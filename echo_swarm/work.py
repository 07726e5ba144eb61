"""What a node and its coordinator say to each other about work: joining, leases, pushes, progress.

Method names and payloads of the protocol WORK_PROTOCOL, each a call from the node over `transport.rpc`:

    hello   Hello            → Welcome        once after each (re)connection
    lease   LeaseRequest     → LeaseReply     long poll: answers when there is work or after `wait_s`
    push    Push             → PushReply      idempotent
    beat    Beat             → BeatReply      every `Welcome.beat_s`; keeps leases alive, tells the head
    release Release          → Released       hands leases back unfinished
    probe   ProbeRequest     → ProbeReply     see `echo_swarm.probe`
    status  StatusRequest    → StatusReply    the run's health
"""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from echo_swarm.envelope import OVERHEAD_BYTES
from echo_swarm.epoch import EpochEnvelope
from echo_swarm.manifest import MANIFEST_LIMITS
from echo_swarm.trajectory import DRAW_BY_SEED, MAX_TRAJECTORIES, SUBMISSION_LIMITS, PackedU32, Verdict
from echo_swarm.transfers import MAX_TRANSFERS, Transfer
from echo_swarm.wire import (
    U32,
    U63,
    Address,
    Label,
    LeaseId,
    Message,
    Name,
    ProtocolVersion,
    RunId,
    Seconds,
    Text,
    Word,
)

WORK_PROTOCOL = "/echo-swarm/work/1"
BANNED = "banned"
"""Error code of every answer but that to `status`: the run's owner wants nothing from this key any more."""
BACKEND_REFUSED = "backend_refused"
"""Error code of a hello: this run takes no work of the backend that it names."""
MAX_LEASES = 256
"""In one reply."""


class Role(StrEnum):
    """What a peer does for the run."""

    COORDINATOR = "coordinator"
    INFERENCE = "inference"
    SEEDER = "seeder"


class BackendReport(Message):
    """What a node samples with, for status and for choosing artifacts."""

    backend: Name
    build: Label
    precision: Name
    device: Label
    """For people, such as `cpu (2 threads)` or `NVIDIA RTX 4090`."""
    batch: Annotated[int, Field(ge=1, le=4096)]
    """Completions it runs at once."""


class Hello(Message):
    """A node introduces itself."""

    run_id: RunId
    software: Label
    role: Annotated[Role, *Word]
    instance: Annotated[bytes, Field(min_length=16, max_length=16)]
    """Random for each process: tells a restart from a copied key that is live twice."""
    wall_s: Seconds
    """The node's clock, so that skew can be named."""
    backend: BackendReport | None
    addresses: Annotated[tuple[Address, ...], Field(strict=False, max_length=16)]
    """Where others may dial it; empty for outbound only."""
    epoch: EpochEnvelope | None = None
    """The highest of the run that the node has heard of, as evidence for a coordinator that was replaced."""


class Welcome(Message):
    """The coordinator's answer to Hello."""

    run_manifest: Annotated[bytes, Field(max_length=MANIFEST_LIMITS.max_bytes + OVERHEAD_BYTES)]
    """Envelope of RunManifest."""
    head_manifest: Annotated[bytes, Field(max_length=MANIFEST_LIMITS.max_bytes + OVERHEAD_BYTES)] | None
    """Envelope of the newest CheckpointManifest; None before version 0 is published."""
    wall_s: Seconds
    beat_s: Annotated[float, Field(gt=0, le=600)]
    """A node silent for three beats is counted as gone."""
    epoch: EpochEnvelope | None = None
    """The coordinator's."""


class Sampling(Message):
    """How a completion is to be sampled. No top-p or top-k: they would change the distribution that is recorded."""

    temperature: Annotated[float, Field(ge=0, le=10)]
    """0 means greedy (evaluation only)."""
    max_tokens: Annotated[int, Field(ge=1, le=1 << 17)]


class LeaseMember(Message):
    """One completion to make."""

    member: U32
    seed: U63
    """Chosen by the coordinator, so that nobody picks lucky ones."""


class Lease(Message):
    """A share of one group, promised to one node until a deadline."""

    lease_id: LeaseId
    group_id: U63
    prompt_ids: PackedU32
    members: Annotated[tuple[LeaseMember, ...], Field(strict=False, min_length=1, max_length=MAX_TRAJECTORIES)]
    sampling: Sampling
    min_version: U63
    max_version: U63 | None
    """Sample with a version in this range; both equal in sequential mode and for evaluation. None: any newer one."""
    expires_in_s: Annotated[float, Field(gt=0, le=86_400)]
    """From the moment the reply was sent. A duration, since clocks differ."""


class LeaseRequest(Message):
    """A node asks for work."""

    capacity: Annotated[int, Field(ge=1, le=4096)]
    """Completions it can take now."""
    held_version: U63 | None
    tokens_per_s: Annotated[float, Field(ge=0, le=1e9)]
    """Its own recent measurement; 0 when unknown. Only sizes shares."""
    wait_s: Annotated[float, Field(ge=0, le=30)]


class WaitReason(StrEnum):
    """Why there is no work."""

    NONE = "none"
    STALENESS_LIMIT = "staleness_limit"
    """As much is in flight or buffered as max_staleness allows; normal while the trainer is the slower side."""
    PAUSED = "paused"
    STARTING = "starting"
    STOPPING = "stopping"
    QUOTA = "quota"
    SET_ASIDE = "set_aside"
    """Its last probe did not fit, or it has to answer one first."""
    FINISHED = "finished"


class LeaseReply(Message):
    """Work, or why there is none."""

    leases: Annotated[tuple[Lease, ...], Field(strict=False, max_length=MAX_LEASES)]
    head_version: U63 | None
    wait_reason: Annotated[WaitReason, *Word]
    retry_after_s: Annotated[float, Field(ge=0, le=600)]


class Push(Message):
    """Finished work. `envelope` is a signed Submission."""

    envelope: Annotated[bytes, Field(max_length=SUBMISSION_LIMITS.max_bytes + OVERHEAD_BYTES)]


class PushReply(Message):
    """One verdict for each trajectory, in the order of the submission."""

    verdicts: Annotated[tuple[Verdict, ...], Field(strict=False, max_length=MAX_TRAJECTORIES)]
    head_version: U63 | None
    retry_after_s: Annotated[float, Field(ge=0, le=600)] = 0.0
    """Above 0 with no verdicts: the buffer is full, nothing was taken, push again later."""


class Beat(Message):
    """A node is alive and says what it does."""

    lease_ids: Annotated[tuple[LeaseId, ...], Field(strict=False, max_length=4096)]
    held_version: U63 | None
    state: Label
    """For people: what it is doing or waiting for."""
    tokens_per_s: Annotated[float, Field(ge=0, le=1e9)]
    bytes_served: U63
    """Pieces uploaded to others since it started."""
    bytes_fetched_peers: U63
    """Pieces downloaded from other nodes since it started."""
    transfers: Annotated[tuple[Transfer, ...], Field(strict=False, max_length=MAX_TRANSFERS)] = ()
    """How files of versions came to it lately, the newest last."""


class BeatReply(Message):
    """What the node needs to know between leases."""

    head_version: U63 | None
    expired: Annotated[tuple[LeaseId, ...], Field(strict=False, max_length=4096)]
    """Leases of the request that no longer hold: stop working on them."""
    stopping: bool
    """The run is being shut down; stay, and wait for the coordinator to come back."""
    finished: bool
    """The run has ended for good; leave with exit code 0."""
    probe: bool = False
    """A probe is due: call `probe`."""
    standing: Text = ""
    """For people: why this node gets no work, or less than others. Empty: it gets what others get."""


class Release(Message):
    """Hand members back unfinished."""

    lease_ids: Annotated[tuple[LeaseId, ...], Field(strict=False, max_length=4096)]
    cause: Text
    leaving: bool
    """The node goes away; it is not counted as lost."""
    failed: bool = False
    """The backend could not do this work (counts against the prompt, not the node)."""


class Released(Message):
    """Acknowledgement."""

    count: U63


class StatusRequest(Message):
    """Ask for the run's health."""

    run_id: RunId


class StatusReply(Message):
    """`status` is the map documented in `echo_swarm.status`."""

    protocol: ProtocolVersion
    status: dict[str, Any]


def seeds_not_followed(backend: str) -> str:
    """Return why a run with `require_followed_seeds` takes no work of a backend, and what to use; for people."""
    return (
        f"this run takes no work of the backend {backend}: its audits have to follow each draw from the seed of the "
        f"lease, which they can of {' and '.join(sorted(DRAW_BY_SEED))} only"
    )
