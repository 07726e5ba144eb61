"""Streams of `memory`: two bounded pipes, with faults."""

import itertools
import random
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream

from echo_swarm.codec import Limits
from echo_swarm.transport.frames import MAX_CALL_ID, Kind, decode_frame, encode_frame

BUFFER_BYTES = 128 * 1024
"""What a pipe holds before its sender waits."""
_CHUNK_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What happens to one stream."""

    break_after_bytes: int | None
    """Both directions together; None: never."""
    delay_s: float
    draw: random.Random
    sleep: Callable[[float], Awaitable[None]]
    now: Callable[[], float]


class _Pipe:
    """One direction."""

    def __init__(self) -> None:
        self.chunks: deque[tuple[float, bytes]] = deque()
        """(time of arrival, bytes)."""
        self.size = 0
        self.ended = False
        self.stalled = False
        self._changed = anyio.Event()

    async def wait(self) -> None:
        """Wait for any change."""
        await self._changed.wait()

    def changed(self) -> None:
        """Wake whoever waits."""
        self._changed.set()
        self._changed = anyio.Event()


class MemoryStream(ByteStream):
    """One end."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe, faults: Faults, shared: "_Shared") -> None:
        self._in = incoming
        self._out = outgoing
        self._faults = faults
        self._shared = shared
        self._closed = False
        self._receiving = False

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Return what has arrived, at most `max_bytes`. A lost stream ends like a closed one."""
        await anyio.lowlevel.checkpoint()
        if self._receiving:
            raise anyio.BusyResourceError("receiving from")
        self._receiving = True
        try:
            while True:
                if self._closed:
                    raise anyio.ClosedResourceError
                if self._in.chunks and not self._in.stalled:
                    late_s = self._in.chunks[0][0] - self._faults.now()
                    if late_s <= 0:
                        return self._take(max_bytes)
                    await self._faults.sleep(late_s)
                elif self._in.ended and not self._in.chunks:
                    raise anyio.EndOfStream
                else:
                    await self._in.wait()
        finally:
            self._receiving = False

    async def send(self, item: bytes) -> None:
        """Send all of `item`, waiting while the other end does not read."""
        await anyio.lowlevel.checkpoint()
        for start in range(0, len(item), _CHUNK_BYTES):
            while self._out.size >= BUFFER_BYTES and not (self._closed or self._out.ended):
                await self._out.wait()
            if self._closed:
                raise anyio.ClosedResourceError
            if self._out.ended:
                raise anyio.BrokenResourceError
            self._put(bytes(item[start : start + _CHUNK_BYTES]))

    async def send_eof(self) -> None:
        """Refuse: real streams have no half-close."""
        raise NotImplementedError("streams between peers have no half-close")

    async def aclose(self) -> None:
        """Close both directions. What was sent before can still be read by the other end."""
        self._closed = True
        for pipe in (self._in, self._out):
            pipe.ended = True
            pipe.changed()
        self._shared.on_close()
        await anyio.lowlevel.checkpoint()

    def break_now(self) -> None:
        """Lose the stream, with what is under way."""
        for pipe in (self._in, self._out):
            pipe.chunks.clear()
            pipe.size = 0
            pipe.ended = True
            pipe.changed()
        self._shared.on_close()

    def stall(self) -> None:
        """Hold back all that arrives here from now on."""
        self._in.stalled = True

    def resume(self) -> None:
        """Let through what was held back."""
        self._in.stalled = False
        self._in.changed()

    def _take(self, max_bytes: int) -> bytes:
        at, chunk = self._in.chunks.popleft()
        if len(chunk) > max_bytes:
            self._in.chunks.appendleft((at, chunk[max_bytes:]))
            chunk = chunk[:max_bytes]
        self._in.size -= len(chunk)
        self._in.changed()
        return chunk

    def _put(self, chunk: bytes) -> None:
        limit = self._faults.break_after_bytes
        self._shared.bytes_carried += len(chunk)
        if limit is not None and self._shared.bytes_carried > limit:
            self.break_now()
            raise anyio.BrokenResourceError
        arrives_at = self._faults.now()
        if self._faults.delay_s:
            arrives_at += self._faults.delay_s * self._faults.draw.uniform(0.5, 1.5)
            if self._out.chunks:
                arrives_at = max(arrives_at, self._out.chunks[-1][0])
        self._out.chunks.append((arrives_at, chunk))
        self._out.size += len(chunk)
        self._out.changed()


class _Shared:
    """What both ends of a stream have in common."""

    def __init__(self, on_close: Callable[[], None]) -> None:
        self.on_close = on_close
        self.bytes_carried = 0


def stream_pair(faults: Faults, *, on_close: Callable[[], None]) -> tuple[MemoryStream, MemoryStream]:
    """Return two connected ends. `on_close` is called, perhaps twice, when the stream ends."""
    forth, back = _Pipe(), _Pipe()
    shared = _Shared(on_close)
    return MemoryStream(back, forth, faults, shared), MemoryStream(forth, back, faults, shared)


class CallDuplicator(ByteStream):
    """Sends some `rpc` calls a second time, as a network or a hasty client would: the peer must handle both.

    The copy has a call id that the caller does not know, so that it ignores the second answer.
    """

    def __init__(self, stream: ByteStream, draw: random.Random, share: float) -> None:
        self._stream = stream
        self._draw = draw
        self._share = share
        self._pending = bytearray()
        self._ids = itertools.count(MAX_CALL_ID, -1)

    async def send(self, item: bytes) -> None:
        """Send `item`, and after each call that it completes perhaps a copy."""
        self._pending += item
        while len(self._pending) >= 4:
            (length,) = struct.unpack_from("<I", self._pending)
            if len(self._pending) < 4 + length:
                return
            body = bytes(self._pending[4 : 4 + length])
            del self._pending[: 4 + length]
            await self._stream.send(struct.pack("<I", length) + body)
            frame = decode_frame(body, Limits(max_bytes=length))
            if frame.kind is Kind.CALL and self._draw.random() < self._share:
                copy = b"".join(encode_frame(Kind.CALL, next(self._ids), frame.subject, frame.payload))
                await self._stream.send(struct.pack("<I", len(copy)) + copy)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Pass on."""
        return await self._stream.receive(max_bytes)

    async def send_eof(self) -> None:
        """Refuse: real streams have no half-close."""
        await self._stream.send_eof()

    async def aclose(self) -> None:
        """Pass on."""
        await self._stream.aclose()
