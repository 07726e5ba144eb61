"""Frames on their way: in parts, in drips, into buffers that are used again."""

import struct
from collections.abc import Callable

import anyio
import pytest
from anyio.abc import ByteStream

from echo_swarm.codec import Limits
from echo_swarm.errors import MalformedMessage
from echo_swarm.transport import frames
from echo_swarm.transport.frames import APART_BYTES, FrameReader, Kind, Outbox, body_bytes, decode_frame, encode_frame

pytestmark = pytest.mark.anyio
LIMITS = Limits(max_bytes=4 << 20)


class Drip(ByteStream):
    """Gives what it is made with, so many bytes at a time; keeps what is sent."""

    def __init__(self, data: bytes = b"", at_once: int = 1 << 30) -> None:
        self.left = memoryview(data)
        self.at_once = at_once
        self.sent: list[bytes] = []
        self.rooms: list[int] = []

    async def receive(self, max_bytes: int = 65536) -> bytes:
        await anyio.lowlevel.checkpoint()
        if not self.left:
            raise anyio.EndOfStream
        size = min(max_bytes, self.at_once)
        chunk, self.left = bytes(self.left[:size]), self.left[size:]
        return chunk

    async def send(self, item: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        self.sent.append(bytes(item))

    async def send_eof(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        await anyio.lowlevel.checkpoint()


class Filling(Drip):
    """The same, straight into its reader's buffer."""

    async def receive_into(self, room: Callable[[], memoryview]) -> int:
        await anyio.lowlevel.checkpoint()
        if not self.left:
            raise anyio.EndOfStream
        buffer = room()
        self.rooms.append(len(buffer))
        size = min(len(buffer), self.at_once, len(self.left))
        buffer[:size], self.left = self.left[:size], self.left[size:]
        return size


def on_the_wire(*payloads: dict[str, object]) -> bytes:
    bodies = [b"".join(encode_frame(Kind.CALL, 7, "put", payload)) for payload in payloads]
    return b"".join(struct.pack("<I", len(body)) + body for body in bodies)


@pytest.mark.parametrize("size", [0, APART_BYTES - 1, APART_BYTES, APART_BYTES + 1, 1 << 20])
def test_a_frame_in_parts_is_the_frame(size: int) -> None:
    payload = {"first": [1, 2], "data": bytes(size)}
    body = encode_frame(Kind.ANSWER, 2**63 - 1, "", payload)
    whole = frames.codec.encode([1, 2**63 - 1, "", payload], canonical=False)
    assert b"".join(body) == whole and body_bytes(body) == len(whole)
    assert (len(body) == 2) == (size >= APART_BYTES)
    if size >= APART_BYTES:
        assert body[1] is payload["data"]  # Not a copy.
    assert decode_frame(memoryview(whole), LIMITS).payload == payload


def test_long_bytes_that_are_not_last_are_sent_all_the_same() -> None:
    payload = {"data": bytes(APART_BYTES), "last": ""}
    assert decode_frame(b"".join(encode_frame(Kind.CALL, 1, "put", payload)), LIMITS).payload == payload


async def test_what_an_outbox_writes_is_read_again_in_order() -> None:
    stream = Drip()
    outbox = Outbox(stream)
    payloads = [{"d": bytes([n]) * size} for n, size in enumerate([3, 700_000, 0, 70_000, 65_000, 1 << 20, 5])]
    written = []
    for n, payload in enumerate(payloads):
        outbox.put(encode_frame(Kind.CALL, n, "put", payload), lambda n=n: written.append(n))
    await outbox.drain()
    assert written == list(range(len(payloads)))
    assert max(map(len, stream.sent)) <= frames.WRITE_BYTES + 4 + 64
    data = b"".join(stream.sent)
    assert outbox.bytes_out == len(data)
    reader = FrameReader(Drip(data), LIMITS)
    assert [(await reader.receive()).payload for _ in payloads] == payloads


@pytest.mark.parametrize("kind", [Drip, Filling])
@pytest.mark.parametrize("at_once", [1 << 30, 65_537, 1000])
async def test_frames_of_any_size_are_read_however_they_come(kind: type[Drip], at_once: int) -> None:
    payloads = [{"d": bytes([n]) * size} for n, size in enumerate([1, 300_000, 2, 65_536, 100, 1_500_000, 9, 1_000])]
    stream = kind(on_the_wire(*payloads), at_once)
    reader = FrameReader(stream, LIMITS)
    assert [(await reader.receive()).payload for _ in payloads] == payloads
    assert reader.bytes_in == len(on_the_wire(*payloads)) and reader.frame_since is None
    with pytest.raises(anyio.EndOfStream):
        await reader.receive()


async def test_many_small_frames_come_with_one_reading() -> None:
    stream = Filling(on_the_wire(*[{"n": n} for n in range(500)]))
    reader = FrameReader(stream, LIMITS)
    assert [(await reader.receive()).payload["n"] for _ in range(500)] == list(range(500))
    assert len(stream.rooms) == 1


async def test_room_grows_with_what_has_come_and_not_with_what_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_spare", [])
    stream = Filling(struct.pack("<I", 4 << 20) + bytes(100_000), at_once=1000)
    reader = FrameReader(stream, LIMITS)
    with pytest.raises(anyio.EndOfStream):
        await reader.receive()
    assert len(reader._buffer) <= frames.READ_BYTES
    assert reader.frame_since is not None and reader.frame_bytes == 4 << 20


async def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    reader = FrameReader(Filling(struct.pack("<I", (4 << 20) + 1) + bytes(10)), LIMITS)
    with pytest.raises(MalformedMessage, match="limit"):
        await reader.receive()


async def test_between_frames_no_memory_is_held_and_long_buffers_are_used_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spare: list[bytearray] = []
    monkeypatch.setattr(frames, "_spare", spare)
    payloads = [{"d": bytes([n]) * 900_000} for n in range(6)]
    first = FrameReader(Filling(on_the_wire(*payloads), at_once=50_000), LIMITS)
    for payload in payloads:
        assert (await first.receive()).payload == payload
    assert first._buffer == b"" and len(spare) == 1
    (kept,) = spare
    second = FrameReader(Filling(on_the_wire(payloads[0])), LIMITS)
    assert (await second.receive()).payload == payloads[0] and spare[0] is kept
    # One as long as a run of pieces is kept, longer ones are not, and only so many.
    huge = FrameReader(Filling(on_the_wire({"d": bytes(3 << 20)})), LIMITS)
    await huge.receive()
    assert all(len(buffer) <= frames.SPARE_BYTES for buffer in spare)
    for _ in range(10):
        frames._put_aside(bytearray(frames.SPARE_BYTES))
    assert len(spare) == 4
