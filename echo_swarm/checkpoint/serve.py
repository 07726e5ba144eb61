"""Serving what a store holds: nodes and the coordinator run the same service.

A piece is served from the moment it was verified, also while the rest of its artifact is still on its way. Who asks
what there is waits for news, rather than asking again and again, and learns who else is after it.

    call ──► its peer's turn at the rate limit ──► its peer's turn at a read (`max_uploads` at a time) ──► thread reads
             (longer than `max_wait_s`: `busy`)    (the same)                                              ──► answer
"""

from collections import OrderedDict
from typing import TypeVar

import anyio
import anyio.to_thread

from echo_swarm.checkpoint.allocation import Allocation
from echo_swarm.checkpoint.blob import (
    BLOB_PROTOCOL,
    BUSY,
    MAX_HINTS,
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    NOT_FOUND,
    EnvelopeReply,
    HaveReply,
    HaveRequest,
    ManifestRequest,
    OfferReply,
    OfferRequest,
    PeerHint,
    PieceReply,
    PieceRequest,
    RunRequest,
)
from echo_swarm.checkpoint.interest import InterestBook
from echo_swarm.checkpoint.news import News
from echo_swarm.checkpoint.pieces import PieceMap
from echo_swarm.checkpoint.rate import RateLimit
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.checkpoint.uploads import Turns
from echo_swarm.errors import RemoteError, RunNotFound
from echo_swarm.identity import PeerId
from echo_swarm.manifest import MAX_PIECE_BYTES, MAX_RUN_BYTES
from echo_swarm.succession import KeyChain
from echo_swarm.transport.base import Host
from echo_swarm.transport.rpc import RpcServer, TrafficLedger, reserve_answer, typed

Key = TypeVar("Key")

_BESIDE_PIECES = 2
"""Calls of a peer in flight beside its pieces: a `have` that waits, and an offer."""
MAX_BYTES = 128 << 20
"""Of which half are for answers: 64 pieces of 1 MiB on their way."""
MAX_DIGESTS_COUNTED = 256
"""More than all versions have that are kept and fetched."""
MAX_PEERS_COUNTED = 4096
"""Identities are free; the total counts all peers."""


class BlobServer:
    """The blob service of one peer over its store. `async with BlobServer(host, store):` serves for the block.

    Args:
        host: accepts the streams.
        store: what is served.
        max_uploads: pieces that are read from disk at a time.
        max_wait_s: how long a request waits for its turn before it is told `busy`; longer by the time that a piece
            takes at the rate limit.
        max_pieces_per_peer: answers in memory for one peer that reads slowly; as many as it asks for at a time.
        interest: who asked, shared with this peer's own downloads; None for a book of its own.
        allocates: whether it chooses which pieces to give to whom, as the coordinator does.
        max_bytes_per_s: of pieces, to all peers together; None for no limit.
        max_bytes: of memory for requests and answers of all peers together, see `RpcServer`.

    """

    def __init__(
        self,
        host: Host,
        store: VersionStore,
        *,
        max_uploads: int = 8,
        max_wait_s: float = 10.0,
        max_pieces_per_peer: int = 8,
        interest: InterestBook | None = None,
        allocates: bool = False,
        max_bytes_per_s: float | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.bytes_served = 0
        """Pieces' bytes since the start, all peers."""
        self.bytes_by_peer: OrderedDict[PeerId, int] = OrderedDict()
        """The same for the peers that asked last."""
        self.bytes_by_digest: OrderedDict[bytes, int] = OrderedDict()
        """The same for the artifacts that were asked for last."""
        self.interest = interest or InterestBook()
        self._allocation = Allocation()
        self._rate = RateLimit(max_bytes_per_s)
        self._store = store
        self._max_wait_s = max_wait_s
        self._pace = Turns(1)
        self._reads = Turns(max_uploads)
        self._news = News(self._held)
        self.interest.grew = self._news.grew
        self._rpc = RpcServer(
            host,
            BLOB_PROTOCOL,
            max_request_bytes=MAX_REQUEST_BYTES,
            max_reply_bytes=MAX_REPLY_BYTES,
            max_in_flight_per_peer=max_pieces_per_peer + _BESIDE_PIECES,
            max_streams_per_peer=2,
            max_streams=256,
            max_bytes=max_bytes,
        )
        self._rpc.method("run", typed(RunRequest, self._run))
        self._rpc.method("keys", typed(RunRequest, self._keys))
        self._rpc.method("manifest", typed(ManifestRequest, self._manifest))
        self._rpc.method("have", typed(HaveRequest, self._have), waits=True)
        if allocates:
            self._rpc.method("offer", typed(OfferRequest, self._offer))
        self._rpc.method("piece", typed(PieceRequest, self._piece))

    @property
    def traffic(self) -> TrafficLedger:
        """What its peers called, and the streams that ended otherwise than by them."""
        return self._rpc.traffic

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

    async def _keys(self, _peer: PeerId, request: RunRequest) -> KeyChain:
        self._check_run(request.run_id)
        return await anyio.to_thread.run_sync(self._store.keys) or KeyChain(links=())

    async def _manifest(self, _peer: PeerId, request: ManifestRequest) -> EnvelopeReply:
        self._check_run(request.run_id)
        if request.policy_version is None:
            signed = await anyio.to_thread.run_sync(self._store.head)
        else:
            signed = self._store.manifest(request.policy_version)
        if signed is None:
            raise RemoteError(NOT_FOUND, "no such version here")
        return EnvelopeReply(envelope=signed.raw)

    def _held(self, digest: bytes) -> int:
        growing = self._store.growing(digest)
        return -1 if growing is None else growing.held

    async def _have(self, peer: PeerId, request: HaveRequest) -> HaveReply:
        have = await self._pieces(peer, request)
        if request.wait_s > 0 and have.held <= request.known and not have.complete:
            await self._news.wait(peer, request.digest, request.known, request.wait_s)
            have = await self._pieces(peer, request)
        # Who follows a download asks often: names go with the first answer, and with those of whoever has everything.
        limit = 0 if request.known and not have.complete else MAX_HINTS
        others = self.interest.others(request.digest, peer, limit, anyio.current_time())
        hints = tuple(PeerHint(peer=other, addresses=addresses) for other, addresses in others.items())
        return HaveReply(pieces=have.pack(), peers=hints)

    async def _pieces(self, peer: PeerId, request: HaveRequest) -> PieceMap:
        have = self._store.growing(request.digest)
        if have is None:
            have = await anyio.to_thread.run_sync(self._store.have, request.digest)
        if have is None:
            raise RemoteError(NOT_FOUND, "nothing of this artifact here")
        # Once it is known that there is something to trade: strangers cannot fill the book with made-up digests.
        self.interest.note(request.digest, peer, request.addresses, anyio.current_time())
        return have

    async def _offer(self, peer: PeerId, request: OfferRequest) -> OfferReply:
        have = await anyio.to_thread.run_sync(self._store.have, request.digest)
        if have is None or not have.complete:
            raise RemoteError(NOT_FOUND, "this artifact is not whole here")
        wanted = PieceMap.unpack(have.count, request.pieces)
        chosen = self._allocation.choose(request.digest, peer, wanted, request.count, anyio.current_time())
        return OfferReply(indexes=tuple(chosen))

    async def _piece(self, peer: PeerId, request: PieceRequest) -> PieceReply:
        paid = await self._pay(peer, request) if self._rate.limited else 0
        # With a limit, peers take turns piece by piece.
        count = 1 if self._rate.limited else request.count
        data = None
        try:
            async with self._reads.turn(peer, max_wait_s=self._max_wait_s):
                with anyio.fail_after(self._max_wait_s):
                    length = self._store.piece_length(request.digest, request.index) or MAX_PIECE_BYTES
                    await reserve_answer(max(length, min(count * length, MAX_RUN_BYTES)))
                data = await anyio.to_thread.run_sync(self._store.read_piece, request.digest, request.index, count)
        except TimeoutError:
            raise RemoteError(BUSY, "all upload places, or the memory for them, are taken") from None
        finally:
            if data is None:
                self._rate.refund(paid)
        if data is None:
            raise _no_piece(request)
        self._count(peer, request.digest, len(data))
        for index in range(request.index, request.index + count):
            self._allocation.gave(request.digest, peer, index)
        return PieceReply(data=data)

    async def _pay(self, peer: PeerId, request: PieceRequest) -> int:
        """Wait until a piece may pass; nothing is read from disk for those that may not."""
        size = self._store.piece_length(request.digest, request.index)
        growing = self._store.growing(request.digest)
        if growing is None and await anyio.to_thread.run_sync(self._store.whole, request.digest) is None:
            size = None
        if size is None or (growing is not None and request.index not in growing):
            raise _no_piece(request)
        try:
            async with self._pace.turn(peer, max_wait_s=self._max_wait_s + self._rate.duration_s(size)):
                await self._rate.spend(size)
        except TimeoutError:
            raise RemoteError(BUSY, "the upload limit is used up") from None
        return size

    def _count(self, peer: PeerId, digest: bytes, size_bytes: int) -> None:
        self.bytes_served += size_bytes
        _add_latest(self.bytes_by_peer, peer, size_bytes, MAX_PEERS_COUNTED)
        _add_latest(self.bytes_by_digest, digest, size_bytes, MAX_DIGESTS_COUNTED)

    def _check_run(self, run_id: str) -> None:
        if run_id != self._store.run_id:
            raise RunNotFound(f"this peer serves another run than {run_id}")


def _add_latest(counts: OrderedDict[Key, int], key: Key, size_bytes: int, most: int) -> None:
    counts[key] = counts.get(key, 0) + size_bytes
    counts.move_to_end(key)
    if len(counts) > most:
        counts.popitem(last=False)


def _no_piece(request: PieceRequest) -> RemoteError:
    return RemoteError(NOT_FOUND, f"no piece {request.index} of this artifact here")
