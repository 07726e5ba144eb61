"""Which addresses are dialled because somebody said so: none that is nearer than the run (docs/adr/0023).

Real nodes' parts in a network in memory, and real hosts on loopback with a listener that nobody may knock at.
"""

import socket
import threading
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import pytest

from echo_coordinator.key_watch import KeyWatch
from echo_node.config import NodeConfig
from echo_node.following import Following
from echo_node.peers import Peers, near_of
from echo_swarm.checkpoint.reach import Reach, reach_of_run
from echo_swarm.clock import SystemClock
from echo_swarm.directory.base import peers_topic
from echo_swarm.directory.memory import MemoryDirectory
from echo_swarm.envelope import seal
from echo_swarm.errors import PeerUnreachable
from echo_swarm.identity import Identity, PeerId
from echo_swarm.invite import Invite
from echo_swarm.records import PeerRecord
from echo_swarm.succession import RunKeys
from echo_swarm.transport.base import Host
from echo_swarm.transport.hivemind import open_hivemind_host
from echo_swarm.work import Role
from tests.swarm.support.node_harness import Swarm, make_swarm

pytestmark = pytest.mark.anyio

NAMES = ("dns4/localhost", "dnsaddr/example.org")
METADATA = "ip4/169.254.169.254"
PUBLIC, PRIVATE, LOOPBACK = "ip4/8.8.8.8", "ip4/192.168.1.1", "ip6/::1"


def peers_of(swarm: Swarm, host: Host, near: Reach) -> Peers:
    """What a host that joins hears of others in the directory."""
    return Peers(
        host=host,
        directory=MemoryDirectory(swarm.directory, Identity.generate(), SystemClock()),
        run_id=swarm.coordinator.run_id,
        coordinator=swarm.coordinator.identity.peer_id,
        near=near,
        clock=SystemClock(),
    )


async def announce(swarm: Swarm, identity: Identity, role: Role, hosts: Sequence[str], port: int = 80) -> None:
    """Let a peer say of itself that it can be dialled there."""
    record = PeerRecord(
        run_id=swarm.coordinator.run_id,
        role=role,
        addresses=tuple(f"/{host}/tcp/{port}/p2p/{identity.peer_id}" for host in hosts),
        held_version=3,
        artifact_digests=(),
        issued_at=SystemClock().wall_s(),
    )
    directory = MemoryDirectory(swarm.directory, identity, SystemClock())
    await directory.announce(peers_topic(swarm.coordinator.run_id), seal(identity, record), ttl_s=60)


@pytest.mark.parametrize(
    ("near", "dialled"),
    [
        (Reach.GLOBAL, [PUBLIC]),
        (Reach.PRIVATE, [PUBLIC, PRIVATE]),
        (Reach.LOOPBACK, [PUBLIC, PRIVATE, LOOPBACK]),
    ],
)
@pytest.mark.parametrize("role", [Role.INFERENCE, Role.COORDINATOR])
async def test_what_a_peer_calls_its_own_address_is_dialled_only_where_the_run_is_as_near_and_names_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Role, near: Reach, dialled: list[str]
):
    """A stranger's record could else make a volunteer's machine knock at doors of its own network."""
    swarm, liar, tried = make_swarm(tmp_path), Identity.generate(), []
    await announce(swarm, liar, role, (METADATA, *NAMES, PUBLIC, PRIVATE, LOOPBACK))
    async with swarm.network.host(Identity.generate(), outbound_only=True) as host:

        async def connect(address: str, *, timeout_s: float) -> PeerId:
            tried.append(address.partition("/tcp/")[0][1:])
            raise PeerUnreachable(address)

        monkeypatch.setattr(host, "connect", connect)
        if role is Role.INFERENCE:
            assert await peers_of(swarm, host, near).holders(3) == []
        else:
            # Whoever calls itself a coordinator is asked about the run's key.
            invite = swarm.coordinator.invite()
            keys = RunKeys(invite.run, invite.key)
            following = Following(host, invite, keys, path=None, say=print, near=near, clock=SystemClock())
            following.directory = MemoryDirectory(swarm.directory, liar, SystemClock())
            assert not await following.look()
    assert tried == dialled


@pytest.mark.parametrize(
    ("near", "given"),
    [(Reach.GLOBAL, [*NAMES, PUBLIC]), (Reach.PRIVATE, [*NAMES, PUBLIC, PRIVATE])],
)
async def test_a_coordinator_that_moved_is_dialled_at_names_too_and_no_nearer_than_its_run(
    tmp_path: Path, near: Reach, given: list[str]
):
    swarm = make_swarm(tmp_path)
    hosts = (METADATA, *NAMES, PUBLIC, PRIVATE, LOOPBACK)
    await announce(swarm, swarm.coordinator.identity, Role.COORDINATOR, hosts)
    async with swarm.network.host(Identity.generate(), outbound_only=True) as host:
        found = await peers_of(swarm, host, near).coordinator_addresses()
    assert [address.partition("/tcp/")[0][1:] for address in found] == given


@pytest.mark.parametrize(
    ("boot", "private_peers", "near"),
    [
        (["ip4/8.8.8.8"], False, Reach.GLOBAL),
        (["ip4/127.0.0.1", "ip4/192.168.1.5", "ip4/8.8.8.8"], False, Reach.GLOBAL),
        (["dns4/run.example.org"], False, Reach.GLOBAL),
        (["dns4/run.example.org"], True, Reach.PRIVATE),
        (["ip4/127.0.0.1", "ip4/192.168.1.5"], False, Reach.PRIVATE),
        (["ip4/127.0.0.1"], False, Reach.LOOPBACK),
        (["ip4/127.0.0.1"], True, Reach.LOOPBACK),
    ],
)
def test_a_run_is_as_near_as_the_farthest_address_of_its_invite(
    tmp_path: Path, boot: list[str], private_peers: bool, near: Reach
):
    key = Identity.generate()
    addresses = tuple(f"/{host}/tcp/1/p2p/{key.peer_id}" for host in boot)
    config = NodeConfig(state_dir=tmp_path, private_peers=private_peers)
    assert near_of(config, Invite(run="ab" * 16, key=key.public_key, boot=addresses)) is near


@pytest.mark.parametrize(
    ("own", "dialled"),
    [(PUBLIC, [PUBLIC]), ("dns4/run.example.org", [PUBLIC]), ("ip4/192.168.1.7", [PUBLIC, PRIVATE])],
)
async def test_a_coordinator_looks_for_rivals_no_nearer_than_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, dialled: list[str]
):
    swarm, liar, tried = make_swarm(tmp_path), Identity.generate(), []
    await announce(swarm, liar, Role.COORDINATOR, (METADATA, *NAMES, PUBLIC, PRIVATE, LOOPBACK))
    directory = MemoryDirectory(swarm.directory, liar, SystemClock())
    keys = RunKeys(swarm.coordinator.run_id, swarm.coordinator.identity.public_key)
    async with swarm.network.host(swarm.coordinator.identity) as host:

        async def connect(address: str, *, timeout_s: float) -> PeerId:
            tried.append(address.partition("/tcp/")[0][1:])
            raise PeerUnreachable(address)

        monkeypatch.setattr(host, "connect", connect)
        monkeypatch.setattr(type(host), "addresses", (f"/{own}/tcp/1/p2p/{host.peer_id}",))
        await KeyWatch(keys, host, directory, print).look()
    assert tried == dialled


@contextmanager
def trap() -> Generator[tuple[int, list[str]]]:
    """A server of this machine that notes who connects; its port, and the first addresses of who did."""
    met: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    connection, (where, _) = server.accept()
                except OSError:
                    return
                met.append(where)
                connection.close()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1], met
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10)


@asynccontextmanager
async def connected() -> AsyncGenerator[tuple[Host, Host]]:
    """Two real hosts; the second one has dialled the first."""
    async with (
        open_hivemind_host(Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",)) as first,
        open_hivemind_host(Identity.generate(), listen=(), bootstrap=first.addresses) as second,
    ):
        yield first, second


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize(("boot", "knocks"), [("dns4/localhost", False), ("ip4/127.0.0.1", True)])
async def test_a_server_of_a_volunteers_machine_is_not_knocked_at_because_a_stranger_says_so(
    tmp_path: Path, boot: str, knocks: bool
):
    """The same address as another one's: in a run on loopback it is dialled, in one with a name it is not."""
    swarm, liar = make_swarm(tmp_path), Identity.generate()
    with trap() as (port, met):
        async with connected() as (first, host):
            near = reach_of_run([f"/{boot}/tcp/1/p2p/{first.peer_id}"])
            await announce(swarm, liar, Role.INFERENCE, ("ip4/127.0.0.1",), port=port)
            assert await peers_of(swarm, host, near).holders(3) == []
            with anyio.fail_after(30):
                while knocks and not met:  # noqa: ASYNC110 - the listener is a thread
                    await anyio.sleep(0.01)
    assert bool(met) == knocks
