"""What p2pd and we say to each other, with p2pd's end in our hands."""

import socket

import anyio
import pytest
from google.protobuf.wrappers_pb2 import BytesValue

from echo_swarm.transport.daemon_messages import read_message, write_message
from echo_swarm.transport.hivemind_stream import HivemindStream

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def ends():
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    one, other = HivemindStream(ours), HivemindStream(theirs)
    yield one, other
    one.abort()
    other.abort()


@pytest.mark.parametrize("size", [0, 1, 125, 126, 200, 5000, 70_000])
async def test_a_message_is_read_and_not_a_byte_more(ends, size):
    one, other = ends
    await write_message(one, BytesValue(value=b"x" * size))
    await one.send(b"what follows")
    got = BytesValue()
    await read_message(other, got)
    assert got.value == b"x" * size
    assert await other.receive() == b"what follows"


async def test_a_message_that_comes_byte_by_byte_is_read(ends):
    one, other = ends
    body = BytesValue(value=b"y" * 300).SerializeToString()
    data = bytes((len(body) & 0x7F | 0x80, len(body) >> 7)) + body
    async with anyio.create_task_group() as tasks:

        async def drip():
            for byte in data:
                await one.send(bytes([byte]))
                await anyio.lowlevel.checkpoint()

        tasks.start_soon(drip)
        got = BytesValue()
        await read_message(other, got)
    assert got.value == b"y" * 300


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff\x7f", b"\xff\xff\x7f", b"\x80\x80\x80\x80\x00", b"\x03\x0a\x09x"])
async def test_what_is_no_message_is_refused(ends, data):
    one, other = ends
    await one.send(data)
    with pytest.raises(ValueError, match="message"):
        await read_message(other, BytesValue())
