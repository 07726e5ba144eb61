"""Peers that ask a blob service for more than their share."""

import struct
from dataclasses import replace

import anyio
import pytest

from echo_swarm.checkpoint import sources
from echo_swarm.checkpoint.blob import BLOB_PROTOCOL, BUSY, BlobClient, PieceRequest
from echo_swarm.checkpoint.fetch import SourcesExhausted
from echo_swarm.checkpoint.pieces import PieceMap
from echo_swarm.checkpoint.serve import BlobServer
from echo_swarm.errors import RemoteError
from echo_swarm.transport.frames import Kind, encode_frame
from tests.swarm.support.node_harness import until
from tests.swarm.test_checkpoint_exchange import PIECE, QUICK, fetched, fill, swarm_in, version_of

pytestmark = pytest.mark.anyio


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
        server._rpc.crowd._max_streams, server._rpc.crowd._settled_s = 8, 0.0
        await swarm._stack.enter_async_context(server)
        for _ in range(4):
            idle = await swarm.host(outbound_only=True)
            for _ in range(2):
                client = await swarm._stack.enter_async_context(BlobClient(idle, host.peer_id))
                await client.have(version.artifact.digest, timeout_s=10)
        assert server._rpc.stream_count == 8
        await fetched(await swarm.fetcher(), version, [host.peer_id])


async def test_pieces_that_many_identities_ask_for_and_do_not_read_stay_within_the_memory(tmp_path):
    version = version_of(1, pieces=8)
    async with swarm_in(tmp_path) as swarm:
        host, store = await swarm.host(), swarm.store()
        fill(store, version)
        server = BlobServer(host, store, max_bytes=2 * 12 * PIECE)
        server._rpc.crowd.crowded_s = 0.2
        await swarm._stack.enter_async_context(server)
        request = PieceRequest(digest=version.artifact.digest, index=0, count=1).to_wire()
        body = b"".join(encode_frame(Kind.CALL, 1, "piece", request))
        for _ in range(20):
            greedy = await (await swarm.host(outbound_only=True)).open_stream(host.peer_id, BLOB_PROTOCOL, timeout_s=5)
            await greedy.send((struct.pack("<I", len(body)) + body) * 8)
        answers = server._rpc.crowd.answers
        await until(lambda: answers.waiting > 0, "the memory is taken")
        await fetched(await swarm.fetcher(), version, [host.peer_id])
        assert answers.peak <= 13 * PIECE
        assert server._rpc.traffic.crowded_streams > 0


async def test_requests_that_failed_do_not_use_up_the_download_limit(tmp_path):
    version = version_of(1, pieces=20)
    async with swarm_in(tmp_path) as swarm:

        async def nothing(_index):
            raise RemoteError("unavailable", "")

        fetcher = await swarm.fetcher(settings=replace(QUICK, max_bytes_per_s=2 * PIECE))
        with pytest.raises(SourcesExhausted):
            await fetcher.fetch(version.signed, version.artifact, [await swarm.impostor(version, nothing)])
        assert fetcher._rate.backlog_s() == 0
        honest = await swarm.seeder(version)
        with anyio.move_on_after(0.05):
            await fetcher.fetch(version.signed, version.artifact, [honest.peer])
        assert fetcher._rate.backlog_s() <= 0.5, "a fetch that was cancelled goes on being paid for"


@pytest.mark.parametrize("is_coordinator", [True, False])
async def test_sources_with_nothing_keep_no_place_from_one_that_has_all(tmp_path, monkeypatch, is_coordinator):
    version = version_of(1, pieces=8)
    monkeypatch.setattr(sources, "USELESS_S", 0.3)
    async with swarm_in(tmp_path) as swarm:

        async def never(_index):
            await anyio.sleep_forever()

        empty = PieceMap(8).pack()
        useless = [await swarm.impostor(version, never, have=empty) for _ in range(3)]
        good = (await swarm.seeder(version)).peer
        few = replace(QUICK, max_sources=3, starve_s=20.0)
        fetcher = await swarm.fetcher(settings=few, coordinator=good if is_coordinator else None)
        report = await fetched(fetcher, version, [*useless, good])
        assert set(report.bytes_by_source) == {good}
        assert is_coordinator or report.failures
