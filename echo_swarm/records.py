"""What peers announce in the directory. Small, signed by the peer they speak of, short-lived."""

from typing import Annotated

from pydantic import Field

from echo_swarm.codec import Limits
from echo_swarm.epoch import EpochEnvelope
from echo_swarm.wire import U63, Address, Digest, Message, RunId, Seconds, Word
from echo_swarm.work import Role

RECORD_LIMITS = Limits(max_bytes=8 * 1024, max_items=64, max_depth=4)


class HeadRecord(Message):
    """The newest version, announced by the run's key. A hint: only the manifest it names can be trusted."""

    run_id: RunId
    policy_version: U63
    manifest_digest: Digest
    issued_at: Seconds
    epoch: EpochEnvelope | None = None
    """Of the coordinator that announces it."""


class PeerRecord(Message):
    """A peer of a run and what it can serve."""

    run_id: RunId
    role: Annotated[Role, *Word]
    addresses: Annotated[tuple[Address, ...], Field(strict=False, max_length=16)]
    """Multiaddresses ending in /p2p/<peer id>; empty for outbound only."""
    held_version: U63 | None
    artifact_digests: Annotated[tuple[Digest, ...], Field(strict=False, max_length=16)]
    """Complete artifacts it serves, newest first."""
    issued_at: Seconds
    epoch: EpochEnvelope | None = None
    """The coordinator's; None for other peers."""
