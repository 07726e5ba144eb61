"""A network inside one process, for tests and simulations: the transport seam with faults on demand.

It behaves as real hosts do: bounded buffers that make a sender wait, no half-close, a lost stream that a reader sees
as its plain end, and outbound-only peers that can be reached only after they have dialled. Faults come from a seed
and each stream draws from its own generator, so that a run does not depend on how tasks are scheduled.
"""

import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream

from echo_swarm.errors import AnotherPeer, PeerUnreachable
from echo_swarm.identity import Identity, PeerId
from echo_swarm.transport.base import Handler
from echo_swarm.transport.memory_stream import CallDuplicator, Faults, MemoryStream, stream_pair
from echo_swarm.transport.tasks import background_tasks

logger = logging.getLogger(__name__)


class MemoryNetwork:
    """Hosts that can reach each other, and what goes wrong between them."""

    def __init__(
        self,
        seed: int = 0,
        *,
        loss: float = 0.0,
        delay_s: float = 0.0,
        duplicate_calls: float = 0.0,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
        now: Callable[[], float] = anyio.current_time,
    ) -> None:
        """Create an empty network.

        Args:
            seed: of all faults.
            loss: share of opens that fail, and of opened streams that break within their first 256 KiB.
            delay_s: each chunk arrives after a time drawn from [0.5, 1.5] times this.
            duplicate_calls: share of `rpc` calls that are delivered twice, under two call ids.
            sleep: how delays pass; replace it together with `now` for a manual clock.
            now: the time that delays are counted in.

        """
        self.loss = loss
        self.delay_s = delay_s
        self.duplicate_calls = duplicate_calls
        self.seen_at: dict[PeerId, str] = {}
        """Addresses that peers seem to come from; none by default."""
        self._seed = seed
        self._sleep = sleep
        self._now = now
        self._hosts: dict[PeerId, MemoryHost] = {}
        self._numbers = 0
        self._opens: dict[tuple[PeerId, PeerId], int] = {}
        self._known: set[frozenset[PeerId]] = set()
        self._cut: set[frozenset[PeerId]] = set()
        self._streams: dict[frozenset[PeerId], set[MemoryStream]] = {}

    @asynccontextmanager
    async def host(self, identity: Identity, *, outbound_only: bool = False) -> AsyncGenerator["MemoryHost"]:
        """Run a host for the length of the block; its handlers and streams end with it."""
        peer = identity.peer_id
        if peer in self._hosts:
            raise ValueError(f"{peer} is live already")
        self._numbers += 1
        addresses = () if outbound_only else (f"/memory/{self._numbers}/p2p/{peer}",)
        async with background_tasks() as tasks:
            host = self._hosts[peer] = MemoryHost(self, peer, addresses)
            host.spawn = tasks.start_soon
            try:
                yield host
            finally:
                del self._hosts[peer]
                for pair in [pair for pair in self._streams if peer in pair]:
                    self._break_streams(pair)
                self._known = {pair for pair in self._known if peer not in pair}

    def partition(self, a: PeerId, b: PeerId, *, silent: bool = False) -> None:
        """Cut two peers off from each other.

        Args:
            a: one peer.
            b: the other.
            silent: open streams stay and carry nothing, as when a router drops everything; else they break.

        """
        pair = frozenset((a, b))
        self._cut.add(pair)
        if silent:
            for stream in self._streams.get(pair, ()):
                stream.stall()
        else:
            self._break_streams(pair)

    def heal(self, a: PeerId, b: PeerId) -> None:
        """Undo `partition`; streams that were silent go on."""
        pair = frozenset((a, b))
        self._cut.discard(pair)
        for stream in self._streams.get(pair, ()):
            stream.resume()

    def break_streams(self, a: PeerId, b: PeerId) -> None:
        """Break the streams that are open between two peers; new ones can be opened at once."""
        self._break_streams(frozenset((a, b)))

    async def connect(self, source: PeerId, address: str) -> PeerId:
        """Dial an address for `source`. Raises PeerUnreachable."""
        target = PeerId(address.rpartition("/p2p/")[2])
        host = self._hosts.get(target)
        if host is None or address not in host.addresses:
            where = f"{address.rpartition('/p2p/')[0]}/p2p/"
            for other in self._hosts.values():
                if any(held.startswith(where) for held in other.addresses):
                    raise AnotherPeer(address, other.peer_id)
            raise PeerUnreachable(f"{address}: connection refused")
        self._refuse_cut(source, target)
        self._known.add(frozenset((source, target)))
        return target

    async def open(self, source: PeerId, target: PeerId, protocol: str) -> ByteStream:
        """Open a stream from `source`. Raises PeerUnreachable."""
        pair = frozenset((source, target))
        host = self._hosts.get(target)
        if host is None or not (host.addresses or pair in self._known):
            raise PeerUnreachable(f"{target}: no address known")
        self._refuse_cut(source, target)
        handler = host.handlers.get(protocol)
        if handler is None:
            raise PeerUnreachable(f"{target}: protocol {protocol} not supported")
        draw = self._draw(source, target)
        if draw.random() < self.loss:
            raise PeerUnreachable(f"{target}: connection lost")
        self._known.add(pair)
        faults = Faults(
            break_after_bytes=draw.randrange(1 << 18) if draw.random() < self.loss else None,
            delay_s=self.delay_s,
            draw=draw,
            sleep=self._sleep,
            now=self._now,
        )
        near, far = stream_pair(faults, on_close=lambda: self._forget(pair, near, far))
        self._streams.setdefault(pair, set()).update((near, far))
        host.spawn(host.run_handler, handler, far, source)
        return CallDuplicator(near, draw, self.duplicate_calls) if self.duplicate_calls else near

    def _draw(self, source: PeerId, target: PeerId) -> random.Random:
        number = self._opens[source, target] = self._opens.get((source, target), 0) + 1
        return random.Random(f"{self._seed}/{source}/{target}/{number}")

    def _refuse_cut(self, source: PeerId, target: PeerId) -> None:
        if frozenset((source, target)) in self._cut:
            raise PeerUnreachable(f"{target}: timed out (partitioned)")

    def _forget(self, pair: frozenset[PeerId], *streams: MemoryStream) -> None:
        live = self._streams.get(pair, set())
        live.difference_update(streams)
        if not live:
            self._streams.pop(pair, None)

    def _break_streams(self, pair: frozenset[PeerId]) -> None:
        for stream in tuple(self._streams.get(pair, ())):
            stream.break_now()


class MemoryHost:
    """A host on a MemoryNetwork."""

    spawn: Callable[..., object]
    """`start_soon` of the task group that runs this host's handlers."""

    def __init__(self, network: MemoryNetwork, peer: PeerId, addresses: tuple[str, ...]) -> None:
        self.handlers: dict[str, Handler] = {}
        self._network = network
        self._peer = peer
        self._addresses = addresses
        self._dialled: dict[PeerId, str] = {}

    @property
    def peer_id(self) -> PeerId:
        """Own peer id."""
        return self._peer

    @property
    def addresses(self) -> tuple[str, ...]:
        """`/memory/<n>/p2p/<peer id>`, or nothing for outbound only."""
        return self._addresses

    async def serve(self, protocol: str, handler: Handler) -> None:
        """Answer streams of `protocol` with `handler` from now on."""
        self.handlers[protocol] = handler

    async def open_stream(self, peer: PeerId, protocol: str, *, timeout_s: float) -> ByteStream:
        """Open a stream. Raises PeerUnreachable at once, where a real network would need `timeout_s`."""
        await anyio.lowlevel.checkpoint()
        return await self._network.open(self._peer, peer, protocol)

    def dialled(self, peer: PeerId) -> str | None:
        """Return the address at which `connect` last reached a peer."""
        return self._dialled.get(peer)

    def seen_at(self, peer: PeerId) -> str | None:
        """Return what `MemoryNetwork.seen_at` says of a peer."""
        return self._network.seen_at.get(peer)

    async def connect(self, address: str, *, timeout_s: float) -> PeerId:
        """Dial `/memory/<n>/p2p/<peer id>`. Raises PeerUnreachable at once."""
        await anyio.lowlevel.checkpoint()
        peer = await self._network.connect(self._peer, address)
        self._dialled[peer] = address
        return peer

    async def run_handler(self, handler: Handler, stream: MemoryStream, peer: PeerId) -> None:
        """Run a handler on one stream; close the stream and log what it raises."""
        try:
            await handler(stream, peer)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            logger.debug("stream of %s was lost", peer)
        except Exception:
            # The seam's promise: one handler's bug ends one stream and nothing else.
            logger.exception("stream handler failed for %s", peer)
        finally:
            await stream.aclose()
