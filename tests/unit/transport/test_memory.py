"""Faults of the in-memory network."""

from typing import Any

import anyio
import pytest

from echo_swarm.errors import BootstrapFailed, HeldBack, PeerUnreachable
from echo_swarm.identity import Identity, PeerId
from echo_swarm.transport.bootstrap import dial_any, dial_patiently
from echo_swarm.transport.memory import MemoryNetwork
from echo_swarm.transport.rpc import RpcClient, RpcServer

pytestmark = pytest.mark.anyio

PROTOCOL = "/test/1"


async def count_calls(loss: float, duplicate_calls: float, seed: int) -> tuple[int, int]:
    """Return (answers the caller got, calls the server handled) of 60 calls that are not tried again."""
    network = MemoryNetwork(seed, loss=loss, duplicate_calls=duplicate_calls)
    handled = answered = 0

    async def handle(peer: PeerId, payload: dict[str, Any]) -> dict[str, Any]:
        nonlocal handled
        handled += 1
        return payload

    server_id, client_id = Identity.from_seed(b"s" * 32), Identity.from_seed(b"c" * 32)
    async with network.host(server_id) as a, network.host(client_id) as b:
        server = RpcServer(a, PROTOCOL, max_request_bytes=1 << 16)
        server.method("count", handle)
        async with server, RpcClient(b, a.peer_id, PROTOCOL, max_reply_bytes=1 << 16) as client:
            for i in range(60):
                try:
                    answer = await client.call("count", {"i": i, "pad": b"x" * 10_000}, timeout_s=5)
                except PeerUnreachable:
                    continue
                assert answer["i"] == i
                answered += 1
            await anyio.wait_all_tasks_blocked()
    return answered, handled


async def test_without_faults_every_call_is_answered_once() -> None:
    assert await count_calls(loss=0.0, duplicate_calls=0.0, seed=1) == (60, 60)


async def test_loss_breaks_streams_and_the_same_seed_breaks_the_same_ones() -> None:
    first = await count_calls(loss=0.5, duplicate_calls=0.0, seed=7)
    assert 10 < first[0] < 60
    assert first == await count_calls(loss=0.5, duplicate_calls=0.0, seed=7)


async def test_calls_can_be_delivered_twice_and_are_answered_once() -> None:
    answered, handled = await count_calls(loss=0.0, duplicate_calls=0.5, seed=3)
    assert answered == 60
    assert 70 < handled < 110


async def test_delays_pass_through_the_hook_and_keep_the_order() -> None:
    now = 0.0
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds
        await anyio.lowlevel.checkpoint()

    network = MemoryNetwork(5, delay_s=100.0, sleep=sleep, now=lambda: now)
    async with network.host(Identity.generate()) as a, network.host(Identity.generate()) as b:
        received = b""
        done = anyio.Event()

        async def read(stream: Any, peer: PeerId) -> None:
            nonlocal received
            while len(received) < 100:
                received += await stream.receive()
            done.set()

        await a.serve(PROTOCOL, read)
        async with await b.open_stream(a.peer_id, PROTOCOL, timeout_s=5) as stream:
            for i in range(100):
                await stream.send(bytes([i]))
            await done.wait()
    assert received == bytes(range(100))
    assert slept
    assert now >= 50.0


async def test_a_partition_cuts_two_peers_and_healing_joins_them_again() -> None:
    network = MemoryNetwork()
    async with (
        network.host(Identity.generate()) as a,
        network.host(Identity.generate()) as b,
        network.host(Identity.generate()) as c,
    ):
        network.partition(a.peer_id, b.peer_id)
        with pytest.raises(PeerUnreachable, match="partitioned"):
            await b.connect(a.addresses[0], timeout_s=5)
        assert await c.connect(a.addresses[0], timeout_s=5) == a.peer_id
        network.heal(a.peer_id, b.peer_id)
        assert await b.connect(a.addresses[0], timeout_s=5) == a.peer_id


async def test_one_living_bootstrap_address_is_enough() -> None:
    network = MemoryNetwork()
    async with network.host(Identity.generate()) as a, network.host(Identity.generate()) as b:
        dead = [f"/memory/9/p2p/{Identity.generate().peer_id}", "rubbish"]
        assert await dial_any(b, [*dead, *a.addresses], timeout_s=5) == [a.peer_id]


async def test_without_one_the_error_names_every_address_and_why() -> None:
    network = MemoryNetwork()
    async with network.host(Identity.generate()) as b:
        dead = [f"/memory/{90 + i}/p2p/{Identity.generate().peer_id}" for i in range(3)]
        with pytest.raises(BootstrapFailed) as caught:
            await dial_any(b, dead, timeout_s=5)
    assert caught.value.failures == dict.fromkeys(dead, "connection refused")
    assert all(address in str(caught.value) for address in dead)


async def test_patience_joins_a_bootstrap_that_comes_up_late() -> None:
    network = MemoryNetwork()
    late = Identity.generate()
    retries: list[float] = []
    async with network.host(Identity.generate()) as b, anyio.create_task_group() as tasks:
        up = anyio.Event()

        async def run_late() -> None:
            await up.wait()
            async with network.host(late):
                await anyio.sleep_forever()

        def on_retry(error: BootstrapFailed, pause_s: float) -> None:
            retries.append(pause_s)
            up.set()

        tasks.start_soon(run_late)
        address = f"/memory/2/p2p/{late.peer_id}"
        found = await dial_patiently(b, [address], attempt_s=5, patience_s=60, on_retry=on_retry)
        assert found == [late.peer_id]
        assert len(retries) == 1
        tasks.cancel_scope.cancel()


async def test_an_address_that_was_not_tried_again_keeps_the_reason_of_the_last_try() -> None:
    """As hivemind's helper does: for some seconds after a failed dial it tries nothing."""
    network = MemoryNetwork()
    told: list[dict[str, str]] = []
    async with network.host(Identity.generate()) as b:
        tried: set[str] = set()
        dial = b.connect

        async def once(address: str, *, timeout_s: float) -> PeerId:
            if address in tried:
                raise HeldBack(f"{address}: tried a moment ago")
            tried.add(address)
            return await dial(address, timeout_s=timeout_s)

        b.connect = once
        address = f"/memory/9/p2p/{Identity.generate().peer_id}"
        with pytest.raises(BootstrapFailed) as caught:
            await dial_patiently(
                b, [address], attempt_s=5, patience_s=2.5, on_retry=lambda e, _: told.append(e.failures)
            )
        with pytest.raises(BootstrapFailed) as once_more:
            await dial_any(b, [address], timeout_s=5)
    assert [*told, caught.value.failures] == [{address: "connection refused"}] * 2
    assert once_more.value.held_back == {address}
