"""Frames of `rpc`: a little-endian 32-bit length, then a msgpack list [kind, call id, method or code, payload].

`FrameReader` bounds a frame by its length prefix before it reads the rest, and allocates only for bytes that came.
`Outbox` is the only writer of a stream: whoever wants something sent puts it there and can be cancelled at any time
without leaving half a frame on the wire.
"""

import itertools
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple, cast

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream

from echo_swarm import codec
from echo_swarm.codec import Limits
from echo_swarm.errors import MalformedMessage

READ_BYTES = 1 << 18
"""Asked for at once: many small frames come in one system call."""
WRITE_BYTES = 1 << 18
"""Small frames are joined up to this size; large ones are cut to it, so that progress can be seen."""
MAX_CALL_ID = 2**63 - 1

_LENGTH = struct.Struct("<I")


class Kind(IntEnum):
    """What a frame is."""

    CALL = 0
    ANSWER = 1
    ERROR = 2
    """Its subject is a code, its payload {"message": text}. With call id 0 it speaks of the whole stream."""
    PING = 3
    PONG = 4


class Frame(NamedTuple):
    """A decoded frame."""

    kind: Kind
    call_id: int
    subject: str
    """The method of a call, the code of an error, else empty."""
    payload: dict[str, Any]


def encode_frame(kind: Kind, call_id: int, subject: str, payload: dict[str, Any]) -> bytes:
    """Return the body of a frame; the length goes before it on the wire."""
    return codec.encode([int(kind), call_id, subject, payload], canonical=False)


def decode_frame(body: bytes | memoryview, limits: Limits) -> Frame:
    """Inverse of `encode_frame`. Raises MalformedMessage for anything else."""
    value = codec.decode(body, limits, canonical=False)
    if not isinstance(value, list) or len(cast("list[object]", value)) != 4:
        raise MalformedMessage("frame is no list of four")
    kind, call_id, subject, payload = cast("list[object]", value)
    if type(kind) is not int or not 0 <= kind <= Kind.PONG:
        raise MalformedMessage("frame of unknown kind")
    if type(call_id) is not int or not 0 <= call_id <= MAX_CALL_ID:
        raise MalformedMessage("frame without a call id")
    if not isinstance(subject, str) or len(subject) > 64 or not isinstance(payload, dict):
        raise MalformedMessage("frame without a method or payload")
    return Frame(Kind(kind), call_id, subject, cast("dict[str, Any]", payload))


class FrameReader:
    """Reads frames off a stream. One task uses it; another may look at its times."""

    def __init__(self, stream: ByteReceiveStream, limits: Limits) -> None:
        self._stream = stream
        self._limits = limits
        self._buffer = bytearray()
        self._at = 0
        self.bytes_in = 0
        self.frame_bytes = 0
        """Size of the frame that is being read or was read last; 0 before its length is known."""
        self.received_at = anyio.current_time()
        """When the last byte came."""
        self.frame_since: float | None = None
        """When the frame that is being waited for began to arrive; None between frames."""

    async def receive(self) -> Frame:
        """Return the next frame.

        Raises:
            MalformedMessage: too large or not a frame. Nothing can be read after it.
            anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError: from the stream.

        """
        self.frame_bytes = 0
        await self._fill(_LENGTH.size)
        (length,) = _LENGTH.unpack_from(self._buffer, self._at)
        if length > self._limits.max_bytes:
            raise MalformedMessage(f"frame of {length} bytes, limit {self._limits.max_bytes}")
        self.frame_bytes = length
        await self._fill(_LENGTH.size + length)
        start = self._at + _LENGTH.size
        with memoryview(self._buffer) as view, view[start : start + length] as body:
            frame = decode_frame(body, self._limits)
        self._at = start + length
        self.frame_since = None
        return frame

    async def _fill(self, needed: int) -> None:
        if len(self._buffer) - self._at >= needed:
            return
        del self._buffer[: self._at]
        self._at = 0
        if self._buffer and self.frame_since is None:
            self.frame_since = anyio.current_time()
        while len(self._buffer) < needed:
            chunk = await self._stream.receive(READ_BYTES)
            self.received_at = anyio.current_time()
            if self.frame_since is None:
                self.frame_since = self.received_at
            self.bytes_in += len(chunk)
            self._buffer += chunk


class Outbox:
    """Frames waiting to be written, in order. Its users bound how many they put in."""

    def __init__(self, stream: ByteSendStream) -> None:
        self._stream = stream
        self._queue: dict[int, tuple[bytes, Callable[[], None] | None]] = {}
        self._tokens = itertools.count()
        self._ready = anyio.Event()
        self.bytes_out = 0
        self.sent_at = anyio.current_time()
        """When the last write ended."""
        self.write_since: float | None = None
        """Since when the write that is going on makes no progress; None while there is nothing to write."""

    def put(self, body: bytes, done: Callable[[], None] | None = None) -> int:
        """Queue a frame. `done` is called once it is written. Returns a token for `discard`."""
        token = next(self._tokens)
        self._queue[token] = (body, done)
        self._ready.set()
        return token

    def discard(self, token: int) -> None:
        """Take a frame back if its writing has not begun."""
        self._queue.pop(token, None)

    async def pump(self) -> None:
        """Write what is put in, for ever. Raises what the stream raises."""
        while True:
            if not self._queue:
                self._ready = anyio.Event()
                await self._ready.wait()
                continue
            await self.drain()

    async def drain(self) -> None:
        """Write what is in it now. Raises what the stream raises."""
        while self._queue:
            parts, callbacks = self._take()
            for part in parts:
                self.write_since = anyio.current_time()
                await self._stream.send(part)
                self.bytes_out += len(part)
            self.write_since = None
            self.sent_at = anyio.current_time()
            for done in callbacks:
                done()

    def _take(self) -> tuple[list[bytes], list[Callable[[], None]]]:
        """Return either many small frames joined into one write, or one large frame cut into several."""
        small: list[bytes] = []
        callbacks: list[Callable[[], None]] = []
        size = 0
        while self._queue and size < WRITE_BYTES:
            token = next(iter(self._queue))
            body, done = self._queue[token]
            if len(body) > WRITE_BYTES and small:
                break
            del self._queue[token]
            if done is not None:
                callbacks.append(done)
            if len(body) > WRITE_BYTES:
                return [_LENGTH.pack(len(body)), *_cut(body)], callbacks
            small += (_LENGTH.pack(len(body)), body)
            size += len(body)
        return [b"".join(small)], callbacks


def _cut(body: bytes) -> list[bytes]:
    return [body[start : start + WRITE_BYTES] for start in range(0, len(body), WRITE_BYTES)]
