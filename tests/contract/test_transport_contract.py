"""What every host promises, run on each implementation."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream

from echo_swarm.errors import PeerUnreachable
from echo_swarm.identity import Identity, PeerId
from echo_swarm.transport.base import Host
from echo_swarm.transport.hivemind import open_hivemind_host
from echo_swarm.transport.memory import MemoryNetwork

ECHO = "/test/echo/1"
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
NO_ADDRESSES = ("", "x", "/p2p/", "/ip4/127.0.0.1/tcp/1", "/ip4/999.1.1.1/tcp/1/p2p/x", "/p2p/" + "z" * 600)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trio:
    """Two hosts that can be dialled, and one that cannot."""

    a: Host
    b: Host
    outbound: Host


@asynccontextmanager
async def memory_hosts() -> AsyncGenerator[Trio]:
    network = MemoryNetwork()
    async with (
        network.host(Identity.generate()) as a,
        network.host(Identity.generate()) as b,
        network.host(Identity.generate(), outbound_only=True) as outbound,
    ):
        yield Trio(a=a, b=b, outbound=outbound)


@asynccontextmanager
async def hivemind_hosts() -> AsyncGenerator[Trio]:
    async with (
        open_hivemind_host(Identity.generate(), listen=LOOPBACK, many_peers=True) as a,
        open_hivemind_host(Identity.generate(), listen=LOOPBACK) as b,
        open_hivemind_host(Identity.generate(), listen=()) as outbound,
    ):
        yield Trio(a=a, b=b, outbound=outbound)


CASES: dict[str, tuple[str, Callable[[], AbstractAsyncContextManager[Trio]]]] = {
    "memory-asyncio": ("asyncio", memory_hosts),
    "memory-trio": ("trio", memory_hosts),
    "hivemind-asyncio": ("asyncio", hivemind_hosts),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def anyio_backend(case: str) -> str:
    return CASES[case][0]


@pytest.fixture(scope="module")
async def hosts(case: str, anyio_backend: str) -> AsyncGenerator[Trio]:
    async with CASES[case][1]() as trio:
        await trio.a.serve(ECHO, echo)
        yield trio


pytestmark = pytest.mark.anyio


async def echo(stream: ByteStream, _peer: PeerId) -> None:
    while True:
        await stream.send(await stream.receive())


async def read_to_end(stream: ByteStream) -> bytes:
    received = b""
    with anyio.fail_after(120):
        try:
            while True:
                received += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return received


async def dial(source: Host, target: Host) -> PeerId:
    return await source.connect(target.addresses[0], timeout_s=10)


async def test_a_host_has_addresses_that_end_in_its_peer_id_unless_outbound_only(hosts: Trio) -> None:
    assert hosts.a.addresses
    assert all(address.endswith(f"/p2p/{hosts.a.peer_id}") for address in hosts.a.addresses)
    assert hosts.outbound.addresses == ()


async def test_dialling_returns_the_peer_and_streams_carry_bytes_both_ways(hosts: Trio) -> None:
    assert await dial(hosts.b, hosts.a) == hosts.a.peer_id
    async with await hosts.b.open_stream(hosts.a.peer_id, ECHO, timeout_s=10) as stream:
        for size in (1, 1000, 3_000_000):
            data = bytes(range(256)) * (size // 256 + 1)
            received = b""
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stream.send, data)
                reader = BufferedByteReceiveStream(stream)
                with anyio.fail_after(120):
                    received = await reader.receive_exactly(len(data))
            assert received == data


async def test_a_handler_is_told_who_called(hosts: Trio) -> None:
    async def tell(stream: ByteStream, peer: PeerId) -> None:
        await stream.send(peer.encode())

    await hosts.a.serve("/test/who", tell)
    await dial(hosts.b, hosts.a)
    async with await hosts.b.open_stream(hosts.a.peer_id, "/test/who", timeout_s=10) as stream:
        assert await read_to_end(stream) == hosts.b.peer_id.encode()


async def test_a_peer_that_cannot_be_dialled_is_reached_over_the_connection_it_opened(hosts: Trio) -> None:
    await hosts.outbound.serve(ECHO, echo)
    await dial(hosts.outbound, hosts.a)
    async with await hosts.a.open_stream(hosts.outbound.peer_id, ECHO, timeout_s=10) as stream:
        await stream.send(b"hello")
        with anyio.fail_after(120):
            assert await stream.receive() == b"hello"


async def test_many_streams_at_once_do_not_mix(hosts: Trio) -> None:
    await dial(hosts.b, hosts.a)

    async def check(i: int) -> None:
        async with await hosts.b.open_stream(hosts.a.peer_id, ECHO, timeout_s=20) as stream:
            await stream.send(b"%04d" % i)
            reader = BufferedByteReceiveStream(stream)
            with anyio.fail_after(120):
                assert await reader.receive_exactly(4) == b"%04d" % i

    async with anyio.create_task_group() as tasks:
        for i in range(100):
            tasks.start_soon(check, i)


async def test_closing_one_end_ends_the_other_after_what_was_sent(hosts: Trio) -> None:
    async def say_goodbye(stream: ByteStream, _peer: PeerId) -> None:
        await stream.send(b"x" * 100_000)

    await hosts.a.serve("/test/bye", say_goodbye)
    await dial(hosts.b, hosts.a)
    async with await hosts.b.open_stream(hosts.a.peer_id, "/test/bye", timeout_s=10) as stream:
        assert len(await read_to_end(stream)) == 100_000


async def test_a_receive_may_be_cancelled_without_losing_bytes(hosts: Trio) -> None:
    gate = anyio.Event()

    async def later(stream: ByteStream, _peer: PeerId) -> None:
        await gate.wait()
        await stream.send(b"whole")

    await hosts.a.serve("/test/later", later)
    await dial(hosts.b, hosts.a)
    async with await hosts.b.open_stream(hosts.a.peer_id, "/test/later", timeout_s=10) as stream:
        for _ in range(20):
            with anyio.move_on_after(0):
                await stream.receive()
        gate.set()
        assert await read_to_end(stream) == b"whole"


async def test_a_sender_waits_while_the_other_end_does_not_read(hosts: Trio) -> None:
    gate = anyio.Event()
    counted: list[int] = []

    async def read_later(stream: ByteStream, _peer: PeerId) -> None:
        await gate.wait()
        counted.append(len(await read_to_end(stream)))
        done.set()

    done = anyio.Event()
    await hosts.a.serve("/test/slow", read_later)
    await dial(hosts.b, hosts.a)
    sent = 0
    async with await hosts.b.open_stream(hosts.a.peer_id, "/test/slow", timeout_s=10) as stream:
        with anyio.move_on_after(0.5):
            while sent < 64 << 20:
                await stream.send(b"x" * 65_536)
                sent += 65_536
        assert sent < 64 << 20
        gate.set()
    with anyio.fail_after(120):
        await done.wait()
    assert counted[0] >= sent


async def test_there_is_no_half_close(hosts: Trio) -> None:
    await dial(hosts.b, hosts.a)
    async with await hosts.b.open_stream(hosts.a.peer_id, ECHO, timeout_s=10) as stream:
        with pytest.raises(NotImplementedError):
            await stream.send_eof()


async def test_a_closed_stream_says_so(hosts: Trio) -> None:
    await dial(hosts.b, hosts.a)
    stream = await hosts.b.open_stream(hosts.a.peer_id, ECHO, timeout_s=10)
    await stream.aclose()
    await stream.aclose()
    with pytest.raises(anyio.ClosedResourceError):
        await stream.receive()
    with pytest.raises(anyio.ClosedResourceError):
        await stream.send(b"x")


async def test_a_handler_that_raises_ends_its_stream_and_nothing_else(
    hosts: Trio, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(stream: ByteStream, _peer: PeerId) -> None:
        raise ZeroDivisionError("a bug")

    await hosts.a.serve("/test/fail", fail)
    await dial(hosts.b, hosts.a)
    async with await hosts.b.open_stream(hosts.a.peer_id, "/test/fail", timeout_s=10) as stream:
        assert await read_to_end(stream) == b""
    async with await hosts.b.open_stream(hosts.a.peer_id, ECHO, timeout_s=10) as stream:
        await stream.send(b"still here")
        with anyio.fail_after(120):
            assert await stream.receive() == b"still here"
    assert "a bug" in caplog.text


async def test_an_unknown_peer_cannot_be_reached(hosts: Trio) -> None:
    with pytest.raises(PeerUnreachable, match="no address known"):
        await hosts.b.open_stream(Identity.generate().peer_id, ECHO, timeout_s=10)


async def test_an_unserved_protocol_cannot_be_opened(hosts: Trio) -> None:
    await dial(hosts.b, hosts.a)
    with pytest.raises(PeerUnreachable, match="not supported"):
        await hosts.b.open_stream(hosts.a.peer_id, "/test/nobody-serves-this", timeout_s=10)


async def test_an_address_where_another_peer_lives_is_refused(hosts: Trio) -> None:
    where = hosts.a.addresses[0].removesuffix(hosts.a.peer_id)
    with pytest.raises(PeerUnreachable):
        await hosts.b.connect(where + Identity.generate().peer_id, timeout_s=10)


@pytest.mark.parametrize("address", NO_ADDRESSES)
async def test_what_is_no_address_is_refused(hosts: Trio, address: str) -> None:
    with pytest.raises(PeerUnreachable):
        await hosts.b.connect(address, timeout_s=10)
