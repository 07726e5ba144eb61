"""An anyio byte stream over the socket that connects us with p2pd. Needs asyncio, not hivemind.

Bytes go from the system straight into the buffer of whoever waits for them, and from the sender's buffer straight to
the system: versions pass through here, and asyncio's own streams copy each byte three times.

Measured: a clean close, a lost peer and a dead helper all look the same to a reader, the plain end; only a later
write fails. There is no half-close: ending one direction tears down both.
"""

import asyncio
import contextlib
import socket

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream

from echo_swarm.transport.base import GiveBuffer

SEND_BUFFER_BYTES = 1 << 19
"""Asked of the system, which may give less: fewer turns for the same bytes."""


class HivemindStream(ByteStream):
    """One open stream. Receiving may be cancelled without loss; after a cancelled `send` nothing more is sent.

    Args:
        connection: a connected Unix socket; the stream owns it.

    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._watched = False
        """Whether the loop tells us when there is something to read."""
        self._give_buffer: GiveBuffer = lambda: memoryview(b"")
        self._filled = memoryview(b"")
        self._came: asyncio.Future[int] | None = None
        """Of the receiver that waits: how many bytes were put into its buffer."""
        self._returned = b""
        """Came for a receiver that was cancelled, or was put back."""
        self._drained: asyncio.Future[None] | None = None
        """Of the sender that waits."""
        self._torn = False
        """Whether the bytes sent so far end in the middle of what somebody wanted to send."""

    @classmethod
    async def connect(cls, path: str) -> "HivemindStream":
        """Open a connection to a Unix socket. Raises OSError."""
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, path)
        except BaseException:
            connection.close()
            raise
        return cls(connection)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Return what has arrived, at most `max_bytes`."""
        buffer = memoryview(bytearray(max_bytes))
        return bytes(buffer[: await self.receive_into(lambda: buffer)])

    async def receive_into(self, give_buffer: GiveBuffer) -> int:
        """Ask for a buffer once something has arrived, put that there, and return how many bytes it was.

        As `receive` otherwise. Who waits for long need not hold a buffer.
        """
        if self._closed:
            raise anyio.ClosedResourceError
        if self._came is not None:
            raise anyio.BusyResourceError("receiving from")
        if self._returned:
            await anyio.lowlevel.checkpoint_if_cancelled()
            count = self._take_returned(give_buffer())
        else:
            count = await self._wait(give_buffer)
        if not count:
            raise anyio.EndOfStream
        return count

    def unread(self, data: bytes) -> None:
        """Put back what was received and is the next reader's."""
        self._returned = data + self._returned

    def _take_returned(self, buffer: memoryview) -> int:
        count = min(len(buffer), len(self._returned))
        buffer[:count], self._returned = self._returned[:count], self._returned[count:]
        return count

    async def _wait(self, give_buffer: GiveBuffer) -> int:
        self._give_buffer, self._came = give_buffer, self._loop.create_future()
        if not self._watched:
            self._watched = True
            self._loop.add_reader(self._socket, self._on_readable)
        try:
            return await self._came
        except asyncio.CancelledError:
            if self._came.done() and not self._came.cancelled() and self._came.exception() is None:
                self._returned = bytes(self._filled[: self._came.result()])
            raise
        except OSError as e:
            raise anyio.BrokenResourceError from e
        finally:
            self._came, self._filled = None, memoryview(b"")

    def _on_readable(self) -> None:
        if self._came is None or self._came.done():
            # Nobody waits: the system keeps it, and p2pd waits once that is much.
            self._watched = False
            self._loop.remove_reader(self._socket)
            return
        self._filled = self._give_buffer()
        try:
            self._came.set_result(self._socket.recv_into(self._filled))
        except BlockingIOError:
            return
        except OSError as e:
            self._came.set_exception(e)

    async def send(self, item: bytes | memoryview) -> None:
        """Send all of `item`, waiting while the other end does not read; no checkpoint when it need not wait."""
        if self._drained is not None:
            raise anyio.BusyResourceError("sending to")
        if self._torn and not self._closed:
            raise anyio.BrokenResourceError
        rest = memoryview(item)
        self._torn = True
        while rest:
            if self._closed:
                raise anyio.ClosedResourceError
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                await self._wait_for_room()
            except OSError as e:
                raise anyio.BrokenResourceError from e
        self._torn = False

    async def _wait_for_room(self) -> None:
        self._drained = self._loop.create_future()
        self._loop.add_writer(self._socket, self._on_writable)
        try:
            await self._drained
        finally:
            self._drained = None
            if not self._closed:
                self._loop.remove_writer(self._socket)

    def _on_writable(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    async def send_eof(self) -> None:
        """Refuse: it would tear down both directions."""
        raise NotImplementedError("streams between peers have no half-close")

    async def aclose(self) -> None:
        """Close both directions; the other end can still read what was sent."""
        self.abort()
        await anyio.lowlevel.checkpoint()

    def abort(self) -> None:
        """The same, at once."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        if self._came is not None and not self._came.done():
            self._came.set_exception(anyio.ClosedResourceError())
        self._on_writable()
