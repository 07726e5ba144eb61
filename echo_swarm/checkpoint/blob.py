"""What peers say to each other about versions: the protocol BLOB_PROTOCOL over `transport.rpc`.

    run       RunRequest       → EnvelopeReply   the RunManifest's envelope
    keys      RunRequest       → KeyChain        the successions of the run's key, as far as this peer knows them
    manifest  ManifestRequest  → EnvelopeReply   a CheckpointManifest's envelope; the newest one without a version
    have      HaveRequest      → HaveReply       which pieces of an artifact this peer has, and who else wants them
    offer     OfferRequest     → OfferReply      which of the pieces wanted to ask the coordinator for
    piece     PieceRequest     → PieceReply      one of them, or some that lie side by side

Answers that are no messages: error codes `unknown_run`, `not_found` (nothing of it here, or not that piece), `busy`
(all upload places taken; ask again later). Everybody may ask anything: manifests are public to whoever knows the run
id, and nothing that is answered is trusted before it was checked.
"""

from typing import Annotated

from pydantic import Field

from echo_swarm.checkpoint.pieces import MAX_PACKED_BYTES
from echo_swarm.envelope import OVERHEAD_BYTES
from echo_swarm.identity import PeerId
from echo_swarm.manifest import MANIFEST_LIMITS, MAX_PIECE_BYTES, MAX_RUN_BYTES, MAX_RUN_PIECES
from echo_swarm.succession import KeyChain
from echo_swarm.transport.base import Host
from echo_swarm.transport.rpc import RpcClient, call_message
from echo_swarm.wire import U32, U63, Address, Digest, Message, RunId

BLOB_PROTOCOL = "/echo-swarm/blob/1"
NOT_FOUND = "not_found"
BUSY = "busy"

MAX_REQUEST_BYTES = MAX_PACKED_BYTES + 4096
MAX_WAIT_S = 30.0
"""How long a `have` may wait for news."""
MAX_HINTS = 16
MAX_ADDRESSES = 4
MAX_OFFERED = 64
MAX_REPLY_BYTES = MANIFEST_LIMITS.max_bytes + OVERHEAD_BYTES + 1024
"""The largest answer: a manifest, or a piece of MAX_PIECE_BYTES."""

assert MAX_RUN_BYTES <= MAX_PIECE_BYTES <= MAX_REPLY_BYTES - 1024


class RunRequest(Message):
    """Ask what the run is, or which keys it has had."""

    run_id: RunId


class ManifestRequest(Message):
    """Ask for a version's manifest."""

    run_id: RunId
    policy_version: U63 | None
    """None for the newest one."""


class EnvelopeReply(Message):
    """A signed message, as the run's key sealed it."""

    envelope: Annotated[bytes, Field(max_length=MANIFEST_LIMITS.max_bytes + OVERHEAD_BYTES)]


class HaveRequest(Message):
    """Ask which pieces of an artifact can be fetched. Who asks is after them itself, and others are told so."""

    digest: Digest
    known: U32
    """Pieces that the answerer was last known to have; 0 at first."""
    wait_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)]
    """How long to wait while it has no more than those."""
    addresses: Annotated[tuple[Address, ...], Field(strict=False, max_length=MAX_ADDRESSES)]
    """Where the asker can be dialled; empty for outbound only."""


class PeerHint(Message):
    """Somebody who may have pieces. A claim: dialling tells."""

    peer: Annotated[str, Field(min_length=1, max_length=64)]
    addresses: Annotated[tuple[Address, ...], Field(strict=False, min_length=1, max_length=MAX_ADDRESSES)]


class HaveReply(Message):
    """A `PieceMap`, packed, and who else is after the artifact."""

    pieces: Annotated[bytes, Field(max_length=MAX_PACKED_BYTES)]
    peers: Annotated[tuple[PeerHint, ...], Field(strict=False, max_length=MAX_HINTS)]


class OfferRequest(Message):
    """Ask which pieces to ask for."""

    digest: Digest
    pieces: Annotated[bytes, Field(max_length=MAX_PACKED_BYTES)]
    """A `PieceMap` of those wanted, packed."""
    count: Annotated[int, Field(ge=1, le=MAX_OFFERED)]


class OfferReply(Message):
    """Pieces that nobody, or few, were told to ask for."""

    indexes: Annotated[tuple[U32, ...], Field(strict=False, max_length=MAX_OFFERED)]


class PieceRequest(Message):
    """Ask for a piece, and for those that follow it: on a fast line the asking costs more than the bytes."""

    digest: Digest
    """Of the whole artifact."""
    index: U32
    """Of the first."""
    count: Annotated[int, Field(ge=1, le=MAX_RUN_PIECES)]


class PieceReply(Message):
    """The content of the first of the pieces asked for, or of as many as are there and fit; verify them."""

    data: Annotated[bytes, Field(max_length=MAX_PIECE_BYTES)]


class BlobClient:
    """One peer's blob service. Use as `async with`; nothing that it returns has been verified yet."""

    def __init__(self, host: Host, peer: PeerId, *, max_outstanding: int = 16) -> None:
        self.peer = peer
        self._rpc = RpcClient(
            host,
            peer,
            BLOB_PROTOCOL,
            max_reply_bytes=MAX_REPLY_BYTES,
            max_request_bytes=MAX_REQUEST_BYTES,
            max_outstanding=max_outstanding,
        )

    async def __aenter__(self) -> "BlobClient":
        """Start; the stream opens with the first call."""
        await self._rpc.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close the stream."""
        await self._rpc.__aexit__(None, None, None)

    async def run(self, run_id: str, *, timeout_s: float) -> bytes:
        """Return the envelope of the RunManifest; check it with `trust.check_run_manifest`.

        Raises:
            PeerUnreachable: no answer within `timeout_s`.
            RemoteError: see the module.
            MalformedMessage: the answer is none.

        """
        request = RunRequest(run_id=run_id)
        return (await call_message(self._rpc, "run", request, EnvelopeReply, timeout_s=timeout_s)).envelope

    async def keys(self, run_id: str, *, timeout_s: float) -> KeyChain:
        """Return the successions that the peer knows; check them with `succession.RunKeys`."""
        return await call_message(self._rpc, "keys", RunRequest(run_id=run_id), KeyChain, timeout_s=timeout_s)

    async def manifest(self, run_id: str, version: int | None = None, *, timeout_s: float) -> bytes:
        """Return the envelope of a version's manifest (default: the newest); check it with `trust.TrustedHead`."""
        request = ManifestRequest(run_id=run_id, policy_version=version)
        return (await call_message(self._rpc, "manifest", request, EnvelopeReply, timeout_s=timeout_s)).envelope

    async def have(
        self, digest: bytes, *, known: int = 0, wait_s: float = 0.0, addresses: tuple[str, ...] = (), timeout_s: float
    ) -> HaveReply:
        """Return the pieces that the peer says it has, and whom it says to be after them too.

        Args:
            digest: of the artifact.
            known: pieces that it is known to have.
            wait_s: how long it may wait until it has more; added to `timeout_s`.
            addresses: where others can dial us.
            timeout_s: for an answer.

        """
        request = HaveRequest(digest=digest, known=known, wait_s=wait_s, addresses=addresses[:MAX_ADDRESSES])
        return await call_message(self._rpc, "have", request, HaveReply, timeout_s=wait_s + timeout_s)

    async def offer(self, digest: bytes, wanted: bytes, count: int, *, timeout_s: float) -> tuple[int, ...]:
        """Return which of the wanted pieces (a packed map) the peer would rather give; only the coordinator answers."""
        request = OfferRequest(digest=digest, pieces=wanted, count=count)
        return (await call_message(self._rpc, "offer", request, OfferReply, timeout_s=timeout_s)).indexes

    async def piece(self, digest: bytes, index: int, *, count: int = 1, timeout_s: float) -> bytes:
        """Return what the peer says is that piece, or the first of `count` pieces that lie side by side."""
        request = PieceRequest(digest=digest, index=index, count=count)
        return (await call_message(self._rpc, "piece", request, PieceReply, timeout_s=timeout_s)).data


async def ask_manifest(host: Host, peer: PeerId, run_id: str, version: int | None = None, *, timeout_s: float) -> bytes:
    """Ask one peer once for a manifest's envelope; see `BlobClient.manifest`."""
    async with BlobClient(host, peer) as client:
        return await client.manifest(run_id, version, timeout_s=timeout_s)


async def ask_keys(host: Host, peer: PeerId, run_id: str, *, timeout_s: float) -> KeyChain:
    """Ask one peer once for the successions of a run's key; see `BlobClient.keys`."""
    async with BlobClient(host, peer) as client:
        return await client.keys(run_id, timeout_s=timeout_s)
