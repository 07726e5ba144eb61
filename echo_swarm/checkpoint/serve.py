"""Serving what a store holds: nodes and the coordinator run the same service.

A piece is served from the moment it was verified, also while the rest of its artifact is still on its way.

    call ──► upload place (at most `max_uploads` at a time, wait at most `max_wait_s`, else `busy`) ──► thread reads
"""

from collections import OrderedDict

import anyio
import anyio.to_thread

from echo_swarm.checkpoint.blob import (
    BLOB_PROTOCOL,
    BUSY,
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    NOT_FOUND,
    EnvelopeReply,
    HaveReply,
    HaveRequest,
    ManifestRequest,
    PieceReply,
    PieceRequest,
    RunRequest,
)
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.errors import RemoteError, RunNotFound
from echo_swarm.identity import PeerId
from echo_swarm.transport.base import Host
from echo_swarm.transport.rpc import RpcServer, typed

MAX_PEERS_COUNTED = 4096
"""Identities are free; the total counts all peers."""


class BlobServer:
    """The blob service of one peer over its store. `async with BlobServer(host, store):` serves for the block.

    Args:
        host: accepts the streams.
        store: what is served.
        max_uploads: pieces that are read from disk at a time.
        max_wait_s: how long a request waits for its turn before it is told `busy`.
        max_pieces_per_peer: answers in memory for one peer that reads slowly; as many as it asks for at a time.

    """

    def __init__(
        self,
        host: Host,
        store: VersionStore,
        *,
        max_uploads: int = 8,
        max_wait_s: float = 10.0,
        max_pieces_per_peer: int = 4,
    ) -> None:
        self.bytes_served = 0
        """Pieces' bytes since the start, all peers."""
        self.bytes_by_peer: OrderedDict[PeerId, int] = OrderedDict()
        """The same for the peers that asked last."""
        self._store = store
        self._max_wait_s = max_wait_s
        self._places = anyio.CapacityLimiter(max_uploads)
        self._rpc = RpcServer(
            host,
            BLOB_PROTOCOL,
            max_request_bytes=MAX_REQUEST_BYTES,
            max_reply_bytes=MAX_REPLY_BYTES,
            max_in_flight_per_peer=max_pieces_per_peer,
            max_streams_per_peer=2,
            max_streams=256,
        )
        self._rpc.method("run", typed(RunRequest, self._run))
        self._rpc.method("manifest", typed(ManifestRequest, self._manifest))
        self._rpc.method("have", typed(HaveRequest, self._have))
        self._rpc.method("piece", typed(PieceRequest, self._piece))

    async def __aenter__(self) -> "BlobServer":
        """Answer from now on."""
        await self._rpc.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Answer no more."""
        await self._rpc.__aexit__(None, None, None)

    async def _run(self, _peer: PeerId, request: RunRequest) -> EnvelopeReply:
        self._check_run(request.run_id)
        raw = await anyio.to_thread.run_sync(self._store.run)
        if raw is None:
            raise RemoteError(NOT_FOUND, "this peer does not have the run's description yet")
        return EnvelopeReply(envelope=raw)

    async def _manifest(self, _peer: PeerId, request: ManifestRequest) -> EnvelopeReply:
        self._check_run(request.run_id)
        if request.policy_version is None:
            signed = await anyio.to_thread.run_sync(self._store.head)
        else:
            signed = self._store.manifest(request.policy_version)
        if signed is None:
            raise RemoteError(NOT_FOUND, "no such version here")
        return EnvelopeReply(envelope=signed.raw)

    async def _have(self, _peer: PeerId, request: HaveRequest) -> HaveReply:
        have = await anyio.to_thread.run_sync(self._store.have, request.digest)
        if have is None:
            raise RemoteError(NOT_FOUND, "nothing of this artifact here")
        return HaveReply(pieces=have.pack())

    async def _piece(self, peer: PeerId, request: PieceRequest) -> PieceReply:
        data = None
        with anyio.move_on_after(self._max_wait_s) as wait:
            async with self._places:
                wait.deadline = float("inf")
                data = await anyio.to_thread.run_sync(self._store.read_piece, request.digest, request.index)
        if wait.cancelled_caught:
            raise RemoteError(BUSY, "all upload places are taken")
        if data is None:
            raise RemoteError(NOT_FOUND, f"no piece {request.index} of this artifact here")
        self.bytes_served += len(data)
        self.bytes_by_peer[peer] = self.bytes_by_peer.get(peer, 0) + len(data)
        self.bytes_by_peer.move_to_end(peer)
        if len(self.bytes_by_peer) > MAX_PEERS_COUNTED:
            self.bytes_by_peer.popitem(last=False)
        return PieceReply(data=data)

    def _check_run(self, run_id: str) -> None:
        if run_id != self._store.run_id:
            raise RunNotFound(f"this peer serves another run than {run_id}")
