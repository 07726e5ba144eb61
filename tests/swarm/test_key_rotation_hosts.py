"""A run gets a new key, over real hosts and a real DHT on loopback; stand-ins for the children."""

import socket
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from echo_node import following
from echo_node.config import Role
from echo_node.node import Node
from echo_node.seeder import Seeder
from echo_swarm.errors import AnotherPeer
from echo_swarm.identity import Identity
from echo_swarm.transport.hivemind import open_hivemind_host
from tests.swarm.support.node_harness import until
from tests.swarm.support.rotation import make_keyed_run, rotated
from tests.swarm.support.whole_run import WholeRun
from tests.swarm.test_moved_run import LOOPBACK, accepted, coordinating, outliving, taking_part

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def at_one_port(run: WholeRun) -> WholeRun:
    """The run at an address that stays."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        listen = (f"/ip4/127.0.0.1/tcp/{probe.getsockname()[1]}",)
    network = run.settings.network.model_copy(update={"listen": listen})
    return replace(run, settings=run.settings.model_copy(update={"network": network}))


async def test_who_answers_in_place_of_another_is_told(tmp_path: Path):
    async with (
        open_hivemind_host(Identity.generate(), listen=LOOPBACK) as one,
        open_hivemind_host(Identity.generate(), listen=LOOPBACK) as other,
    ):
        where = one.addresses[0].rpartition("/p2p/")[0]
        for _ in range(2):  # The second time p2pd only says that it holds back.
            with pytest.raises(AnotherPeer, match="another identity answers there") as caught:
                await other.connect(f"{where}/p2p/{Identity.from_seed(bytes(32)).peer_id}", timeout_s=10)
            assert caught.value.found == one.peer_id
        assert await other.connect(one.addresses[0], timeout_s=10) == one.peer_id


async def test_nodes_find_the_new_coordinator_at_the_old_address_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(following, "AGAIN_S", 1.0)
    run = at_one_port(make_keyed_run(tmp_path))
    async with anyio.create_task_group() as tasks:
        async with coordinating(run) as coordinator:
            old = coordinator.invite
            await until(lambda: coordinator.state.core.versions.published is not None)
            async with taking_part(tmp_path / "stopped", old) as stopped:
                await until(lambda: accepted(stopped) >= 4)
            node: Node | Seeder = await tasks.start(outliving, tmp_path / "a", old, Role.INFERENCE)
            seeder: Node | Seeder = await tasks.start(outliving, tmp_path / "s", old, Role.SEEDER)
            await until(lambda: accepted(node) >= 4 and seeder.link.is_up)
        now = rotated(run)
        before = accepted(node)
        async with coordinating(now) as coordinator:
            assert coordinator.invite.coordinator == now.identity.peer_id != old.coordinator
            await until(lambda: accepted(node) >= before + 8, "the running node goes on")
            await until(lambda: seeder.link.joins >= 2 and seeder.link.is_up, "the seeder is back")
            assert now.identity.peer_id in node._seams.directory.peers, "the DHT goes through the new one, too"
            for name in ("stopped", "new"):
                async with taking_part(tmp_path / name, old) as late:
                    worked = accepted(late)
                    await until(lambda late=late, worked=worked: accepted(late) >= worked + 4, name)
        tasks.cancel_scope.cancel()
