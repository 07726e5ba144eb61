"""What every directory promises, run on each implementation."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import anyio
import pytest

from echo_swarm.clock import SystemClock
from echo_swarm.directory.base import Directory, head_topic, peers_topic
from echo_swarm.directory.dht import open_dht_directory
from echo_swarm.directory.memory import DirectoryStore, MemoryDirectory
from echo_swarm.directory.reading import newest_head, newest_peers
from echo_swarm.envelope import seal
from echo_swarm.errors import MalformedMessage
from echo_swarm.identity import Identity
from echo_swarm.records import HeadRecord, PeerRecord
from echo_swarm.transport.hivemind import open_hivemind_host
from echo_swarm.work import Role

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A directory and whose it is."""

    identity: Identity
    directory: Directory


@asynccontextmanager
async def memory_peers() -> AsyncGenerator[tuple[Peer, Peer]]:
    store = DirectoryStore()
    a, b = Identity.generate(), Identity.generate()
    yield (
        Peer(identity=a, directory=MemoryDirectory(store, a, SystemClock())),
        Peer(identity=b, directory=MemoryDirectory(store, b, SystemClock())),
    )


@asynccontextmanager
async def dht_peers() -> AsyncGenerator[tuple[Peer, Peer]]:
    a, b = Identity.generate(), Identity.generate()
    async with (
        open_hivemind_host(a, listen=LOOPBACK, many_peers=True) as first,
        open_dht_directory(first, a, client_mode=False) as first_directory,
        open_hivemind_host(b, listen=(), bootstrap=first.addresses) as second,
        open_dht_directory(second, b, client_mode=True, bootstrap=first.addresses) as second_directory,
        open_hivemind_host(Identity.generate(), listen=LOOPBACK, bootstrap=first.addresses) as third,
        open_dht_directory(third, Identity.generate(), client_mode=False, bootstrap=first.addresses),
    ):
        yield Peer(identity=a, directory=first_directory), Peer(identity=b, directory=second_directory)


CASES: dict[str, tuple[str, Callable[[], AbstractAsyncContextManager[tuple[Peer, Peer]]]]] = {
    "memory-asyncio": ("asyncio", memory_peers),
    "memory-trio": ("trio", memory_peers),
    "dht-asyncio": ("asyncio", dht_peers),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def anyio_backend(case: str) -> str:
    return CASES[case][0]


@pytest.fixture(scope="module")
async def peers(case: str, anyio_backend: str) -> AsyncGenerator[tuple[Peer, Peer]]:
    async with CASES[case][1]() as both:
        for one in both:
            await in_touch(one)
        yield both


async def in_touch(one: Peer) -> None:
    """Wait until others take its records: for a moment after its start a peer may know nobody."""
    with anyio.fail_after(120):
        record = peer_record(one.identity, "f" * 32)
        while not await one.directory.announce(peers_topic("f" * 32), record, ttl_s=60):  # noqa: ASYNC110
            await anyio.sleep(0.2)


@pytest.fixture
def run_id() -> str:
    """A run of its own for each test, so that they can share a network."""
    return Identity.generate().public_key[:16].hex()


pytestmark = pytest.mark.anyio


def head(identity: Identity, run_id: str, version: int, issued_at: float | None = None) -> bytes:
    record = HeadRecord(
        run_id=run_id,
        policy_version=version,
        manifest_digest=bytes([version % 256]) * 32,
        issued_at=time.time() if issued_at is None else issued_at,
    )
    return seal(identity, record)


def peer_record(identity: Identity, run_id: str, *, addresses: int = 0, issued_at: float = 1.0) -> bytes:
    record = PeerRecord(
        run_id=run_id,
        role=Role.INFERENCE,
        addresses=tuple("/" + "x" * 500 for _ in range(addresses)),
        held_version=None,
        artifact_digests=(),
        issued_at=issued_at,
    )
    return seal(identity, record)


async def test_what_one_peer_announces_the_other_finds(peers: tuple[Peer, Peer], run_id: str) -> None:
    a, b = peers
    record = head(a.identity, run_id, 3)
    assert await a.directory.announce(head_topic(run_id), record, ttl_s=60)
    assert await b.directory.find(head_topic(run_id)) == [record]
    assert await a.directory.find(head_topic(run_id)) == [record]


async def test_each_peer_has_one_record_a_topic_and_the_last_one_counts(peers: tuple[Peer, Peer], run_id: str) -> None:
    a, b = peers
    topic = peers_topic(run_id)
    for issued_at in range(5):
        assert await b.directory.announce(topic, peer_record(b.identity, run_id, issued_at=issued_at), ttl_s=600)
    assert await a.directory.announce(topic, peer_record(a.identity, run_id), ttl_s=60)
    found = newest_peers(await a.directory.find(topic), run_id=run_id)
    assert {peer: record.issued_at for peer, record in found.items()} == {
        a.identity.peer_id: 1.0,
        b.identity.peer_id: 4.0,
    }


async def test_a_later_record_wins_even_if_it_expires_sooner(peers: tuple[Peer, Peer], run_id: str) -> None:
    a, b = peers
    topic = head_topic(run_id)
    assert await a.directory.announce(topic, head(a.identity, run_id, 7), ttl_s=3600)
    assert await a.directory.announce(topic, head(a.identity, run_id, 8), ttl_s=60)
    newest = newest_head(await b.directory.find(topic), run_id=run_id, run_key=a.identity.public_key)
    assert newest is not None
    assert newest.policy_version == 8


async def test_an_unknown_topic_has_no_records(peers: tuple[Peer, Peer], run_id: str) -> None:
    assert await peers[1].directory.find(head_topic(run_id)) == []


async def test_others_records_and_rubbish_cannot_be_announced(peers: tuple[Peer, Peer], run_id: str) -> None:
    a, b = peers
    forged = bytearray(head(b.identity, run_id, 1))
    forged[-1] ^= 1
    for bad in (head(a.identity, run_id, 1), bytes(forged), b"rubbish", b"", b"x" * (1 << 20)):
        with pytest.raises(MalformedMessage):
            await b.directory.announce(head_topic(run_id), bad, ttl_s=60)
    assert await a.directory.find(head_topic(run_id)) == []


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("-inf")])
async def test_a_record_that_is_expired_already_is_not_taken(
    peers: tuple[Peer, Peer], run_id: str, ttl_s: float
) -> None:
    a, b = peers
    assert not await a.directory.announce(head_topic(run_id), head(a.identity, run_id, 1), ttl_s=ttl_s)
    assert await b.directory.find(head_topic(run_id)) == []


async def test_a_lifetime_of_ten_years_is_cut_to_what_is_allowed(peers: tuple[Peer, Peer], run_id: str) -> None:
    a, b = peers
    assert await a.directory.announce(head_topic(run_id), head(a.identity, run_id, 1), ttl_s=10 * 365 * 86_400)
    assert len(await b.directory.find(head_topic(run_id))) == 1


async def test_a_peer_that_announces_under_ever_new_topics_is_stopped_and_others_are_not(
    peers: tuple[Peer, Peer], run_id: str
) -> None:
    a, b = peers
    taken = 0
    for i in range(30):
        name = f"{run_id}/{i}"
        taken += await b.directory.announce(name, peer_record(b.identity, run_id, addresses=10), ttl_s=60)
    assert 5 <= taken <= 15
    assert await a.directory.announce(head_topic(run_id), head(a.identity, run_id, 1), ttl_s=60)
    assert len(await b.directory.find(head_topic(run_id))) == 1
