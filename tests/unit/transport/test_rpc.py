"""Framed calls: answers in any order, faults of one peer, deadlines, backpressure."""

import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import anyio
import pytest
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream
from pydantic import Field

from echo_swarm import codec
from echo_swarm.errors import MalformedMessage, PeerUnreachable, RemoteError, Untrusted
from echo_swarm.identity import Identity, PeerId
from echo_swarm.transport.frames import Kind, encode_frame
from echo_swarm.transport.memory import MemoryHost, MemoryNetwork
from echo_swarm.transport.rpc import RpcClient, RpcServer, call_message, typed
from echo_swarm.wire import Message

pytestmark = pytest.mark.anyio

PROTOCOL = "/test/1"


async def echo(peer: PeerId, payload: dict[str, Any]) -> dict[str, Any]:
    return payload


@asynccontextmanager
async def two_hosts(**faults: Any) -> AsyncGenerator[tuple[MemoryNetwork, MemoryHost, MemoryHost]]:
    network = MemoryNetwork(**faults)
    async with network.host(Identity.generate()) as a, network.host(Identity.generate()) as b:
        yield network, a, b


def make_server(host: MemoryHost, **settings: Any) -> RpcServer:
    server = RpcServer(host, PROTOCOL, **{"max_request_bytes": 1 << 16, **settings})
    server.method("echo", echo)
    return server


def make_client(host: MemoryHost, peer: PeerId, **settings: Any) -> RpcClient:
    return RpcClient(host, peer, PROTOCOL, **{"max_reply_bytes": 1 << 16, **settings})


async def test_answers_come_back_in_any_order() -> None:
    async with two_hosts() as (_, a, b), make_server(a) as server, make_client(b, a.peer_id) as client:
        gates = [anyio.Event() for _ in range(5)]

        async def wait(peer: PeerId, payload: dict[str, Any]) -> dict[str, Any]:
            await gates[payload["i"]].wait()
            return payload

        server.method("wait", wait)
        finished: list[int] = []

        async def call(i: int) -> None:
            answer = await client.call("wait", {"i": i}, timeout_s=10)
            finished.append(answer["i"])
            if i:
                gates[i - 1].set()

        async with anyio.create_task_group() as tasks:
            for i in range(5):
                tasks.start_soon(call, i)
            gates[4].set()
        assert finished == [4, 3, 2, 1, 0]


async def test_large_answers_and_small_ones_share_a_stream() -> None:
    async with (
        two_hosts() as (_, a, b),
        make_server(a, max_request_bytes=8 << 20),
        make_client(b, a.peer_id, max_reply_bytes=8 << 20) as client,
    ):
        sizes = [0, 1, 5 << 20, 262_144, 70_000, 3]

        async def check(size: int) -> None:
            answer = await client.call("echo", {"data": b"x" * size}, timeout_s=10)
            assert answer == {"data": b"x" * size}

        async with anyio.create_task_group() as tasks:
            for size in sizes:
                tasks.start_soon(check, size)


async def test_what_a_handler_raises_becomes_a_code_and_other_calls_go_on(caplog: pytest.LogCaptureFixture) -> None:
    errors: dict[str, Exception] = {
        "malformed": MalformedMessage("bad field"),
        "untrusted": Untrusted("rollback"),
        "unavailable": PeerUnreachable("database is away"),
        "busy": RemoteError("busy", "later"),
        "internal": ZeroDivisionError("secret detail"),
    }

    async def fail(peer: PeerId, payload: dict[str, Any]) -> dict[str, Any]:
        raise errors[payload["code"]]

    async with two_hosts() as (_, a, b), make_server(a) as server, make_client(b, a.peer_id) as client:
        server.method("fail", fail)
        for code in errors:
            with pytest.raises(RemoteError) as caught:
                await client.call("fail", {"code": code}, timeout_s=10)
            assert caught.value.code == code
            assert "secret" not in str(caught.value)
        with pytest.raises(RemoteError, match="unknown_method"):
            await client.call("nothing", {}, timeout_s=10)
        assert await client.call("echo", {"still": "here"}, timeout_s=10) == {"still": "here"}
        assert server.stream_count == 1
    assert "secret detail" in caplog.text


class Number(Message):
    value: Annotated[int, Field(ge=0, le=9)]


async def test_typed_methods_check_what_they_get_and_what_comes_back() -> None:
    async def double(peer: PeerId, request: Number) -> Number:
        return Number(value=request.value * 2)

    async with two_hosts() as (_, a, b), make_server(a) as server, make_client(b, a.peer_id) as client:
        server.method("double", typed(Number, double))
        assert await call_message(client, "double", Number(value=4), Number, timeout_s=10) == Number(value=8)
        with pytest.raises(RemoteError, match=r"malformed: Number\.value"):
            await client.call("double", {"value": 10}, timeout_s=10)
        with pytest.raises(MalformedMessage, match=r"Number\.value"):
            await call_message(client, "echo", _Loose(value=11), Number, timeout_s=10)


class _Loose(Message):
    value: int


async def test_a_cancelled_or_late_call_does_not_disturb_the_stream() -> None:
    async with (
        two_hosts() as (_, a, b),
        make_server(a, max_in_flight_per_peer=512, max_bytes_in_flight_per_peer=1 << 24) as server,
    ):

        async def never(peer: PeerId, payload: dict[str, Any]) -> dict[str, Any]:
            await anyio.sleep_forever()
            return {}

        server.method("never", never)
        async with make_client(b, a.peer_id) as client:
            await client.call("echo", {}, timeout_s=10)
            for size in range(0, 60_000, 1000):
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(lambda size=size: client.call("never", {"d": b"x" * size}, timeout_s=10))
                        await anyio.lowlevel.checkpoint()
                        scope.cancel()
            with pytest.raises(PeerUnreachable, match=r"no answer to 'never' within 0.01 s"):
                await client.call("never", {}, timeout_s=0.01)
            assert await client.call("echo", {"n": 1}, timeout_s=10) == {"n": 1}
            assert server.stream_count == 1


async def test_calls_fail_when_the_stream_is_lost_and_the_next_one_opens_another() -> None:
    async with two_hosts() as (network, a, b), make_server(a) as server, make_client(b, a.peer_id) as client:
        arrived = anyio.Event()

        async def hang(peer: PeerId, payload: dict[str, Any]) -> dict[str, Any]:
            arrived.set()
            await anyio.sleep_forever()
            return {}

        server.method("hang", hang)
        failures: list[str] = []

        async def call() -> None:
            with pytest.raises(PeerUnreachable, match="lost the stream") as caught:
                await client.call("hang", {}, timeout_s=10)
            failures.append(str(caught.value))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await arrived.wait()
            network.break_streams(a.peer_id, b.peer_id)
        assert len(failures) == 1
        assert await client.call("echo", {"n": 2}, timeout_s=10) == {"n": 2}


async def test_a_silent_peer_is_noticed_by_our_own_deadline() -> None:
    async with two_hosts() as (network, a, b), make_server(a) as server:
        server.method("hang", _hang)
        async with make_client(b, a.peer_id, ping_every_s=0.02, silent_after_s=0.1) as client:
            await client.call("echo", {}, timeout_s=10)
            network.partition(a.peer_id, b.peer_id, silent=True)
            with pytest.raises(PeerUnreachable, match="silent for"):
                await client.call("hang", {}, timeout_s=60)
            with pytest.raises(PeerUnreachable, match="partitioned"):
                await client.call("echo", {}, timeout_s=10)
            network.heal(a.peer_id, b.peer_id)
            assert await client.call("echo", {"n": 3}, timeout_s=10) == {"n": 3}


async def _hang(peer: PeerId, payload: dict[str, Any]) -> dict[str, Any]:
    await anyio.sleep_forever()
    return {}


async def test_a_slow_but_living_peer_is_not_taken_for_silent() -> None:
    async with two_hosts() as (_, a, b), make_server(a, max_in_flight_per_peer=1) as server:

        async def slow(peer: PeerId, payload: dict[str, Any]) -> dict[str, Any]:
            await anyio.sleep(0.5)
            return payload

        server.method("slow", slow)
        async with make_client(b, a.peer_id, ping_every_s=0.02, silent_after_s=0.2) as client:
            assert await client.call("slow", {"n": 4}, timeout_s=60) == {"n": 4}


async def test_a_server_reads_no_further_while_a_peers_share_is_in_use() -> None:
    async with two_hosts() as (_, a, b), make_server(a, max_in_flight_per_peer=3) as server:
        started: list[int] = []
        gate = anyio.Event()

        async def hold(peer: PeerId, payload: dict[str, Any]) -> dict[str, Any]:
            started.append(payload["i"])
            await gate.wait()
            return {}

        server.method("hold", hold)
        async with make_client(b, a.peer_id) as client, anyio.create_task_group() as tasks:
            for i in range(8):
                tasks.start_soon(lambda i=i: client.call("hold", {"i": i}, timeout_s=10))
            await anyio.wait_all_tasks_blocked()
            assert len(started) == 3
            gate.set()
        assert sorted(started) == list(range(8))
        assert server.traffic.by_method["hold"].calls == 8


@asynccontextmanager
async def raw_stream(client: MemoryHost, server: MemoryHost) -> AsyncGenerator[ByteStream]:
    stream = await client.open_stream(server.peer_id, PROTOCOL, timeout_s=5)
    try:
        yield stream
    finally:
        await stream.aclose()


async def read_to_end(stream: ByteStream) -> bytes:
    data = b""
    with anyio.fail_after(120):
        try:
            while True:
                data += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return data


HOSTILE = {
    "length of 4 GiB": b"\xff\xff\xff\xff",
    "just over the limit": struct.pack("<I", (1 << 16) + 257),
    "nine bytes of another protocol": struct.pack("<I", 9) + bytes.fromhex("9ffd74f7dd74fffdbd"),
    "binary that announces 4 GiB": struct.pack("<I", 5) + b"\xc6\xff\xff\xff\xff",
    "list that announces 4 billion": struct.pack("<I", 5) + b"\xdd\xff\xff\xff\xff",
    "nested a thousand times": struct.pack("<I", 1001) + b"\x91" * 1000 + b"\xc0",
    "empty frame": struct.pack("<I", 0),
    "call without a list": struct.pack("<I", 1) + b"\xc0",
    "boolean call id": struct.pack("<I", 9) + codec.encode([0, True, "echo", {}]),
    "negative call id": struct.pack("<I", 9) + codec.encode([0, -1, "echo", {}]),
    "unknown kind": struct.pack("<I", 9) + codec.encode([9, 1, "echo", {}]),
    "payload that is no map": struct.pack("<I", 9) + codec.encode([0, 1, "echo", []]),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_broken_frame_ends_its_stream_with_a_reason_and_hurts_nobody_else(name: str) -> None:
    async with two_hosts() as (network, a, b), make_server(a) as server, network.host(Identity.generate()) as honest:
        async with make_client(honest, a.peer_id) as client:
            await client.call("echo", {}, timeout_s=10)
            async with raw_stream(b, a) as stream:
                await stream.send(HOSTILE[name])
                goodbye = await read_to_end(stream)
            assert b"malformed" in goodbye
            assert server.traffic.malformed_streams == 1
            assert await client.call("echo", {"n": 5}, timeout_s=10) == {"n": 5}
        async with make_client(b, a.peer_id) as client:
            assert await client.call("echo", {"n": 6}, timeout_s=10) == {"n": 6}


async def test_a_frame_that_drips_in_too_slowly_ends_its_stream() -> None:
    async with two_hosts() as (_, a, b), make_server(a, frame_timeout_s=0.2), raw_stream(b, a) as stream:
        body = b"".join(encode_frame(Kind.CALL, 1, "echo", {"data": b"x" * 100}))
        with pytest.raises((anyio.BrokenResourceError, anyio.EndOfStream)):
            for byte in struct.pack("<I", len(body)) + body:
                await stream.send(bytes([byte]))
                await anyio.sleep(0.05)
            await stream.receive()


async def test_a_half_open_stream_is_closed_when_idle() -> None:
    async with two_hosts() as (_, a, b), make_server(a, idle_timeout_s=0.1) as server:
        async with raw_stream(b, a) as stream:
            assert await read_to_end(stream) == b""
        assert server.stream_count == 0


async def test_an_idle_client_keeps_its_stream_by_pinging() -> None:
    async with (
        two_hosts() as (_, a, b),
        make_server(a, idle_timeout_s=0.3) as server,
        make_client(b, a.peer_id, ping_every_s=0.03) as client,
    ):
        await client.call("echo", {}, timeout_s=10)
        await anyio.sleep(1.0)
        assert client.connected
        assert server.stream_count == 1


async def test_a_peer_that_does_not_read_its_answers_is_dropped() -> None:
    async with two_hosts() as (_, a, b), make_server(a, frame_timeout_s=0.2) as server:
        async with raw_stream(b, a) as stream:
            body = b"".join(encode_frame(Kind.CALL, 1, "echo", {"data": b"x" * 50_000}))
            with pytest.raises(anyio.BrokenResourceError):
                while True:
                    await stream.send(struct.pack("<I", len(body)) + body)
        await anyio.wait_all_tasks_blocked()
        assert server.stream_count == 0


async def test_a_flood_of_pings_is_answered_without_piling_up_answers() -> None:
    async with two_hosts() as (_, a, b), make_server(a, frame_timeout_s=0.3), raw_stream(b, a) as stream:
        body = b"".join(encode_frame(Kind.PING, 7, "", {}))
        await stream.send((struct.pack("<I", len(body)) + body) * 5000)
        answer = await BufferedByteReceiveStream(stream).receive_exactly(4)
        assert answer == struct.pack("<I", len(b"".join(encode_frame(Kind.PONG, 7, "", {}))))


async def test_a_peer_gets_only_its_number_of_streams() -> None:
    async with two_hosts() as (_, a, b), make_server(a, max_streams_per_peer=2) as server:
        async with make_client(b, a.peer_id) as one, make_client(b, a.peer_id) as two:
            await one.call("echo", {}, timeout_s=10)
            await two.call("echo", {}, timeout_s=10)
            async with make_client(b, a.peer_id) as three:
                with pytest.raises(PeerUnreachable):
                    await three.call("echo", {}, timeout_s=10)
        assert server.traffic.refused_streams == 1
        await anyio.wait_all_tasks_blocked()
        async with make_client(b, a.peer_id) as again:
            await again.call("echo", {}, timeout_s=10)


async def test_too_long_a_request_is_refused_before_it_is_sent() -> None:
    async with two_hosts() as (_, a, b), make_server(a), make_client(b, a.peer_id, max_request_bytes=100) as client:
        with pytest.raises(MalformedMessage, match="limit"):
            await client.call("echo", {"data": b"x" * 1000}, timeout_s=10)
        assert not client.connected


async def test_too_long_an_answer_ends_the_stream_and_names_the_limit() -> None:
    async with two_hosts() as (_, a, b), make_server(a), make_client(b, a.peer_id, max_reply_bytes=100) as client:
        with pytest.raises(MalformedMessage, match="limit"):
            await client.call("echo", {"data": b"x" * 1000}, timeout_s=10)
        assert await client.call("echo", {"n": 7}, timeout_s=10) == {"n": 7}


async def test_calls_of_a_closed_server_fail_and_a_new_server_answers_again() -> None:
    async with two_hosts() as (_, a, b), make_client(b, a.peer_id) as client:
        async with make_server(a):
            await client.call("echo", {}, timeout_s=10)
        with pytest.raises(PeerUnreachable):
            await client.call("echo", {}, timeout_s=10)
        async with make_server(a):
            assert await client.call("echo", {"n": 8}, timeout_s=10) == {"n": 8}


async def test_a_server_that_ends_answers_calls_that_are_to_be_finished_and_cuts_the_others_off() -> None:
    begun, ending = anyio.Event(), anyio.Event()
    waiting = anyio.Event()
    came_to: dict[str, Any] = {}

    async def last(peer: PeerId, payload: dict[str, Any]) -> dict[str, Any]:
        begun.set()
        await ending.wait()
        return payload

    async def long_poll(peer: PeerId, payload: dict[str, Any]) -> dict[str, Any]:
        waiting.set()
        await anyio.sleep_forever()
        return payload

    async with two_hosts() as (_, a, b), make_client(b, a.peer_id) as client:

        async def call(method: str) -> None:
            try:
                came_to[method] = await client.call(method, {"n": 1}, timeout_s=30)
            except PeerUnreachable:
                came_to[method] = "cut off"

        async def let_go() -> None:
            ending.set()

        async with anyio.create_task_group() as tasks, make_server(a) as server:
            server.method("last", last, finish=True)
            server.method("long_poll", long_poll)
            tasks.start_soon(call, "last")
            tasks.start_soon(call, "long_poll")
            await begun.wait()
            await waiting.wait()
            tasks.start_soon(let_go)
    assert came_to == {"last": {"n": 1}, "long_poll": "cut off"}


async def test_a_finished_call_that_hangs_does_not_hold_up_the_end_of_its_server() -> None:
    begun = anyio.Event()

    async def hang(peer: PeerId, payload: dict[str, Any]) -> dict[str, Any]:
        begun.set()
        await anyio.sleep_forever()
        return payload

    async with two_hosts() as (_, a, b), make_client(b, a.peer_id) as client, anyio.create_task_group() as tasks:

        async def call() -> None:
            with pytest.raises(PeerUnreachable):
                await client.call("hang", {}, timeout_s=30)

        with anyio.fail_after(120):
            async with make_server(a) as server:
                server.method("hang", hang, finish=True)
                tasks.start_soon(call)
                await begun.wait()


async def test_what_the_body_raises_leaves_the_client_as_it_is() -> None:
    async with two_hosts() as (_, a, b), make_server(a):
        with pytest.raises(RemoteError, match="unknown_method"):
            async with make_client(b, a.peer_id) as client:
                await client.call("nothing", {}, timeout_s=10)


async def test_bytes_are_counted_by_peer_and_method_on_both_sides() -> None:
    async with two_hosts() as (_, a, b), make_server(a) as server, make_client(b, a.peer_id) as client:
        for _ in range(3):
            await client.call("echo", {"data": b"x" * 1000}, timeout_s=10)
        traffic = server.traffic.by_peer[b.peer_id]
        assert traffic.calls == 3
        assert traffic == server.traffic.by_method["echo"] == server.traffic.total
        assert client.bytes_out == traffic.bytes_in + 3 * 4
        assert client.bytes_in == traffic.bytes_out + 3 * 4
