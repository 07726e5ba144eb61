"""The transport seam: a host with an identity that opens and accepts byte streams.

Facts every implementation and every user of it must respect:

- There is no half-close. `send_eof` is not available; messages are framed (see `rpc`).
- Silence is not detected here: whoever waits sets a deadline.
- The peer id given to a handler is authenticated by the handshake.
- A receiver always keeps reading: a sender may fail when nobody reads for a few seconds.
"""

from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

from anyio.abc import ByteStream

from echo_swarm.identity import PeerId

Handler = Callable[[ByteStream, PeerId], Awaitable[None]]
"""Serves one incoming stream. The host closes the stream when it returns and logs what it raises."""

GiveBuffer = Callable[[], memoryview]
"""Gives a buffer that is not empty, of which the beginning may be filled."""


@runtime_checkable
class ReceivesInto(Protocol):
    """A stream that can spare its reader a copy."""

    async def receive_into(self, give_buffer: GiveBuffer) -> int:
        """Ask for a buffer once something has arrived, put that there, and return how many bytes it was.

        Raises what `ByteReceiveStream.receive` raises. The buffer may change once this has returned.
        """
        ...


class Host(Protocol):
    """A running libp2p host. Obtained from an async context manager that owns its tasks and processes."""

    @property
    def peer_id(self) -> PeerId:
        """Own peer id."""
        ...

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddresses where others may dial us, each ending in /p2p/<peer id>; empty for outbound only."""
        ...

    async def serve(self, protocol: str, handler: Handler) -> None:
        """Answer streams of `protocol` with `handler` from now on."""
        ...

    async def open_stream(self, peer: PeerId, protocol: str, *, timeout_s: float) -> ByteStream:
        """Open a stream to a peer.

        Raises:
            PeerUnreachable: within `timeout_s`, saying why.

        """
        ...

    def dialled(self, peer: PeerId) -> str | None:
        """Return the address at which `connect` last reached a peer; None when it came to us or was found otherwise."""
        ...

    def seen_at(self, peer: PeerId) -> str | None:
        """Return the multiaddress that a peer's newest stream to us came from; None if that is not known (any more)."""
        ...

    async def connect(self, address: str, *, timeout_s: float) -> PeerId:
        """Dial a multiaddress that ends in /p2p/<peer id>, so that `open_stream` to that peer works.

        Raises:
            PeerUnreachable: within `timeout_s`, saying why.
            AnotherPeer: the handshake there proved another identity.

        """
        ...
