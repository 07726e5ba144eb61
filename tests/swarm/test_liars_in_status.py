"""Field case 17: whoever lies about a version's bytes is named in the coordinator's status. Real hosts on loopback."""

import io
import json
import struct
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import cast

import anyio
import pytest
from rich.console import Console

from echo_coordinator.config import NetworkSection, PublishSection, RunSettings
from echo_swarm.checkpoint.blob import BLOB_PROTOCOL, NOT_FOUND, HaveReply, HaveRequest, PieceReply, PieceRequest
from echo_swarm.checkpoint.mirror import file_url
from echo_swarm.checkpoint.pieces import PieceMap
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.clock import SystemClock
from echo_swarm.directory.base import peers_topic
from echo_swarm.directory.memory import MemoryDirectory
from echo_swarm.envelope import seal
from echo_swarm.errors import RemoteError
from echo_swarm.identity import Identity, PeerId
from echo_swarm.manifest import Artifact, ArtifactKind
from echo_swarm.records import PeerRecord
from echo_swarm.render import render_run_status
from echo_swarm.status import RunStatus, VersionTransfers
from echo_swarm.transfers import FaultReason
from echo_swarm.transport.base import Host
from echo_swarm.transport.hivemind import open_hivemind_host
from echo_swarm.transport.memory import MemoryNetwork
from echo_swarm.transport.rpc import RpcServer, typed
from echo_swarm.work import Role
from tests.support.hostile_http import Files, serving_files
from tests.swarm.support import stand_ins
from tests.swarm.support.node_harness import until
from tests.swarm.support.whole_run import WholeRun, make_run

pytestmark = pytest.mark.anyio

SIZE = 4 << 20
UPLOAD_MBIT = 4.0
"""Of the coordinator: slow enough for each source to be asked."""
NODES = ("one", "two")


@pytest.fixture
def anyio_backend() -> str:
    """The coordinator and hivemind run on asyncio."""
    return "asyncio"


class Loopback:
    """Hosts as in the real thing, each with a libp2p daemon of its own, in place of a network in memory."""

    def __init__(self) -> None:
        self.bootstrap: tuple[str, ...] = ()

    @asynccontextmanager
    async def host(self, identity: Identity) -> AsyncGenerator[Host]:
        listen = ("/ip4/127.0.0.1/tcp/0",)
        async with open_hivemind_host(identity, listen=listen, bootstrap=self.bootstrap) as host:
            self.bootstrap = self.bootstrap or host.addresses[:1]
            yield host


async def lie(stack: AsyncExitStack, run: WholeRun, artifact: Artifact, reason: FaultReason) -> PeerId:
    """Start a peer that says that it has the artifact, in the directory and when asked, and does this with pieces."""
    identity = Identity.from_seed(reason.encode().ljust(32, b"."))
    host = await stack.enter_async_context(run.network.host(identity))
    server = RpcServer(host, BLOB_PROTOCOL, max_request_bytes=1 << 16)

    async def have(_peer: PeerId, _request: HaveRequest) -> HaveReply:
        if reason is FaultReason.MALFORMED:
            return HaveReply(pieces=bytes(8), peers=())
        return HaveReply(pieces=PieceMap.full(artifact.piece_count).pack(), peers=())

    async def piece(_peer: PeerId, request: PieceRequest) -> PieceReply:
        if reason is FaultReason.WRONG_BYTES:
            return PieceReply(data=bytes(artifact.piece_length(request.index)))
        if reason is FaultReason.BROKEN_PROMISE:
            raise RemoteError(NOT_FOUND, "no such piece")
        if reason is FaultReason.HUNG_UP:
            await server.__aexit__(None, None, None)
        await anyio.sleep_forever()
        raise AssertionError

    server.method("have", typed(HaveRequest, have))
    server.method("piece", typed(PieceRequest, piece))
    await stack.enter_async_context(server)
    clock = SystemClock()
    record = PeerRecord(
        run_id=run.settings.run.id,
        role=Role.SEEDER,
        addresses=host.addresses[:16],
        held_version=0,
        artifact_digests=(artifact.digest,),
        issued_at=clock.wall_s(),
    )
    directory = MemoryDirectory(run.records, identity, clock)
    assert await directory.announce(peers_topic(run.settings.run.id), seal(identity, record), ttl_s=600)
    return host.peer_id


def random_weights(version: int, size_bytes: int = SIZE) -> bytes:
    """Weights that no piece of another version equals."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [size_bytes], "data_offsets": [0, size_bytes]}}).encode()
    return struct.pack("<Q", len(header)) + header + Random(version).randbytes(size_bytes)


def transfers_of(status: RunStatus, version: int) -> VersionTransfers | None:
    return next((entry for entry in status.transfers if entry.policy_version == version), None)


def shown(status: RunStatus) -> str:
    console = Console(width=80, file=io.StringIO())
    console.print(render_run_status(status))
    return cast(io.StringIO, console.file).getvalue()


async def test_each_liar_is_named_with_what_it_did_and_the_version_comes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stand_ins, "weights", random_weights)
    run = make_run(tmp_path)
    network = Loopback()
    run.network = cast(MemoryNetwork, network)
    run.trainer.hold()
    with serving_files() as files:
        run.settings = RunSettings(
            **{
                **dict(run.settings),
                "network": NetworkSection(max_upload_mbit=UPLOAD_MBIT),
                "publish": PublishSection(mirrors=(files.url,)),
            }
        )
        await _check(run, network, files)


async def _check(run: WholeRun, network: Loopback, files: Files) -> None:
    async with run.coordinator() as coordinator, AsyncExitStack() as stack:
        await until(lambda: coordinator.state.core.versions.published == 0)
        run.boot, artifact = network.bootstrap[0], _artifact(run)
        files.content[file_url("", run.settings.run.id, artifact.digest)] = _flipped(random_weights(0))
        kinds = set(FaultReason) - {FaultReason.BAD_SERVER}
        liars = {await lie(stack, run, artifact, reason): reason.value for reason in kinds}
        liars[PeerId(files.url)] = FaultReason.WRONG_BYTES.value
        for name in NODES:
            await stack.enter_async_context(run.node(name))

        def named() -> dict[str, str]:
            entry = transfers_of(coordinator.reporter.status(), 0)
            return {fault.source: fault.reason for fault in entry.faults if fault.source in liars} if entry else {}

        await until(lambda: named() == liars, f"{liars}")
        await until(lambda: (entry := transfers_of(coordinator.reporter.status(), 0)) and entry.whole == len(NODES))
        entry = transfers_of(coordinator.reporter.status(), 0)
        assert entry is not None and entry.nodes == 0
        assert not [fault for fault in entry.faults if fault.lie and fault.source not in liars]
        assert entry.bytes_coordinator + entry.bytes_peers == 2 * artifact.size_bytes
        assert entry.bytes_served is not None and entry.bytes_served >= entry.bytes_coordinator > 0
        text = shown(coordinator.reporter.status())
        assert all(peer[-8:] in text for peer in liars) and text.count("liar:") == 4 and text.count("failed:") == 2

        run.trainer.let_go()
        await until(lambda: (one := transfers_of(coordinator.reporter.status(), 1)) and one.all_s is not None)
        one = transfers_of(coordinator.reporter.status(), 1)
        assert one is not None and one.half_s is not None and one.all_s is not None
        assert (one.had, one.nodes) == (2, 2) and 0 <= one.half_s <= one.all_s


def _flipped(content: bytes) -> bytes:
    """One byte in each piece, so that whichever is asked for is wrong; the length is right."""
    changed = bytearray(content)
    for at in range(0, len(changed), 1 << 16):
        changed[at] ^= 1
    return bytes(changed)


def _artifact(run: WholeRun) -> Artifact:
    store = VersionStore(run.folder.store, run.settings.run.id)
    signed = store.manifest(0)
    store.close()
    assert signed is not None
    return next(a for a in signed.message.artifacts if a.kind is ArtifactKind.SAFETENSORS)
