"""Memory of all peers together: many keys that hold it without use keep nobody out, and nothing is left of them."""

import struct
import tracemalloc
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import anyio
import pytest

from echo_swarm.errors import PeerUnreachable
from echo_swarm.identity import Identity
from echo_swarm.transport.crowd import CALL_BYTES
from echo_swarm.transport.frames import Kind, encode_frame
from echo_swarm.transport.memory import MemoryNetwork
from echo_swarm.transport.rpc import RpcClient, RpcServer, reserve_answer
from tests.swarm.support.node_harness import until

pytestmark = pytest.mark.anyio
PROTOCOL = "/test/1"
LARGEST = 1 << 20
ROOM = 4 << 20
"""Half of what the server may use."""
GONE = (anyio.BrokenResourceError, anyio.EndOfStream, anyio.ClosedResourceError)


def framed(method, payload, kind=Kind.CALL) -> bytes:
    body = b"".join(encode_frame(kind, 1, method, payload))
    return struct.pack("<I", len(body)) + body


LARGE = framed("echo", {"data": b"x" * (LARGEST - 8192)})


class Siege:
    """A server with little memory, an honest peer, and any number of hostile ones."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack, self.network, self.gate, self.going = stack, MemoryNetwork(), anyio.Event(), 0

    async def start(self, **settings) -> None:
        self.hostile = AsyncExitStack()
        self.host = await self.stack.enter_async_context(self.network.host(Identity.generate()))
        options = {"max_request_bytes": LARGEST, "max_bytes": 2 * ROOM, "crowded_s": 0.2, **settings}
        self.server = RpcServer(self.host, PROTOCOL, **options)
        self.requests, self.answers = self.server.crowd.requests, self.server.crowd.answers

        async def echo(_peer, payload):
            return payload

        async def hold(_peer, _payload):
            self.going += 1
            await self.gate.wait()
            return {}

        async def large(_peer, payload):
            await reserve_answer(payload["size"] + 64)
            return {"data": b"x" * payload["size"]}

        self.server.method("echo", echo)
        self.server.method("hold", hold)
        self.server.method("large", large)
        await self.stack.enter_async_context(self.server)
        self.honest = await self.client()

    async def client(self) -> RpcClient:
        host = await self.stack.enter_async_context(self.network.host(Identity.generate(), outbound_only=True))
        client = RpcClient(host, self.host.peer_id, PROTOCOL, max_reply_bytes=LARGEST)
        return await self.stack.enter_async_context(client)

    async def stream(self):
        """A stream of a new key."""
        host = await self.hostile.enter_async_context(self.network.host(Identity.generate(), outbound_only=True))
        return await host.open_stream(self.host.peer_id, PROTOCOL, timeout_s=5)

    async def honest_is_served(self, size: int = 200_000, times: int = 3) -> None:
        for n in range(times):
            payload = {"n": n, "data": b"y" * size}
            assert await self.honest.call("echo", payload, timeout_s=60) == payload

    async def vanish(self, honest: int = 1) -> None:
        """All hostile peers go at once, and nothing is left of what they held."""
        await self.hostile.aclose()
        await until(lambda: self.server.stream_count <= honest, "their streams end")
        await until(lambda: self.requests.held == self.answers.held == 0, "all is given back")
        assert self.requests.waiting == self.answers.waiting == 0


@asynccontextmanager
async def besieged(**settings) -> AsyncGenerator[Siege]:
    with anyio.fail_after(30):
        async with AsyncExitStack() as stack:
            siege = Siege(stack)
            await siege.start(**settings)
            async with siege.hostile:
                yield siege


async def sends(stream, data: bytes) -> None:
    with suppress(*GONE):
        await stream.send(data)


async def test_many_keys_with_large_frames_half_sent_stay_within_the_memory_and_the_next_message_is_served():
    async with besieged() as siege:
        streams = [await siege.stream() for _ in range(40)]
        async with anyio.create_task_group() as tasks:
            for stream in streams:
                tasks.start_soon(sends, stream, LARGE[: LARGEST // 5])
            await until(lambda: siege.requests.waiting > 0, "the memory is taken")
            await siege.honest_is_served(times=2)
            assert siege.server.traffic.crowded_streams > 0
            assert 0 < siege.requests.peak <= ROOM
            tasks.cancel_scope.cancel()
        await siege.vanish()
        await siege.honest_is_served(times=1)


async def test_what_python_allocates_for_a_flood_of_many_keys_is_bounded():
    async with besieged(max_request_bytes=4 << 20) as siege:
        flood = framed("hold", {"data": b"x" * (4 << 20)})[: 3 << 20]
        streams = [await siege.stream() for _ in range(24)]
        tracemalloc.start()
        try:
            async with anyio.create_task_group() as tasks:
                for stream in streams:
                    tasks.start_soon(sends, stream, flood)
                await until(lambda: siege.requests.waiting > 0, "the memory is taken")
                await siege.honest_is_served(times=1)
                tasks.cancel_scope.cancel()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        # Of 72 MiB on offer: what the rooms hold, twice where it is joined, and what each stream and pipe may hold.
        assert peak < 4 * ROOM + 24 * (640 << 10)
        await siege.vanish()


async def test_answers_that_many_keys_do_not_read_stay_within_the_memory_and_the_next_is_written():
    async with besieged() as siege:
        for _ in range(30):
            await (await siege.stream()).send(framed("large", {"size": 900_000}))
        await until(lambda: siege.answers.waiting > 0, "the memory is taken")
        for _ in range(3):
            answer = await siege.honest.call("large", {"size": 300_000}, timeout_s=60)
            assert len(answer["data"]) == 300_000
            await siege.honest_is_served(size=1000, times=1)
        assert siege.server.traffic.crowded_streams > 0
        assert 0 < siege.answers.peak <= ROOM + 2000
        await siege.vanish()


async def test_answers_that_were_not_announced_wait_for_room_once_one_of_their_kind_is_known():
    async with besieged() as siege:

        async def plain(_peer, payload):
            return {"data": b"x" * payload["size"]}

        siege.server.method("plain", plain)
        await siege.honest.call("plain", {"size": 900_000}, timeout_s=60)
        for _ in range(30):
            await (await siege.stream()).send(framed("plain", {"size": 900_000}))
        await until(lambda: siege.answers.waiting > 0, "the memory is taken")
        await siege.honest.call("plain", {"size": 900_000}, timeout_s=60)
        assert siege.answers.peak <= ROOM + 2000
        await siege.vanish()


async def test_whoever_keeps_many_calls_waiting_gives_way_and_whoever_keeps_few_does_not():
    async with besieged(max_in_flight_per_peer=2000) as siege:
        patient = await siege.client()
        answered = []

        async def wait() -> None:
            answered.append(await patient.call("hold", {}, timeout_s=60))

        streams = [await siege.stream() for _ in range(4)]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await until(lambda: siege.going == 1)
            for stream in streams:
                tasks.start_soon(sends, stream, framed("hold", {}) * 400)
            await until(lambda: siege.requests.held > ROOM - LARGEST, "the memory is taken")
            await siege.honest_is_served(size=LARGEST - 1000)
            siege.gate.set()
        assert answered == [{}]
        assert siege.server.traffic.crowded_streams > 0
        await siege.vanish(honest=2)


async def test_waiting_for_room_is_not_held_against_who_waits():
    async with besieged(
        max_bytes=2 * LARGEST, crowded_s=60.0, frame_timeout_s=0.3, max_bytes_in_flight_per_peer=1 << 30
    ) as siege:
        other = await siege.client()

        async def hold() -> None:
            await other.call("hold", {"data": b"x" * (LARGEST - 100)}, timeout_s=60)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(hold)
            await until(lambda: siege.going == 1)
            tasks.start_soon(siege.honest_is_served, 500_000, 1)
            await until(lambda: siege.requests.waiting == 1)
            await anyio.sleep(1.0)
            siege.gate.set()
        assert siege.server.traffic.crowded_streams == 0
        assert siege.server.stream_count == 2


async def test_whoever_sends_at_a_fair_pace_keeps_its_place_while_others_wait():
    async with besieged(crowded_s=0.5) as siege:
        slow = [await siege.stream() for _ in range(3)]
        stalled = [await siege.stream() for _ in range(10)]
        async with anyio.create_task_group() as tasks:

            async def at_a_pace(stream) -> None:
                for start in range(0, len(LARGE), 1 << 16):
                    await stream.send(LARGE[start : start + (1 << 16)])
                    await anyio.sleep(0.05)

            async def read_all(stream) -> None:
                received = 0
                while received < len(LARGE) - 100:
                    received += len(await stream.receive())

            for stream in slow:
                tasks.start_soon(at_a_pace, stream)
                tasks.start_soon(read_all, stream)
            await until(lambda: siege.requests.held >= 3 * len(LARGE))
            for stream in stalled:
                tasks.start_soon(sends, stream, LARGE[:1000])
            await siege.honest_is_served(times=2)
        assert siege.requests.peak <= ROOM
        await siege.vanish()


@pytest.mark.parametrize("kind", [Kind.PING, Kind.PONG, Kind.ANSWER])
async def test_frames_that_are_no_calls_leave_nothing_behind(kind):
    async with besieged() as siege:
        stream = await siege.stream()
        await stream.send(framed("", {"data": b"x" * 100_000}, kind) + framed("echo", {}))
        await until(lambda: siege.server.traffic.total.calls == 1)
        await until(lambda: siege.requests.held == siege.answers.held == 0)
        await siege.vanish()


async def test_a_request_larger_than_the_memory_allowed_has_room_of_its_own():
    async with besieged(max_bytes=1000) as siege:
        await siege.honest_is_served(size=LARGEST - 1000)
        assert siege.requests.max_bytes == LARGEST + 256 + CALL_BYTES
        await until(lambda: siege.requests.held == siege.answers.held == 0)


async def test_a_peer_that_is_ended_for_others_hears_of_it_as_a_lost_stream_and_comes_back():
    async with besieged(max_in_flight_per_peer=2000) as siege:
        greedy = await siege.client()
        lost = []

        async def wait() -> None:
            try:
                await greedy.call("hold", {}, timeout_s=60)
            except PeerUnreachable as e:
                lost.append(str(e))

        async with anyio.create_task_group() as tasks:
            for _ in range(60):
                tasks.start_soon(wait)
            await until(lambda: siege.going == 60)
            siege.server.crowd.requests.change(ROOM)
            tasks.start_soon(siege.honest_is_served, 1000, 1)
            await until(lambda: len(lost) == 60)
            siege.server.crowd.requests.change(-ROOM)
        assert await greedy.call("echo", {}, timeout_s=60) == {}
