"""The status of a run that hostile peers report to: real coordinator, a network in memory; the children stand in."""

from pathlib import Path

import pytest

from echo_coordinator.loops.reporting import LISTED_NODES, LISTED_WARNINGS
from echo_coordinator.state.roster import MAX_ENTRIES
from echo_coordinator.state.transfers import KEPT_VERSIONS, LISTED_FAULTS
from echo_swarm.identity import Identity, PeerId
from echo_swarm.manifest import Artifact, ArtifactKind, CheckpointManifest
from echo_swarm.trajectory import Reason
from echo_swarm.transfers import FaultReason, SourceBytes, SourceFault, Transfer
from echo_swarm.transport.rpc import RpcClient, call_message
from echo_swarm.work import WORK_PROTOCOL, Beat, Hello, Role, StatusReply, StatusRequest
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
