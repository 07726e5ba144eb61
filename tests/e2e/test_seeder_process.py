"""A real seeder beside a real coordinator: killed in the middle of a download, and left alone without a coordinator."""

import json
import re
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from echo_node.hosts import open_network
from echo_node.peers import Peers
from echo_swarm.checkpoint.blob import ask_manifest
from echo_swarm.checkpoint.fetch import Fetcher
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.checkpoint.trust import TrustedHead
from echo_swarm.clock import SystemClock
from echo_swarm.identity import Identity, PeerId
from echo_swarm.invite import Invite, parse
from echo_swarm.manifest import ArtifactKind
from tests.e2e.support.commands import COORDINATOR, NODE, Running, call, running
from tests.e2e.support.models import write_model
from tests.e2e.support.swarm import Swarm, make_swarm

SLOW_MBIT = "2"


@pytest.fixture
def swarm(tmp_path: Path) -> Swarm:
    write_model(tmp_path / "model", hidden_size=128, intermediate_size=512, num_hidden_layers=4, head_dim=64)
    return make_swarm(tmp_path, tmp_path / "model")


@contextmanager
def seeding(swarm: Swarm, invite: str, *options: str, log: str) -> Generator[Running]:
    where = ["--state-dir", str(swarm.folder / "seeder"), "--listen", "/ip4/127.0.0.1/tcp/0"]
    with running(
        NODE, "join", "--role", "seeder", *where, *options, invite, log=swarm.folder / f"{log}.log"
    ) as command:
        yield command


def told(swarm: Swarm, name: str) -> dict[str, Any]:
    """What a node last wrote down about itself."""
    path = next((swarm.folder / name / "runs").glob("*/status.json"), None)
    return json.loads(path.read_text()) if path else {}


def has_fetched(swarm: Swarm) -> bool:
    files = list((swarm.folder / "seeder" / "runs").glob("*/v00000000/*.pieces"))
    return any(path.stat().st_size > 32 for path in files)


async def fetch_through(invite: Invite, address: str, folder: Path) -> tuple[Path, dict[PeerId, int]]:
    """Join the network at the seeder's address alone, and get the newest version as a node does."""
    seeder = PeerId(address.rpartition("/")[2])
    alone = Invite(run=invite.run, key=invite.key, boot=(address,))
    async with open_network(Identity.generate(), alone, outbound_only=True) as network:
        peers = Peers(
            host=network.host,
            directory=network.directory,
            run_id=invite.run,
            coordinator=invite.coordinator,
            near=network.near,
            clock=SystemClock(),
        )
        with anyio.fail_after(60):
            while seeder not in await peers.holders(0):  # noqa: ASYNC110 - the directory is elsewhere
                await anyio.sleep(0.2)
        trusted = TrustedHead(run_id=invite.run, publisher_key=invite.key)
        signed = trusted.update(await ask_manifest(network.host, seeder, invite.run, timeout_s=10), 0.0)
        artifact = signed.message.artifact(ArtifactKind.SAFETENSORS)
        assert artifact is not None
        fetcher = Fetcher(network.host, VersionStore(folder, invite.run), coordinator=invite.coordinator)
        report = await fetcher.fetch(signed, artifact, lambda: peers.providers(artifact.digest))
        assert report.path is not None
        return report.path, report.bytes_by_source


def test_a_seeder_is_killed_resumes_and_stands_in_for_a_coordinator_that_is_gone(swarm: Swarm):
    with swarm.start() as coordinator:
        invite = swarm.invite()
        with seeding(swarm, invite, "--max-download", SLOW_MBIT, log="seeder-1") as seeder:
            seeder.wait_for("some pieces", lambda: has_fetched(swarm))
            assert seeder.end(signal.SIGKILL) == -signal.SIGKILL
            assert seeder.left_behind(timeout_s=10) == []
        with seeding(swarm, invite, log="seeder-2") as seeder:
            seeder.wait_for("version 0", lambda: told(swarm, "seeder").get("held_versions") == [0])
            status, published = told(swarm, "seeder"), swarm.root / "store" / parse(invite).run / "v00000000"
            weights = (published / "model.safetensors").read_bytes()
            assert 0 < status["bytes_fetched_coordinator"] < len(weights)
            (row,) = call(NODE, "status", "--json", "--state-dir", swarm.folder / "seeder").json()
            assert (row["role"], row["held_versions"], row["live"]) == ("seeder", [0], True)
            assert not [p for p in seeder.look() if "backends" in " ".join(p.cmdline())]

            coordinator.wait_for("the seeder", lambda: (n := swarm.node("seeder")) is not None and n.held_version == 0)
            run = swarm.status()
            assert run is not None and run.nodes[0].role == "seeder" and not run.nodes[0].outbound_only
            seen = call(COORDINATOR, "status", swarm.root).out
            assert "no node has joined yet" in seen and "from peers" in seen

            # The coordinator loses its files: a sampling node gets the version from the seeder.
            (published / "model.safetensors").unlink()
            with swarm.join("node", backend="scripted:mean_s=0.3,batch=4") as node:
                node.wait_for("the version", lambda: told(swarm, "node").get("held_version") == 0)
                assert told(swarm, "node")["bytes_fetched_coordinator"] == 0
                assert told(swarm, "node")["bytes_fetched_peers"] == len(weights)
                node.end(signal.SIGKILL)

            # The coordinator is gone: the seeder is the way into the network, and has it all.
            coordinator.end(signal.SIGKILL)
            (address,) = re.findall(r"reached at (/ip4/127.0.0.1/\S+?),", seeder.output())
            path, sources = anyio.run(fetch_through, parse(invite), address, swarm.folder / "copy")
            assert path.read_bytes() == weights
            assert sources == {PeerId(swarm.peer_id("seeder")): len(weights)}
            assert seeder.end(signal.SIGTERM) == 0
            assert "seeded for" in seeder.output() and "Traceback" not in seeder.output()
