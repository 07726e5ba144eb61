"""Attacks over real sockets: who drips, holds half open, floods or does not read is cut off, and the next is served.

The same attacks without sockets, one by one, are in `tests/unit/transport/test_rpc.py`; here a hivemind host with its
daemon stands on a TCP port, and an honest peer asks all the time while the attack goes on.
"""

import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import anyio
import pytest
from anyio.abc import ByteStream

from echo_swarm.errors import EchoError
from echo_swarm.identity import Identity, PeerId
from echo_swarm.transport.frames import Body, Kind, encode_frame
from echo_swarm.transport.hivemind import HivemindHost, open_hivemind_host
from echo_swarm.transport.rpc import RpcClient, RpcServer
from tests.swarm.support.node_harness import until

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
PROTOCOL = "/test/1"
LARGEST = 1 << 16
PER_PEER = 4 * LARGEST
GONE = (anyio.BrokenResourceError, anyio.EndOfStream, anyio.ClosedResourceError)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Siege:
    """A server, an honest peer, and a hostile one."""

    def __init__(self, host: HivemindHost, honest: HivemindHost, hostile: HivemindHost, **settings: Any) -> None:
        self.host, self.honest, self.hostile = host, honest, hostile
        self.holding = 0
        self.most_held = 0
        self.server = RpcServer(
            host,
            PROTOCOL,
            max_request_bytes=LARGEST,
            max_bytes_in_flight_per_peer=PER_PEER,
            max_streams_per_peer=4,
            max_streams=16,
            idle_timeout_s=1.5,
            frame_timeout_s=1.0,
            settled_s=0.0,
            **settings,
        )
        self.server.method("echo", self._echo)
        self.server.method("hold", self._hold)

    async def _echo(self, _peer: PeerId, payload: dict[str, Any]) -> dict[str, Any]:
        return payload

    async def _hold(self, _peer: PeerId, payload: dict[str, Any]) -> dict[str, Any]:
        size = len(payload["data"])
        self.holding += size
        self.most_held = max(self.most_held, self.holding)
        try:
            await anyio.sleep(0.05)
        finally:
            self.holding -= size  # Also when its stream ends, and the next one has room.
        return {}

    @asynccontextmanager
    async def stream(self) -> AsyncGenerator[ByteStream]:
        stream = await self.hostile.open_stream(self.host.peer_id, PROTOCOL, timeout_s=20)
        try:
            yield stream
        finally:
            with anyio.CancelScope(shield=True), suppress(*GONE):
                await stream.aclose()

    async def honest_is_served(self, times: int = 5) -> None:
        async with RpcClient(self.honest, self.host.peer_id, PROTOCOL, max_reply_bytes=LARGEST) as client:
            for n in range(times):
                assert await client.call("echo", {"n": n}, timeout_s=20) == {"n": n}


@asynccontextmanager
async def siege(**settings: Any) -> AsyncGenerator[Siege]:
    async with (
        open_hivemind_host(Identity.generate(), listen=LOOPBACK, many_peers=True) as host,
        open_hivemind_host(Identity.generate(), listen=(), bootstrap=host.addresses) as honest,
        open_hivemind_host(Identity.generate(), listen=(), bootstrap=host.addresses) as hostile,
    ):
        made = Siege(host, honest, hostile, **settings)
        with anyio.fail_after(150):
            async with made.server:
                yield made


def framed(parts: Body) -> bytes:
    body = b"".join(parts)
    return struct.pack("<I", len(body)) + body


async def until_cut_off(stream: ByteStream, chunk: bytes = b"", pause_s: float = 0.1) -> None:
    """Send a little again and again, or nothing, until the other side ends the stream."""
    with suppress(*GONE):
        async with anyio.create_task_group() as both:

            async def read() -> None:
                with suppress(*GONE):
                    while True:
                        await stream.receive()
                both.cancel_scope.cancel()

            both.start_soon(read)
            while True:
                await anyio.sleep(pause_s)
                if chunk:
                    await stream.send(chunk)


async def test_streams_that_drip_or_stay_half_open_are_cut_off_and_the_next_message_is_served() -> None:
    async with siege() as made:
        async with made.stream() as drip, made.stream() as silent, made.stream() as cut:
            await drip.send(struct.pack("<I", 1000))
            await cut.send(framed(encode_frame(Kind.CALL, 1, "echo", {"data": b"x" * 1000}))[:200])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(until_cut_off, drip, b"x")
                tasks.start_soon(until_cut_off, silent)
                tasks.start_soon(until_cut_off, cut)
                await made.honest_is_served()
        await until(lambda: made.server.stream_count <= 1, "all three are gone")
        await made.honest_is_served()


async def test_a_peer_has_its_number_of_streams_and_bytes_whatever_it_opens_and_sends() -> None:
    async with siege() as made:
        call = framed(encode_frame(Kind.CALL, 7, "hold", {"data": b"x" * (LARGEST - 1000)}))

        async def flood() -> None:
            with suppress(*GONE, EchoError, OSError):
                async with made.stream() as stream:
                    for _ in range(30):
                        await stream.send(call)

        async with anyio.create_task_group() as tasks:
            for _ in range(24):
                tasks.start_soon(flood)
            await made.honest_is_served(20)
            tasks.cancel_scope.cancel()
        assert made.server.traffic.refused_streams > 0
        assert 0 < made.most_held <= PER_PEER
        await until(lambda: made.server.stream_count <= 1, "what nobody uses ends")
        await made.honest_is_served()


async def test_large_frames_that_stop_half_way_hold_memory_only_until_another_peer_needs_it() -> None:
    async with siege(max_bytes=2 * PER_PEER, crowded_s=0.1) as made:
        requests = made.server.crowd.requests
        call = framed(encode_frame(Kind.CALL, 1, "echo", {"data": b"x" * (LARGEST - 8192)}))
        async with made.stream() as a, made.stream() as b, made.stream() as c, made.stream() as d:
            for stream in (a, b, c, d):
                await stream.send(call[:4000])
            await until(lambda: requests.held > requests.max_bytes - LARGEST, "the memory is taken")
            async with RpcClient(made.honest, made.host.peer_id, PROTOCOL, max_reply_bytes=LARGEST) as client:
                await client.call("echo", {"data": b"y" * 60_000}, timeout_s=20)
        assert made.server.traffic.crowded_streams > 0
        assert requests.peak <= requests.max_bytes
        await until(lambda: requests.held == 0, "nothing is left of what was held")


async def test_a_peer_that_floods_and_reads_no_answer_is_dropped() -> None:
    async with siege() as made:
        call = framed(encode_frame(Kind.CALL, 1, "echo", {"data": b"x" * 60_000}))

        async def flood() -> None:
            async with made.stream() as stream:
                with suppress(*GONE):
                    while True:
                        await stream.send(call)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(flood)
            await until(lambda: made.server.traffic.total.calls > 0, "the flood has begun")
            await made.honest_is_served()
            # Its own side may go on filling its daemon's buffers.
            await until(lambda: made.server.stream_count <= 1, "it is dropped")
            tasks.cancel_scope.cancel()
        await made.honest_is_served()


@pytest.mark.parametrize("sent", [b"", b"\x13/multistream/1.0.0\n", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 4096])
async def test_raw_connections_that_never_finish_their_handshake_keep_nobody_out(sent: bytes) -> None:
    async with siege() as made:
        port = int(made.host.addresses[0].split("/")[4])
        with ExitStack() as held:
            for _ in range(200):
                connection = held.enter_context(socket.create_connection(("127.0.0.1", port)))
                if sent:
                    connection.sendall(sent)
            await made.honest_is_served()
            async with open_hivemind_host(Identity.generate(), listen=(), bootstrap=made.host.addresses) as late:
                made.honest = late
                await made.honest_is_served()
