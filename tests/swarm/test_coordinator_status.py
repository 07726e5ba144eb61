"""The status of a run that hostile peers report to: real coordinator, a network in memory; the children stand in."""

import contextlib
import io
import json
import struct
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from anyio.abc import ByteStream
from rich.console import Console

from echo_coordinator.commands.show import show_status
from echo_coordinator.config import NetworkSection
from echo_coordinator.loops.reporting import LISTED_NODES, LISTED_WARNINGS
from echo_coordinator.state.roster import MAX_ENTRIES
from echo_coordinator.state.service import MAX_REQUEST_BYTES
from echo_coordinator.state.transfers import KEPT_VERSIONS, LISTED_FAULTS
from echo_swarm.checkpoint.blob import BLOB_PROTOCOL
from echo_swarm.identity import Identity, PeerId
from echo_swarm.manifest import Artifact, ArtifactKind, CheckpointManifest
from echo_swarm.trajectory import Reason
from echo_swarm.transfers import FaultReason, SourceBytes, SourceFault, Transfer
from echo_swarm.transport.frames import Kind, encode_frame
from echo_swarm.transport.rpc import RpcClient, call_message
from echo_swarm.work import WORK_PROTOCOL, Beat, Hello, Role, StatusReply, StatusRequest
from tests.swarm.support.node_harness import until
from tests.swarm.support.whole_run import make_run

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """The coordinator runs on asyncio only."""
    return "asyncio"


async def test_the_status_can_be_had_whatever_and_however_many_peers_report(tmp_path: Path):
    run = make_run(tmp_path, eval_every=1)
    ident = Identity.from_seed(b"asks".ljust(32, b"."))
    async with (
        run.coordinator() as coordinator,
        run.network.host(ident) as host,
        RpcClient(host, run.identity.peer_id, WORK_PROTOCOL, max_reply_bytes=4 << 20) as client,
    ):
        core = coordinator.state.core
        hello = Hello(
            run_id=run.settings.run.id,
            software="",
            role=Role.INFERENCE,
            instance=bytes(16),
            wall_s=0.0,
            backend=None,
            addresses=(),
        )
        beat = Beat(
            lease_ids=(),
            held_version=None,
            state="",
            tokens_per_s=0,
            bytes_served=2**63 - 1,
            bytes_fetched_peers=2**63 - 1,
        )
        for number in range(MAX_ENTRIES):
            peer = Identity.from_seed(number.to_bytes(32, "big")).peer_id
            core.roster.admit(peer, hello, core.clock.monotonic_s(), skew_s=1e9)
            core.roster.beat(peer, beat, core.clock.monotonic_s())
            for reason in Reason:
                core.counters.add(peer, reason.value, 2**40)
        for version in range(KEPT_VERSIONS):
            core.transfers.published(_manifest(version), 0.0)
        for number in range(40):
            core.transfers.take(PeerId(str(number)), [_row(v, number) for v in range(KEPT_VERSIONS)], 1.0)
        request = StatusRequest(run_id=run.settings.run.id)
        status = (await call_message(client, "status", request, StatusReply, timeout_s=20)).status
    assert len(status["nodes"]) == LISTED_NODES and status["bytes_served_peers"] == 2**63 - 1
    assert len(status["transfers"]) == KEPT_VERSIONS
    assert all(len(entry["faults"]) == LISTED_FAULTS for entry in status["transfers"])
    assert status["warnings"][-1] == f"and {MAX_ENTRIES - LISTED_WARNINGS} more"


async def test_streams_that_a_flood_cost_show_in_the_status_with_their_service_and_cause(tmp_path: Path):
    run = make_run(tmp_path)
    run.settings = run.settings.model_copy(update={"network": NetworkSection(service_bytes=16 << 20)})
    body = b"".join(encode_frame(Kind.CALL, 1, "push", {"data": b"x" * (MAX_REQUEST_BYTES - 4096)}))
    run.folder.settings.touch()  # The command line looks for it.
    half_a_push = struct.pack("<I", len(body)) + body[:4000]
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(run.coordinator())
        assert "streams ended" not in await _shown(run.folder.root)

        async def opened(protocol: str) -> ByteStream:
            host = await stack.enter_async_context(run.network.host(Identity.generate(), outbound_only=True))
            return await host.open_stream(run.identity.peer_id, protocol, timeout_s=5)

        for _ in range(2):  # There is room for one such push: the second waits for the first.
            await (await opened(WORK_PROTOCOL)).send(half_a_push)
        await (await opened(BLOB_PROTOCOL)).send(struct.pack("<I", 5) + b"hello")

        def counted() -> bool:
            streams = coordinator.reporter.status().streams
            return streams["work"].crowded_streams > 0 and streams["pieces"].malformed_streams > 0

        await until(counted, "both are counted")
        text = await _shown(run.folder.root)
        streams = json.loads(await _shown(run.folder.root, as_json=True))["streams"]
    assert "streams ended" in text and "too slow while memory was full" in text and "1 broke the protocol" in text
    assert streams["work"]["crowded_streams"] >= 1
    assert streams["pieces"] == {
        "crowded_streams": 0, "evicted_streams": 0, "refused_streams": 0, "malformed_streams": 1,
    }  # fmt: skip


async def _shown(root: Path, *, as_json: bool = False) -> str:
    """Return what `echo-coordinator status` prints, asked as it asks: over the control socket, by another loop."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        show = partial(show_status, root, Console(width=200, file=printed), as_json=as_json)
        await anyio.to_thread.run_sync(show)
    return printed.getvalue()


def _manifest(version: int) -> CheckpointManifest:
    artifact = Artifact(
        kind=ArtifactKind.SAFETENSORS,
        precision="float32",
        size_bytes=1000,
        digest=bytes(32),
        piece_bytes=1 << 16,
        piece_digests=bytes(32),
        layout_digest=bytes(32),
    )
    return CheckpointManifest(
        run_id="ab" * 16, policy_version=version, parent_digest=None, issued_at=1.0, expires_at=2.0,
        artifacts=(artifact,),
    )  # fmt: skip


def _row(version: int, number: int) -> Transfer:
    nothing = SourceBytes(coordinator=0, peers=0, mirrors=0)
    return Transfer(
        policy_version=version,
        digest=bytes(32),
        whole=True,
        fetched=SourceBytes(coordinator=0, peers=1000, mirrors=0),
        deltas=nothing,
        made_bytes=0,
        disk_bytes=0,
        seconds=4e9,
        failures=2**32 - 1,
        # One a file: a peer has so many names in all.
        faults=(SourceFault(source=f"{number}", reason=FaultReason.WRONG_BYTES),),
    )
