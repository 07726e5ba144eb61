"""How much of a server one peer may use at a time, and how much each has used. No IO."""

from collections import OrderedDict
from dataclasses import dataclass, field

import anyio

from echo_swarm.identity import PeerId
from echo_swarm.transport.room import Flow

MAX_PEERS_COUNTED = 4096
"""Identities are free, so only the most recent ones are told apart; the totals count all."""


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Calls answered, with the sizes of their frames."""

    calls: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    def add(self, bytes_in: int, bytes_out: int) -> None:
        """Count one call."""
        self.calls += 1
        self.bytes_in += bytes_in
        self.bytes_out += bytes_out


@dataclass(slots=True, kw_only=True)
class TrafficLedger:
    """What a server answered."""

    total: Traffic = field(default_factory=Traffic)
    by_method: dict[str, Traffic] = field(default_factory=dict[str, Traffic])
    by_peer: "OrderedDict[PeerId, Traffic]" = field(default_factory=OrderedDict[PeerId, Traffic])
    """The MAX_PEERS_COUNTED that called last."""
    refused_streams: int = 0
    """Beyond the number allowed."""
    evicted_streams: int = 0
    """Not in use while another peer needed the place."""
    crowded_streams: int = 0
    """Slow with what they held of the server's memory while others waited for it."""
    malformed_streams: int = 0
    """Ended because the peer broke the protocol."""

    def count(self, peer: PeerId, method: str, bytes_in: int, bytes_out: int) -> None:
        """Count one call. `method` is one of a fixed set."""
        self.total.add(bytes_in, bytes_out)
        self.by_method.setdefault(method, Traffic()).add(bytes_in, bytes_out)
        self.by_peer.setdefault(peer, Traffic()).add(bytes_in, bytes_out)
        self.by_peer.move_to_end(peer)
        if len(self.by_peer) > MAX_PEERS_COUNTED:
            self.by_peer.popitem(last=False)


class Share:
    """What one peer has in flight, over all its streams."""

    def __init__(self, *, max_calls: int, max_bytes: int) -> None:
        self.streams = 0
        self.requests = Flow()
        self.answers = Flow()
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self._calls = 0
        self._bytes = 0
        self._freed = anyio.Event()

    async def acquire(self, size: int) -> None:
        """Wait until a call of `size` bytes fits. One call fits always, however large."""
        while self._calls and (self._calls >= self._max_calls or self._bytes + size > self._max_bytes):
            self._freed = anyio.Event() if self._freed.is_set() else self._freed
            await self._freed.wait()
        self._calls += 1
        self._bytes += size

    def release(self, calls: int, size: int) -> None:
        """Give back what `acquire` took."""
        self._calls -= calls
        self._bytes -= size
        self._freed.set()
