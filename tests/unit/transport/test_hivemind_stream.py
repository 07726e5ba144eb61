"""The stream over p2pd's socket, with the other end in our hands. No helper process."""

import socket
from collections.abc import Iterator
from contextlib import suppress

import anyio
import pytest

from echo_swarm.transport.hivemind_stream import HivemindStream

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Ends:
    """A stream and the socket at its other end."""

    def __init__(self) -> None:
        ours, self.other = socket.socketpair(socket.AF_UNIX)
        self.other.setblocking(False)
        self.stream = HivemindStream(ours)


@pytest.fixture
async def ends() -> Iterator[Ends]:
    pair = Ends()
    yield pair
    pair.other.close()
    await pair.stream.aclose()


async def test_bytes_go_both_ways(ends: Ends) -> None:
    ends.other.send(b"hello")
    assert await ends.stream.receive() == b"hello"
    await ends.stream.send(b"well")
    await ends.stream.send(memoryview(b"come"))
    assert ends.other.recv(100) == b"wellcome"
    ends.other.send(b"abcdef")
    assert await ends.stream.receive(4) == b"abcd" and await ends.stream.receive(4) == b"ef"


async def test_a_buffer_is_asked_for_only_when_something_has_come(ends: Ends) -> None:
    buffer, asked = bytearray(10), 0

    def room() -> memoryview:
        nonlocal asked
        asked += 1
        return memoryview(buffer)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ends.stream.receive_into, room)
        await anyio.wait_all_tasks_blocked()
        assert asked == 0
        ends.other.send(b"xyz")
    assert asked == 1 and buffer.startswith(b"xyz")


async def test_a_cancelled_receiver_loses_nothing(ends: Ends) -> None:
    sent, got = b"", b""
    for number in range(300):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:

                async def receive() -> None:
                    nonlocal got
                    got += await ends.stream.receive(7)

                tasks.start_soon(receive)
                for _ in range(number % 4):
                    await anyio.lowlevel.checkpoint()
                piece = bytes([number % 256]) * (number % 11)
                ends.other.send(piece)
                sent += piece
                for _ in range(number % 5):
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
    ends.other.close()
    with suppress(anyio.EndOfStream):
        while True:
            got += await ends.stream.receive(7)
    assert got == sent


async def test_what_is_put_back_is_read_next(ends: Ends) -> None:
    ends.other.send(b"abcdef")
    got = await ends.stream.receive()
    ends.stream.unread(got[2:])
    ends.other.send(b"gh")
    assert await ends.stream.receive(3) == b"cde" and await ends.stream.receive() == b"f"
    assert await ends.stream.receive() == b"gh"


async def test_what_nobody_waits_for_stays_with_the_system(ends: Ends) -> None:
    ends.other.send(b"1")
    assert await ends.stream.receive() == b"1"
    ends.other.send(b"2")
    for _ in range(10):
        await anyio.lowlevel.checkpoint()
    assert not ends.stream._watched
    assert await ends.stream.receive() == b"2"


async def test_much_is_sent_whole_while_the_other_end_reads_slowly(ends: Ends) -> None:
    data = bytes(range(256)) * 20_000
    got = bytearray()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ends.stream.send, data)
        while len(got) < len(data):
            with suppress(BlockingIOError):
                got += ends.other.recv(10_000)
            await anyio.lowlevel.checkpoint()
    assert got == data


async def test_after_a_cancelled_send_no_more_is_sent(ends: Ends) -> None:
    with anyio.move_on_after(0.05) as scope:
        await ends.stream.send(bytes(50 << 20))
    assert scope.cancelled_caught
    with pytest.raises(anyio.BrokenResourceError):
        await ends.stream.send(b"more")


async def test_the_end_is_an_end_for_the_reader_and_an_error_for_the_writer(ends: Ends) -> None:
    ends.other.send(b"last")
    ends.other.close()
    assert await ends.stream.receive() == b"last"
    with pytest.raises(anyio.EndOfStream):
        await ends.stream.receive()
    with pytest.raises(anyio.BrokenResourceError):
        await ends.stream.send(b"x")


async def test_closing_wakes_who_waits(ends: Ends) -> None:
    ended: list[type[BaseException]] = []

    async def receive() -> None:
        try:
            await ends.stream.receive()
        except anyio.ClosedResourceError as e:
            ended.append(type(e))

    async def send() -> None:
        try:
            await ends.stream.send(bytes(50 << 20))
        except anyio.ClosedResourceError as e:
            ended.append(type(e))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(receive)
            tasks.start_soon(send)
            await anyio.wait_all_tasks_blocked()
            await ends.stream.aclose()
    assert ended == [anyio.ClosedResourceError] * 2
    with pytest.raises(anyio.ClosedResourceError):
        await ends.stream.receive()
    with pytest.raises(anyio.ClosedResourceError):
        await ends.stream.send(b"x")


async def test_what_was_sent_arrives_after_the_close(ends: Ends) -> None:
    await ends.stream.send(b"goodbye")
    await ends.stream.aclose()
    assert ends.other.recv(100) == b"goodbye" and ends.other.recv(100) == b""


async def test_two_at_a_time_are_refused(ends: Ends) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ends.stream.receive)
        tasks.start_soon(ends.stream.send, bytes(50 << 20))
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(anyio.BusyResourceError):
            await ends.stream.receive()
        with pytest.raises(anyio.BusyResourceError):
            await ends.stream.send(b"x")
        tasks.cancel_scope.cancel()


async def test_there_is_no_half_close(ends: Ends) -> None:
    with pytest.raises(NotImplementedError):
        await ends.stream.send_eof()
