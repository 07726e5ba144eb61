"""The DHT directory against hostile records, late bootstraps and lost peers."""

import sys
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from echo_swarm import codec
from echo_swarm.directory.base import head_topic, peers_topic
from echo_swarm.directory.dht import DhtDirectory, open_dht_directory
from echo_swarm.directory.reading import newest_head, newest_peers
from echo_swarm.envelope import seal
from echo_swarm.identity import Identity
from echo_swarm.records import HeadRecord, PeerRecord
from echo_swarm.transport.hivemind import HivemindHost, open_hivemind_host
from echo_swarm.work import Role

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
RUN = "0123456789abcdef" * 2

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    identity: Identity
    host: HivemindHost
    directory: DhtDirectory

    @property
    def node(self) -> Any:
        return self.directory._node


@asynccontextmanager
async def peer(
    bootstrap: tuple[str, ...] = (), *, identity: Identity | None = None, listen: tuple[str, ...] = LOOPBACK
) -> AsyncGenerator[Peer]:
    identity = identity or Identity.generate()
    async with (
        open_hivemind_host(identity, listen=listen) as host,
        open_dht_directory(host, identity, client_mode=not listen, bootstrap=bootstrap) as directory,
    ):
        yield Peer(identity=identity, host=host, directory=directory)


def peer_record(identity: Identity) -> bytes:
    return seal(
        identity,
        PeerRecord(
            run_id=RUN,
            role=Role.INFERENCE,
            addresses=(),
            held_version=None,
            artifact_digests=(),
            issued_at=time.time(),
        ),
    )


async def announced(one: Peer, topic: str, envelope: bytes, *, ttl_s: float) -> None:
    # Polled: nothing tells when an attach loop has come round.
    with anyio.fail_after(120):
        while not await one.directory.announce(topic, envelope, ttl_s=ttl_s):  # noqa: ASYNC110
            await anyio.sleep(0.2)


async def announce_until_taken(peers: list[Peer]) -> None:
    for one in peers:
        await announced(one, peers_topic(RUN), peer_record(one.identity), ttl_s=60)


async def find_all(one: Peer, expected: set[str]) -> None:
    with anyio.fail_after(120):
        while set(newest_peers(await one.directory.find(peers_topic(RUN)), run_id=RUN)) != expected:  # noqa: ASYNC110
            await anyio.sleep(0.2)


async def test_peers_started_together_form_one_network() -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(peer())
        others = [await stack.enter_async_context(peer(first.host.addresses)) for _ in range(3)]
        everybody = [first, *others]
        await announce_until_taken(everybody)
        for one in everybody:
            await find_all(one, {p.host.peer_id for p in everybody})


async def test_peers_that_start_before_their_bootstrap_join_once_it_is_there() -> None:
    identity = Identity.generate()
    async with AsyncExitStack() as stack:
        async with peer(identity=identity) as short:
            address = short.host.addresses[0]
        port = address.split("/")[4]
        others = [await stack.enter_async_context(peer((address,))) for _ in range(2)]
        assert not await others[0].directory.announce(peers_topic(RUN), peer_record(others[0].identity), ttl_s=60)
        listen = (f"/ip4/127.0.0.1/tcp/{port}",)
        late = await stack.enter_async_context(peer(identity=identity, listen=listen))
        everybody = [late, *others]
        await announce_until_taken(others)
        await announce_until_taken([late])
        for one in everybody:
            await find_all(one, {p.host.peer_id for p in everybody})


async def store_raw(
    one: Peer, *, signer: Identity, value: bytes, expires_in_s: float, sign: Identity | None = None
) -> bool:
    """Do what a hostile peer does: send a record of `signer` that `sign` signed, straight to the first peer."""
    from hivemind.dht.routing import DHTID
    from hivemind.dht.validation import DHTRecord

    from echo_swarm.directory.validator import SignedRecordValidator, subkey_of

    target = next(iter(one.node.protocol.routing_table.uid_to_peer_id.values()))
    key = DHTID.generate(source=head_topic(RUN))
    expires_at = time.time() + expires_in_s
    record = DHTRecord(key.to_bytes(), subkey_of(signer.public_key), value, expires_at)
    if sign is not None:
        validator = SignedRecordValidator(sign)
        if sign is not signer:
            record = DHTRecord(record.key, subkey_of(sign.public_key), value, expires_at)
        value = validator.sign_value(record)
    answer = await one.node.protocol.call_store(target, [key], [value], expires_at, subkeys=[signer.public_key])
    return bool(answer and answer[0])


async def test_only_the_owner_can_store_under_its_name_and_only_within_bounds() -> None:
    async with peer() as victim, peer(victim.host.addresses) as attacker:
        me, other = attacker.identity, victim.identity
        payload = codec.encode(b"record")
        # The control: an honest record goes through.
        assert await store_raw(attacker, signer=me, sign=me, value=payload, expires_in_s=60)
        refused = {
            "signed by somebody else": {"signer": other, "sign": me, "value": payload, "expires_in_s": 60},
            "unsigned": {"signer": other, "value": payload, "expires_in_s": 60},
            "garbage": {"signer": me, "value": b"\xdd\xff\xff\xff\xff", "expires_in_s": 60},
            "expired": {"signer": me, "sign": me, "value": payload, "expires_in_s": -60},
            "ten years": {"signer": me, "sign": me, "value": payload, "expires_in_s": 3e8},
            "for ever": {"signer": me, "sign": me, "value": payload, "expires_in_s": float("inf")},
            "never": {"signer": me, "sign": me, "value": payload, "expires_in_s": float("nan")},
            "a megabyte": {"signer": me, "sign": me, "value": codec.encode(bytes(1 << 20)), "expires_in_s": 90},
        }
        for name, attempt in refused.items():
            assert not await store_raw(attacker, **attempt), name
        assert len(victim.node.protocol.storage.quota) == 1


async def flood(one: Peer, records: list[tuple[Identity, str]], *, size: int) -> int:
    """Send a record of each signer under each topic straight to the first peer; return how many it took."""
    from hivemind.dht.routing import DHTID
    from hivemind.dht.validation import DHTRecord

    from echo_swarm.directory.validator import SignedRecordValidator, subkey_of

    target = next(iter(one.node.protocol.routing_table.uid_to_peer_id.values()))
    expires_at, payload, taken = time.time() + 600, codec.encode(bytes(size)), 0
    for begin in range(0, len(records), 250):
        part = [(signer, DHTID.generate(source=topic)) for signer, topic in records[begin : begin + 250]]
        values = [
            SignedRecordValidator(signer).sign_value(
                DHTRecord(key.to_bytes(), subkey_of(signer.public_key), payload, expires_at)
            )
            for signer, key in part
        ]
        keys, owners = [key for _, key in part], [signer.public_key for signer, _ in part]
        answer = await one.node.protocol.call_store(target, keys, values, expires_at, subkeys=owners)
        taken += sum(map(bool, answer or ()))
    return taken


async def test_thousands_of_records_of_one_signer_or_of_many_neither_grow_nor_hide_the_directory() -> None:
    from echo_swarm.directory.rules import MAX_BYTES, MAX_BYTES_PER_TOPIC, MAX_TOPICS_PER_SIGNER, Refusal

    def head(version: int) -> bytes:
        record = HeadRecord(run_id=RUN, policy_version=version, manifest_digest=bytes(32), issued_at=time.time())
        return seal(owner.identity, record)

    async with peer() as victim, peer(victim.host.addresses) as owner, peer(victim.host.addresses) as attacker:
        storage = victim.node.protocol.storage
        await announced(owner, head_topic(RUN), head(1), ttl_s=60)
        # One signer under ever new topics.
        mine = [(attacker.identity, f"topic {i}") for i in range(2000)]
        assert await flood(attacker, mine, size=700) == MAX_TOPICS_PER_SIGNER
        # Many signers under the one topic that every node reads.
        many = [(Identity.generate(), head_topic(RUN)) for _ in range(2500)]
        assert await flood(attacker, many, size=1000) < MAX_BYTES_PER_TOPIC // 1000
        assert storage.refused[Refusal.TOPIC_FULL] > 400
        # And under many topics, until nothing more fits.
        elsewhere = [(Identity.generate(), f"other topic {i % 50}") for i in range(1500)]
        assert await flood(attacker, elsewhere, size=1000) < (MAX_BYTES - MAX_BYTES_PER_TOPIC) // 1000 + 1
        assert storage.refused[Refusal.FULL] > 0 and len(storage.quota) < MAX_BYTES // 1000 + MAX_TOPICS_PER_SIGNER
        # The owner's record is still there, and can still be replaced.
        await announced(owner, head_topic(RUN), head(2), ttl_s=60)
        found = newest_head(
            await attacker.directory.find(head_topic(RUN)), run_id=RUN, run_key=owner.identity.public_key
        )
        assert found is not None and found.policy_version == 2


async def test_somebody_elses_old_record_cannot_be_given_a_later_expiry() -> None:
    from hivemind.dht.routing import DHTID

    async with peer() as victim, peer(victim.host.addresses) as owner, peer(victim.host.addresses) as attacker:
        record = seal(
            owner.identity, HeadRecord(run_id=RUN, policy_version=1, manifest_digest=bytes(32), issued_at=1.0)
        )
        await announced(owner, head_topic(RUN), record, ttl_s=30)
        key = DHTID.generate(source=head_topic(RUN))
        stored = victim.node.protocol.storage.get(key).value.get(owner.identity.public_key)
        attempts = {"later": stored.expiration_time + 600, "other topic": stored.expiration_time}
        for name, expires_at in attempts.items():
            where = key if name == "later" else DHTID.generate(source="elsewhere")
            answer = await attacker.node.protocol.call_store(
                victim.node.p2p.peer_id, [where], [stored.value], expires_at, subkeys=[owner.identity.public_key]
            )
            assert answer == [False], name
        assert await attacker.directory.find(head_topic(RUN)) == [record]


async def test_a_restarted_publisher_replaces_a_record_that_would_outlive_its_new_one() -> None:
    identity = Identity.generate()

    def head(version: int) -> bytes:
        return seal(
            identity,
            HeadRecord(run_id=RUN, policy_version=version, manifest_digest=bytes(32), issued_at=time.time()),
        )

    async with peer() as first:
        async with peer(first.host.addresses, identity=identity) as publisher:
            await announced(publisher, head_topic(RUN), head(7), ttl_s=3600)
        async with peer(first.host.addresses, identity=identity) as publisher:
            await announced(publisher, head_topic(RUN), head(8), ttl_s=60)
        newest = newest_head(await first.directory.find(head_topic(RUN)), run_id=RUN, run_key=identity.public_key)
        assert newest is not None
        assert newest.policy_version == 8


def test_storage_holds_a_bounded_share_of_a_hundred_thousand_records_and_renewals_leave_no_trace() -> None:
    from hivemind.dht.routing import DHTID

    from echo_swarm.directory.rules import MAX_TOPICS_PER_SIGNER, Refusal
    from echo_swarm.directory.validator import BoundedStorage

    storage = BoundedStorage()
    now = time.time()
    flooder, other = b"f" * 32, b"o" * 32
    for i in range(100_000):
        storage.store(DHTID(i), b"x" * 700, now + 60, subkey=flooder)
    assert len(storage) == len(storage.quota) == MAX_TOPICS_PER_SIGNER
    assert storage.refused == {Refusal.SIGNER_FULL: 100_000 - MAX_TOPICS_PER_SIGNER}
    for i in range(5000):
        assert storage.store(DHTID(5), b"y", now + 60 + i / 1000, subkey=other)
        assert not storage.store(DHTID(5), b"z", now + 60, subkey=other)
    topic: Any = storage.get(DHTID(5))
    assert topic.value.get(other).value == b"y"
    assert len(topic.value.expiration_heap) < 100
    assert len(storage.expiration_heap) < 300
    assert not storage.store(DHTID(6), b"no owner", now + 60)


CROWD = Path(__file__).with_name("directory_crowd_child.py")
CROWDS, CROWD_PEERS = 1, 8
"""Of the test below. Eight of 25 are the 200 of field case 9, and take minutes."""


async def test_peers_that_were_killed_hide_no_record_from_a_newcomer() -> None:
    """As below, with peers that were really there: a process with their helpers is killed."""
    async with peer() as old:
        for _ in range(CROWDS):
            command = [sys.executable, str(CROWD), str(CROWD_PEERS), old.host.addresses[0]]
            async with await anyio.open_process(command, stderr=None) as crowd:
                assert crowd.stdout is not None
                with anyio.fail_after(300):
                    assert (await crowd.stdout.receive()).strip() == b"ready"
                crowd.kill()
        assert len(old.directory.peers) >= min(CROWDS * CROWD_PEERS, 20), "they are not there to be asked"
        await a_newcomer_finds_what_is_published(old)


async def a_newcomer_finds_what_is_published(old: Peer) -> None:
    async with peer(old.host.addresses) as publisher:
        head = HeadRecord(run_id=RUN, policy_version=7, manifest_digest=bytes(32), issued_at=time.time())
        await announced(publisher, head_topic(RUN), seal(publisher.identity, head), ttl_s=300)
        async with peer(old.host.addresses) as fresh:
            found = await fresh.directory.find(head_topic(RUN))
            record = newest_head(found, run_id=RUN, run_key=publisher.identity.public_key)
            assert record is not None and record.policy_version == 7


async def test_two_hundred_dead_peers_in_a_routing_table_hide_no_record_from_a_newcomer() -> None:
    """What a peer that lived long is left with after many that came for a moment and were killed."""
    async with peer() as old:
        from hivemind.dht.routing import DHTID
        from hivemind.p2p import PeerID

        for _ in range(200):
            gone = Identity.generate()
            old.node.protocol.routing_table.add_or_update_node(DHTID.generate(), PeerID.from_base58(gone.peer_id))
        assert len(old.directory.peers) > 50
        await a_newcomer_finds_what_is_published(old)
