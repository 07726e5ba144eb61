"""A server whose streams are all taken: whoever only holds one makes room, whoever uses one stays."""

from contextlib import AsyncExitStack

import anyio
import pytest

from echo_swarm.errors import PeerUnreachable
from echo_swarm.identity import Identity
from echo_swarm.transport.memory import MemoryNetwork
from echo_swarm.transport.rpc import RpcClient, RpcServer
from tests.swarm.support.node_harness import until

pytestmark = pytest.mark.anyio
PROTOCOL = "/test/1"


class Crowd:
    """A server with room for four streams, and any number of peers."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.stack, self.network, self.going, self.gate = stack, MemoryNetwork(), 0, anyio.Event()

    async def start(self, **settings) -> None:
        self.host = await self.stack.enter_async_context(self.network.host(Identity.generate()))
        options = {"max_request_bytes": 4096, "max_streams": 4, "settled_s": 0.0, **settings}
        self.server = RpcServer(self.host, PROTOCOL, **options)

        async def echo(_peer, payload):
            return payload

        async def hold(_peer, payload):
            self.going += 1
            await self.gate.wait()
            return payload

        self.server.method("echo", echo)
        self.server.method("work", hold)
        self.server.method("wait", hold, waits=True)
        await self.stack.enter_async_context(self.server)

    async def client(self) -> RpcClient:
        host = await self.stack.enter_async_context(self.network.host(Identity.generate(), outbound_only=True))
        client = RpcClient(host, self.host.peer_id, PROTOCOL, max_reply_bytes=4096)
        await self.stack.enter_async_context(client)
        return client


@pytest.fixture
async def crowd():
    async with AsyncExitStack() as stack:
        yield Crowd(stack)


async def test_a_newcomer_gets_the_place_of_the_stream_that_was_idle_for_longest(crowd):
    await crowd.start()
    clients = [await crowd.client() for _ in range(4)]
    for client in clients:
        await client.call("echo", {}, timeout_s=10)
    await clients[0].call("echo", {}, timeout_s=10)
    newcomer = await crowd.client()
    await newcomer.call("echo", {}, timeout_s=10)
    assert crowd.server.traffic.evicted_streams == 1 and crowd.server.traffic.refused_streams == 0
    for client in (clients[0], clients[2], clients[3]):
        await client.call("echo", {}, timeout_s=10)
    assert crowd.server.traffic.evicted_streams == 1
    await until(lambda: crowd.server.stream_count == 4)


async def test_whoever_is_in_use_stays_and_whoever_only_waits_for_news_goes(crowd):
    await crowd.start()
    ended = []
    first, worker, late = [await crowd.client() for _ in range(4)], await crowd.client(), await crowd.client()

    async def call(client, method):
        try:
            await client.call(method, {}, timeout_s=30)
            ended.append("answered")
        except PeerUnreachable:
            ended.append(method)

    async with anyio.create_task_group() as tasks:
        for client, method in zip(first, ("wait", "work", "work", "work"), strict=True):
            tasks.start_soon(call, client, method)
        await until(lambda: crowd.going == 4)
        tasks.start_soon(call, worker, "work")
        await until(lambda: crowd.going == 5)
        with pytest.raises(PeerUnreachable):
            await late.call("echo", {}, timeout_s=10)
        crowd.gate.set()
    assert sorted(ended) == ["answered"] * 4 + ["wait"]


async def test_a_stream_that_was_just_used_makes_no_room(crowd):
    await crowd.start(settled_s=60.0)
    for _ in range(4):
        await (await crowd.client()).call("echo", {}, timeout_s=10)
    with pytest.raises(PeerUnreachable):
        await (await crowd.client()).call("echo", {}, timeout_s=10)
    assert crowd.server.traffic.evicted_streams == 0 and crowd.server.traffic.refused_streams == 1
