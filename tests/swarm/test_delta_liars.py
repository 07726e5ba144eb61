"""Peers that claim to have a delta and give nothing of it."""

from contextlib import AsyncExitStack
from dataclasses import replace

import anyio
import pytest

from echo_swarm.checkpoint.blob import BLOB_PROTOCOL, HaveReply, HaveRequest, PieceReply, PieceRequest
from echo_swarm.checkpoint.delta import obtain
from echo_swarm.checkpoint.delta.obtain import LEAST_S, USUAL_BYTES_PER_S, time_for_deltas
from echo_swarm.checkpoint.pieces import PieceMap
from echo_swarm.errors import RemoteError
from echo_swarm.identity import Identity
from echo_swarm.transport.rpc import RpcServer, typed
from tests.swarm.test_delta_exchange import QUICK, Run

pytestmark = pytest.mark.anyio


def test_deltas_have_half_of_the_time_of_the_whole_file():
    assert time_for_deltas(1, None, None) == LEAST_S
    assert time_for_deltas(100 * USUAL_BYTES_PER_S, None, None) == 50
    assert time_for_deltas(1 << 30, 1 << 20, None) == 512
    assert time_for_deltas(1 << 30, 1 << 30, 1 << 20) == 512


async def liar(run: Run, delta, piece) -> str:
    host = await run.stack.enter_async_context(run.network.host(Identity.generate()))
    rpc = RpcServer(host, BLOB_PROTOCOL, max_request_bytes=1 << 16)

    async def have(_peer, request):
        if request.digest != delta.digest:
            raise RemoteError("not_found", "")
        return HaveReply(pieces=PieceMap.full(delta.piece_count).pack(), peers=())

    async def answer(_peer, request):
        return PieceReply(data=await piece(request.index))

    rpc.method("have", typed(HaveRequest, have))
    rpc.method("piece", typed(PieceRequest, answer))
    await run.stack.enter_async_context(rpc)
    return host.peer_id


async def test_silent_liars_about_a_lost_delta_cost_no_more_the_more_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(obtain, "LEAST_S", 0.5)
    async with AsyncExitStack() as stack:
        run = Run(tmp_path, stack, versions=2, deltas=True)
        await run.publish()
        node = await run.node("a")
        await node.fetch(0)
        (run.store.version_folder(1) / "delta.bin").unlink()

        async def silence(_index):
            await anyio.sleep_forever()

        delta = run.manifests[1].message.artifacts[1]
        liars = [await liar(run, delta, silence) for _ in range(12)]
        node.fetcher.settings = replace(QUICK, max_sources=2, answer_timeout_s=60.0)
        node.sources = [run.coordinator.peer_id, *liars]
        with anyio.fail_after(20):
            report = await node.fetch(1)
        assert "did not come within" in report.delta_fault


async def test_who_lied_about_a_delta_is_named_when_the_version_comes_whole(tmp_path):
    async with AsyncExitStack() as stack:
        run = Run(tmp_path, stack, versions=2, deltas=True)
        await run.publish()
        node = await run.node("a")
        await node.fetch(0)
        (run.store.version_folder(1) / "delta.bin").unlink()
        delta = run.manifests[1].message.artifacts[1]

        async def wrong(index):
            return bytes(delta.piece_length(index))

        who = await liar(run, delta, wrong)
        node.sources = [run.coordinator.peer_id, who]
        report = await node.fetch(1)
        assert report.delta_fault and who in report.liars
