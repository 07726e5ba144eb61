"""Pieces that lie side by side and travel in one answer: asked for on fast lines only, and checked one by one."""

from dataclasses import replace
from functools import partial as bound

import anyio
import pytest

from echo_swarm.checkpoint import exchange
from echo_swarm.checkpoint.blob import BLOB_PROTOCOL, BlobClient, PieceRequest
from echo_swarm.checkpoint.serve import BlobServer
from echo_swarm.errors import RemoteError
from echo_swarm.manifest import MAX_RUN_BYTES, MAX_RUN_PIECES
from echo_swarm.transport.rpc import RpcClient
from tests.swarm.test_checkpoint_exchange import PIECE, QUICK, fetched, fill, swarm_in, version_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def fast(monkeypatch):
    """Every line is fast: what these tests show must not depend on how busy the machine is."""
    monkeypatch.setattr(exchange, "_RUN_S", 60.0)


@pytest.fixture
def asked(monkeypatch):
    """What was asked for, as (first, count)."""
    requests = []
    original = BlobServer._piece

    async def piece(self, peer, request):
        requests.append((request.index, request.count))
        return await original(self, peer, request)

    monkeypatch.setattr(BlobServer, "_piece", piece)
    return requests


async def test_of_a_fast_peer_several_pieces_are_asked_for_at_once(tmp_path, fast, asked):
    version = version_of(3, pieces=640)
    async with swarm_in(tmp_path) as swarm:
        seeder, fetcher = await swarm.seeder(version), await swarm.fetcher()
        report = await fetched(fetcher, version, [seeder.peer])
        assert report.bytes_by_source == {seeder.peer: len(version.data)} and report.wasted_bytes == 0
        assert seeder.bytes_served == len(version.data)
    assert len(asked) < 200 and max(count for _, count in asked) == MAX_RUN_PIECES
    assert sorted(i for first, count in asked for i in range(first, first + count)) == list(range(640))


async def test_of_a_small_version_piece_by_piece(tmp_path, fast, asked):
    version = version_of(3, pieces=60)
    async with swarm_in(tmp_path) as swarm:
        await fetched(await swarm.fetcher(), version, [(await swarm.seeder(version)).peer])
    assert sorted(asked) == [(index, 1) for index in range(60)]


async def test_of_a_slow_one_piece_by_piece(tmp_path, monkeypatch, asked):
    monkeypatch.setattr(exchange, "_RUN_S", 0.0)
    version = version_of(3, pieces=30)
    async with swarm_in(tmp_path) as swarm:
        await fetched(await swarm.fetcher(), version, [(await swarm.seeder(version)).peer])
    assert sorted(asked) == [(index, 1) for index in range(30)]


async def test_a_coordinator_is_asked_for_runs_of_what_it_chose(tmp_path, fast, asked):
    version = version_of(3, pieces=200)
    async with swarm_in(tmp_path) as swarm:
        host, store = await swarm.host(), swarm.store()
        fill(store, version)
        async with BlobServer(host, store, allocates=True) as coordinator:
            fetcher = await swarm.fetcher(coordinator=host.peer_id)
            report = await fetched(fetcher, version, [host.peer_id])
            assert report.wasted_bytes == 0 and coordinator.bytes_served == len(version.data)
            promised = coordinator._allocation._artifacts[version.artifact.digest].promises
            assert not promised, "what was given in a run is no promise any more"
    assert len(asked) < 150


async def test_an_unfinished_peer_gives_what_it_has_of_a_run(tmp_path):
    version = version_of(3)
    async with swarm_in(tmp_path) as swarm:
        some, host = await swarm.seeder(version, [2, 3, 4, 6, 19]), await swarm.host()
        async with BlobClient(host, some.peer) as client:
            ask = bound(client.piece, version.artifact.digest, timeout_s=10)
            assert await ask(2, count=16) == version.data[2 * PIECE : 5 * PIECE]
            assert await ask(3, count=1) == version.piece(3)
            assert await ask(19, count=16) == version.piece(19)  # The last, and short.
            with pytest.raises(RemoteError, match="no piece 5"):
                await ask(5, count=2)
            with pytest.raises(RemoteError, match="no piece 20"):
                await ask(20, count=16)


async def test_a_whole_file_is_read_up_to_its_end_and_a_run_has_an_upper_limit(tmp_path):
    version = version_of(3, pieces=40)
    async with swarm_in(tmp_path) as swarm:
        whole, host = await swarm.seeder(version), await swarm.host()
        async with BlobClient(host, whole.peer) as client:
            ask = bound(client.piece, version.artifact.digest, timeout_s=10)
            assert await ask(0, count=16) == version.data[:MAX_RUN_BYTES]
            assert await ask(35, count=16) == version.data[35 * PIECE :]
        async with RpcClient(host, whole.peer, BLOB_PROTOCOL, max_reply_bytes=1 << 21) as rpc:
            request = PieceRequest(digest=version.artifact.digest, index=0, count=1).to_wire()
            for count in (0, 17, -1, True, 1.0, 2**32, None, "1"):
                with pytest.raises(RemoteError, match=r"PieceRequest\.count"):
                    await rpc.call("piece", {**request, "count": count}, timeout_s=10)
            assert (await rpc.call("piece", request, timeout_s=10))["data"] == version.piece(0)


async def test_whoever_limits_its_upload_gives_one_piece_of_a_run(tmp_path):
    version = version_of(3)
    async with swarm_in(tmp_path) as swarm:
        host, store = await swarm.host(), swarm.store()
        fill(store, version)
        async with (
            BlobServer(host, store, max_bytes_per_s=1e9),
            BlobClient(host=await swarm.host(), peer=host.peer_id) as c,
        ):
            assert await c.piece(version.artifact.digest, 4, count=9, timeout_s=10) == version.piece(4)


@pytest.mark.parametrize("wrong", ["second", "long", "cut", "empty"])
async def test_a_run_with_anything_wrong_is_refused_whole_and_the_liar_named(tmp_path, fast, wrong):
    version = version_of(3, pieces=100)

    async def lie(index):
        data = version.data[index * PIECE : (index + 2) * PIECE]
        if wrong == "second":
            return data[:PIECE] + bytes(len(data) - PIECE)
        return {"long": version.data[index * PIECE :] + b"x", "cut": data[: PIECE + 7], "empty": b""}[wrong]

    async with swarm_in(tmp_path) as swarm:
        liar, seeder = await swarm.impostor(version, lie), await swarm.seeder(version)
        fetcher = await swarm.fetcher(settings=replace(QUICK, max_sources=2))
        report = await fetched(fetcher, version, [liar, seeder.peer])
        assert report.bytes_by_source == {seeder.peer: len(version.data)}
        assert report.liars.keys() == {liar} == {peer for peer, _ in report.faults}


async def test_a_peer_that_gives_one_piece_for_each_run_is_an_honest_one(tmp_path, fast):
    version = version_of(3, pieces=100)

    async def one(index):
        await anyio.lowlevel.checkpoint()
        return version.piece(index)

    async with swarm_in(tmp_path) as swarm:
        slow = await swarm.impostor(version, one)
        report = await fetched(await swarm.fetcher(), version, [slow])
        assert report.bytes_by_source == {slow: len(version.data)} and not report.faults
