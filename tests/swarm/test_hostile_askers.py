"""Peers that ask a blob service for more than their share."""

import anyio
import pytest

from echo_swarm.checkpoint.blob import BUSY, BlobClient
from echo_swarm.checkpoint.serve import BlobServer
from echo_swarm.errors import RemoteError
from tests.swarm.support.node_harness import until
from tests.swarm.test_checkpoint_exchange import PIECE, fetched, fill, swarm_in, version_of

pytestmark = pytest.mark.anyio


async def test_an_honest_peer_gets_its_share_of_a_limited_uplink_while_others_ask_for_much_more(tmp_path):
    version = version_of(1, pieces=12)
    async with swarm_in(tmp_path) as swarm:
        host, store = await swarm.host(), swarm.store()
        fill(store, version)
        server = BlobServer(host, store, max_bytes_per_s=12 * PIECE)
        await swarm._stack.enter_async_context(server)
        greedy, honest = await swarm.host(outbound_only=True), await swarm.host(outbound_only=True)

        async def ask_for_ever(client):
            while True:
                await client.piece(version.artifact.digest, 0, timeout_s=30)

        async with (
            BlobClient(greedy, host.peer_id) as much,
            BlobClient(honest, host.peer_id) as little,
            anyio.create_task_group() as tasks,
        ):
            for _ in range(8):
                tasks.start_soon(ask_for_ever, much)
            await until(lambda: server.bytes_by_peer.get(greedy.peer_id, 0) > 0)
            before = server.bytes_by_peer[greedy.peer_id]
            for index in range(6):
                await little.piece(version.artifact.digest, index, timeout_s=30)
            given = server.bytes_by_peer[greedy.peer_id] - before
            tasks.cancel_scope.cancel()
        # One request at a time against eight: first come, first served would be 8 to 1; in turns it is 2 to 1.
        assert given <= 5 * 6 * PIECE, f"{given // PIECE} pieces for the greedy one, 6 for the other"


async def test_busy_is_said_before_anything_is_read_from_disk(tmp_path, monkeypatch):
    version = version_of(1, pieces=4)
    async with swarm_in(tmp_path) as swarm:
        host, store = await swarm.host(), swarm.store()
        fill(store, version)
        server = BlobServer(host, store, max_bytes_per_s=PIECE / 10, max_wait_s=-20.0)
        await swarm._stack.enter_async_context(server)
        reads = []
        read = store.read_piece
        monkeypatch.setattr(store, "read_piece", lambda *a: reads.append(a) or read(*a))
        async with BlobClient(await swarm.host(), host.peer_id) as client, anyio.create_task_group() as tasks:

            async def hold():
                await client.piece(version.artifact.digest, 0, timeout_s=60)

            tasks.start_soon(hold)
            await anyio.sleep(0.05)
            with pytest.raises(RemoteError, match=BUSY):
                await client.piece(version.artifact.digest, 1, timeout_s=10)
            with pytest.raises(RemoteError, match="not_found"):
                await client.piece(version.artifact.digest, 99, timeout_s=10)
            assert reads == []
            tasks.cancel_scope.cancel()


async def test_idle_streams_of_many_identities_do_not_keep_an_honest_peer_out(tmp_path):
    version = version_of(1, pieces=4)
    async with swarm_in(tmp_path) as swarm:
        host, store = await swarm.host(), swarm.store()
        fill(store, version)
        server = BlobServer(host, store)
        server._rpc._max_streams, server._rpc._settled_s = 8, 0.0
        await swarm._stack.enter_async_context(server)
        for _ in range(4):
            idle = await swarm.host(outbound_only=True)
            for _ in range(2):
                client = await swarm._stack.enter_async_context(BlobClient(idle, host.peer_id))
                await client.have(version.artifact.digest, timeout_s=10)
        assert server._rpc.stream_count == 8
        await fetched(await swarm.fetcher(), version, [host.peer_id])
