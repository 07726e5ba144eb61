"""A run's folder copied to another place, over real hosts and a real DHT on loopback; stand-ins for the children."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from anyio.abc import TaskStatus

from echo_coordinator.commands.network import open_network as open_coordinator
from echo_coordinator.coordinator import Children, Coordinator, run_coordinator
from echo_node.backends.options import ScriptedOptions
from echo_node.config import NodeConfig, Role
from echo_node.hosts import open_network
from echo_node.node import Node, NodeSeams
from echo_node.seeder import Seeder, SeederSeams
from echo_swarm.checkpoint.known_peers import read_known
from echo_swarm.clock import SystemClock
from echo_swarm.identity import Identity
from echo_swarm.invite import Invite
from tests.swarm.support.node_harness import until
from tests.swarm.support.whole_run import WholeRun, inline_backend, make_run

pytestmark = pytest.mark.anyio

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def on_loopback(run: WholeRun) -> WholeRun:
    settings = run.settings
    network = settings.network.model_copy(update={"listen": LOOPBACK})
    return replace(run, settings=settings.model_copy(update={"network": network}))


@asynccontextmanager
async def coordinating(run: WholeRun) -> AsyncGenerator[Coordinator]:
    children = Children(open_trainer=run.trainer.open, open_scorers=run.scorers.open)
    async with (
        open_coordinator(run.settings, run.identity, read_known(run.folder.peers)) as (host, directory),
        run_coordinator(run.folder, run.settings, run.identity, host, directory, children) as coordinator,
    ):
        yield coordinator


@asynccontextmanager
async def taking_part(
    folder: Path, invite: Invite, role: Role = Role.INFERENCE, known: tuple[str, ...] = ()
) -> AsyncGenerator[Node | Seeder]:
    """A node or seeder that outlives coordinators."""
    identity = Identity.from_seed(folder.name.encode().ljust(32, b"."))
    lines: list[str] = []
    async with (
        open_network(identity, invite, listen=LOOPBACK, patience_s=60, known=known) as network,
        anyio.create_task_group() as tasks,
    ):
        config = NodeConfig(state_dir=folder, role=role)
        common = {
            "host": network.host,
            "directory": network.directory,
            "identity": identity,
            "clock": SystemClock(),
            "emit": lines.append,
        }
        if role is Role.SEEDER:
            peer: Node | Seeder = Seeder(config, invite, SeederSeams(**common))
        else:
            seams = NodeSeams(open_backend=lambda: inline_backend(ScriptedOptions(batch=4)), **common)
            peer = Node(config, invite, seams)
        tasks.start_soon(peer.run)
        try:
            yield peer
        except BaseException:
            print(f"{folder.name}: {peer.activity.headline}", *lines, sep="\n  ")
            raise
        tasks.cancel_scope.cancel()


def accepted(node: Node | Seeder) -> int:
    return node.status().accepted


async def outliving(folder: Path, invite: Invite, role: Role, *, task_status: TaskStatus[Node | Seeder]) -> None:
    """Run a peer in a task of its own, so that it lives on after the block that started it."""
    async with taking_part(folder, invite, role) as peer:
        task_status.started(peer)
        await anyio.sleep_forever()


async def test_a_node_finds_a_run_that_moved_through_the_peers_that_the_folder_remembers(tmp_path: Path):
    run = on_loopback(make_run(tmp_path))
    async with anyio.create_task_group() as tasks:
        async with coordinating(run) as coordinator:
            old = coordinator.invite
            await until(lambda: coordinator.state.core.versions.published is not None)
            node: Node | Seeder = await tasks.start(outliving, tmp_path / "a", old, Role.INFERENCE)
            await until(lambda: accepted(node) >= 4)
        assert any(address.startswith("/ip4/127.0.0.1/") for address in read_known(run.folder.peers))
        await until(lambda: "waiting for the coordinator" in node.activity.headline)
        moved = run.copied(tmp_path / "elsewhere")
        before = accepted(node)
        async with coordinating(moved) as coordinator:
            assert coordinator.invite.boot != old.boot
            assert coordinator.fence.own.message.number == 2
            await until(lambda: accepted(node) >= before + 8, "the node goes on by itself")
            assert node.link.joins == 2
        tasks.cancel_scope.cancel()


async def test_a_newcomer_with_the_old_invite_gets_in_through_a_peer_that_it_remembers(tmp_path: Path):
    run = on_loopback(make_run(tmp_path))
    async with anyio.create_task_group() as tasks:
        async with coordinating(run) as coordinator:
            old = coordinator.invite
            await until(lambda: coordinator.state.core.versions.published is not None)
            seeder: Node | Seeder = await tasks.start(outliving, tmp_path / "seeder", old, Role.SEEDER)
            await until(lambda: seeder.link.is_up)
            addresses = coordinator.state.core.roster.nodes()[0].addresses
        moved = run.copied(tmp_path / "elsewhere")
        async with coordinating(moved) as coordinator, taking_part(tmp_path / "b", old, known=addresses) as node:
            await until(lambda: accepted(node) >= 8, "the node finds the coordinator through the seeder")
            await until(lambda: seeder.link.joins == 2)
            assert coordinator.invite.boot != old.boot
        tasks.cancel_scope.cancel()
