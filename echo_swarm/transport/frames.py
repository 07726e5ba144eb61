"""Frames of `rpc`: a little-endian 32-bit length, then a msgpack list [kind, call id, method or code, payload].

`FrameReader` bounds a frame by its length prefix before it reads the rest, and allocates only for bytes that came.
`Outbox` is the only writer of a stream: whoever wants something sent puts it there and can be cancelled at any time
without leaving half a frame on the wire.
"""

import itertools
import struct
from collections.abc import Awaitable, Callable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple, cast

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream

from echo_swarm import codec
from echo_swarm.codec import Limits
from echo_swarm.errors import MalformedMessage
from echo_swarm.transport.base import ReceivesInto

FIRST_BYTES = 1 << 16
"""Read at once while nothing is known of a frame: many small ones come in one system call."""
READ_BYTES = (1 << 18) + (1 << 12)
"""Made room for before more of a frame has come."""
WRITE_BYTES = 1 << 18
"""Small frames are joined up to this size; large ones are cut to it, so that progress can be seen."""
APART_BYTES = 1 << 16
"""Bytes of at least this length at the end of a payload are sent from where they lie."""
JOIN_BYTES = 1 << 17
"""A frame up to this size is copied into one write all the same: two writes cost everybody on its way more."""
FREE_BYTES = 512
"""Frames up to this size are read without asking for room."""
MAX_CALL_ID = 2**63 - 1

SPARE_BYTES = (1 << 20) + (1 << 12)
_MAX_SPARE = 4
_spare: list[bytearray] = []
"""Buffers of long frames, kept for the next ones of any stream: fresh memory costs more than what is put there."""

_LENGTH = struct.Struct("<I")
_NO_BYTES = b"\xc4\x00"
_BYTES = struct.Struct(">BI")
"""Msgpack's header of a binary of 64 KiB or more."""


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


Body = tuple[bytes, ...]
"""A frame in parts that are sent one after another: a very long one, which is the caller's own, is never copied."""


def encode_frame(kind: Kind, call_id: int, subject: str, payload: dict[str, Any]) -> Body:
    """Return the body of a frame; the length goes before it on the wire."""
    name = next(reversed(payload), None)
    last: object = None if name is None else payload[name]
    if not isinstance(last, bytes) or len(last) < APART_BYTES:
        return (codec.encode([int(kind), call_id, subject, payload], canonical=False),)
    head = codec.encode([int(kind), call_id, subject, {**payload, name: b""}], canonical=False)
    assert head.endswith(_NO_BYTES)
    return head.removesuffix(_NO_BYTES) + _BYTES.pack(0xC6, len(last)), last


def body_bytes(body: Body) -> int:
    """Return the length of a frame without its prefix."""
    return sum(map(len, body))


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
    """Reads frames off a stream. One task uses it; another may look at its times. Between frames it holds no memory."""

    def __init__(self, stream: ByteReceiveStream, limits: Limits) -> None:
        self._stream = stream
        self._into = stream if isinstance(stream, ReceivesInto) else None
        self._limits = limits
        self._buffer = bytearray()
        self._start = 0
        self._end = 0
        """What has come and is not read yet lies between these."""
        self._needed = 0
        self._lately = 0
        """Size of the last frame."""
        self.bytes_in = 0
        self.frame_bytes = 0
        """Size of the frame that is being read or was read last; 0 before its length is known."""
        self.received_at = anyio.current_time()
        """When the last byte came."""
        self.frame_since: float | None = None
        """When the frame that is being waited for began to arrive; None between frames."""
        self.admit: Callable[[int], Awaitable[None]] | None = None
        """Called with the size of a frame above FREE_BYTES; the rest of it is read when it returns."""

    async def receive(self) -> Frame:
        """Return the next frame.

        Raises:
            MalformedMessage: too large or not a frame. Nothing can be read after it.
            anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError: from the stream.

        """
        self.frame_bytes = 0
        await self._fill(_LENGTH.size)
        (length,) = _LENGTH.unpack_from(self._buffer, self._start)
        if length > self._limits.max_bytes:
            raise MalformedMessage(f"frame of {length} bytes, limit {self._limits.max_bytes}")
        self.frame_bytes = self._lately = length
        if self.admit is not None and length > FREE_BYTES:
            self.frame_since = None  # The wait is not the peer's fault.
            await self.admit(length)
            self.frame_since = anyio.current_time()
        await self._fill(_LENGTH.size + length)
        start = self._start + _LENGTH.size
        with memoryview(self._buffer) as view, view[start : start + length] as body:
            frame = decode_frame(body, self._limits)
        self._start = start + length
        if self._start == self._end:
            _put_aside(self._buffer)
            self._buffer, self._start, self._end = bytearray(), 0, 0
        self.frame_since = None
        return frame

    def drop(self) -> None:
        """Let go of what was read, at the end: whoever still refers to this reader must not keep its memory."""
        self._buffer, self._start, self._end = bytearray(), 0, 0
        self.admit = None

    async def _fill(self, needed: int) -> None:
        self._needed = needed
        if self._end > self._start and self.frame_since is None:
            self.frame_since = anyio.current_time()
        while self._end - self._start < needed:
            count = await self._receive()
            self.received_at = anyio.current_time()
            if self.frame_since is None:
                self.frame_since = self.received_at
            self.bytes_in += count
            self._end += count

    async def _receive(self) -> int:
        if self._into is not None:
            return await self._into.receive_into(self._room)
        chunk = await self._stream.receive(READ_BYTES)
        room = self._room(len(chunk))
        room[: len(chunk)] = chunk
        return len(chunk)

    def _room(self, least: int = 1) -> memoryview:
        """Return where to put what comes. It grows with what has come, not with what is announced."""
        held = self._end - self._start
        if len(self._buffer) - self._end < least or len(self._buffer) - self._start < self._needed:
            size = max(FIRST_BYTES, min(self._needed, max(READ_BYTES, 2 * held)), held + least)
            if size > len(self._buffer) or self._start:
                # What was long lately is likely to be long again.
                larger = _buffer_of(size, spare=max(self._needed, self._lately) > FIRST_BYTES)
                larger[:held] = memoryview(self._buffer)[self._start : self._end]
                self._buffer, self._start, self._end = larger, 0, held
        return memoryview(self._buffer)[self._end :]


def _buffer_of(size: int, *, spare: bool) -> bytearray:
    while spare and _spare:
        if len(buffer := _spare.pop()) >= size:
            return buffer
    return bytearray(size)


def _put_aside(buffer: bytearray) -> None:
    if FIRST_BYTES < len(buffer) <= SPARE_BYTES and len(_spare) < _MAX_SPARE:
        _spare.append(buffer)


class Outbox:
    """Frames waiting to be written, in order. Its users bound how many they put in."""

    def __init__(self, stream: ByteSendStream) -> None:
        self._stream = stream
        self._queue: dict[int, tuple[Body, Callable[[], None] | None]] = {}
        self._tokens = itertools.count()
        self._ready = anyio.Event()
        self.bytes_out = 0
        self.sent_at = anyio.current_time()
        """When the last write ended."""
        self.write_since: float | None = None
        """Since when the write that is going on makes no progress; None while there is nothing to write."""

    def put(self, body: Body, done: Callable[[], None] | None = None) -> int:
        """Queue a frame. `done` is called once it is written. Returns a token for `discard`."""
        token = next(self._tokens)
        self._queue[token] = (body, done)
        self._ready.set()
        return token

    def discard(self, token: int) -> None:
        """Take a frame back if its writing has not begun."""
        self._queue.pop(token, None)

    def drop(self) -> None:
        """Let go of what was not written, at the end."""
        self._queue.clear()

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
                # Any buffer will do for a stream, whatever its type says.
                await self._stream.send(cast("bytes", part))
                self.bytes_out += len(part)
            self.write_since = None
            self.sent_at = anyio.current_time()
            for done in callbacks:
                done()

    def _take(self) -> tuple[list[bytes | memoryview], list[Callable[[], None]]]:
        """Return either many small frames joined into one write, or one large frame cut into several."""
        small: list[bytes] = []
        callbacks: list[Callable[[], None]] = []
        size = 0
        while self._queue and size < WRITE_BYTES:
            token = next(iter(self._queue))
            body, done = self._queue[token]
            length = body_bytes(body)
            if length > APART_BYTES and small:
                break
            del self._queue[token]
            if done is not None:
                callbacks.append(done)
            if length > JOIN_BYTES:
                return [_LENGTH.pack(length) + body[0][:WRITE_BYTES], *_cut(body)], callbacks
            small += (_LENGTH.pack(length), *body)
            size += length
        return [b"".join(small)], callbacks


def _cut(body: Body) -> Iterator[memoryview]:
    """Yield what follows the first WRITE_BYTES of the first part."""
    for skipped, part in zip((WRITE_BYTES, *[0] * len(body)), body, strict=False):
        view = memoryview(part)
        for start in range(skipped, len(part), WRITE_BYTES):
            yield view[start : start + WRITE_BYTES]
