"""An anyio byte stream over the pair of asyncio streams that connects us with p2pd. Needs asyncio, not hivemind.

Measured: a clean close, a lost peer and a dead helper all look the same to a reader, the plain end; only a later
write fails. There is no half-close: ending one direction tears down both.
"""

import asyncio

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream

WRITE_BUFFER_BYTES = 1 << 19
"""What may wait in our process before a sender waits; the helper holds about as much again."""
_CLOSE_S = 2.0
"""How long unsent data may hold up a close; a peer that reads nothing gets no longer."""


class HivemindStream(ByteStream):
    """One open stream. Receiving and sending may be cancelled without loss."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        # Kept even by those who only read: a StreamWriter that is collected closes the stream.
        self._writer = writer
        self._closed = False
        self._receiving = False
        self._sending = False
        writer.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Return what has arrived, at most `max_bytes`."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        if self._closed:
            raise anyio.ClosedResourceError
        if self._receiving:
            raise anyio.BusyResourceError("receiving from")
        self._receiving = True
        try:
            data = await self._reader.read(max_bytes)
        except OSError as e:
            raise anyio.BrokenResourceError from e
        finally:
            self._receiving = False
        if self._closed:
            raise anyio.ClosedResourceError
        if not data:
            raise anyio.EndOfStream
        return data

    async def send(self, item: bytes) -> None:
        """Send all of `item`, waiting while the other end does not read."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        if self._closed:
            raise anyio.ClosedResourceError
        if self._sending:
            raise anyio.BusyResourceError("sending to")
        self._sending = True
        try:
            self._writer.write(item)
            await self._writer.drain()
        except OSError as e:
            raise anyio.BrokenResourceError from e
        finally:
            self._sending = False

    async def send_eof(self) -> None:
        """Refuse: it would tear down both directions."""
        raise NotImplementedError("streams between peers have no half-close")

    async def aclose(self) -> None:
        """Close both directions; what was sent is delivered if the other end takes it soon."""
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        with anyio.move_on_after(_CLOSE_S, shield=True) as scope:
            try:
                await self._writer.wait_closed()
            except OSError:
                return  # Gone already, which is what was wanted.
        if scope.cancelled_caught:
            self._writer.transport.abort()

    def abort(self) -> None:
        """Close at once; unsent data is lost."""
        self._closed = True
        self._writer.transport.abort()
