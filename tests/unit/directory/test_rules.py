"""What a directory takes, and what a reader makes of it."""

import itertools

import pytest

from echo_swarm.clock import ManualClock
from echo_swarm.directory.announce import keep_announced
from echo_swarm.directory.base import head_topic
from echo_swarm.directory.memory import DirectoryStore, MemoryDirectory
from echo_swarm.directory.reading import newest_head, newest_peers
from echo_swarm.directory.rules import (
    MAX_BYTES,
    MAX_BYTES_PER_TOPIC,
    MAX_TOPICS_PER_SIGNER,
    MAX_TTL_S,
    RecordQuota,
    Refusal,
    clamp_ttl,
)
from echo_swarm.envelope import seal
from echo_swarm.identity import Identity
from echo_swarm.records import HeadRecord, PeerRecord
from echo_swarm.work import Role

RUN = "0123456789abcdef" * 2


def head(identity: Identity, version: int, *, run_id: str = RUN, issued_at: float = 1.0) -> bytes:
    return seal(
        identity,
        HeadRecord(run_id=run_id, policy_version=version, manifest_digest=bytes(32), issued_at=issued_at),
    )


def peer_record(identity: Identity, *, run_id: str = RUN, issued_at: float = 1.0) -> bytes:
    return seal(
        identity,
        PeerRecord(
            run_id=run_id,
            role=Role.INFERENCE,
            addresses=(),
            held_version=None,
            artifact_digests=(),
            issued_at=issued_at,
        ),
    )


def test_the_highest_version_is_the_newest_head_in_whatever_order_they_arrive() -> None:
    run, stranger = Identity.generate(), Identity.generate()
    records = [
        head(run, 7, issued_at=999.0),
        head(run, 8, issued_at=5.0),
        head(stranger, 99),
        head(run, 50, run_id="f" * 32),
        peer_record(run),
        b"rubbish",
    ]
    for order in itertools.permutations(records):
        newest = newest_head(order, run_id=RUN, run_key=run.public_key)
        assert newest is not None
        assert newest.policy_version == 8


def test_no_head_of_the_run_means_none() -> None:
    assert newest_head([], run_id=RUN, run_key=bytes(32)) is None
    assert newest_head([head(Identity.generate(), 1)], run_id=RUN, run_key=bytes(32)) is None


def test_a_peer_counts_once_with_the_record_it_issued_last() -> None:
    peer = Identity.generate()
    records = [peer_record(peer, issued_at=at) for at in (3.0, 5.0, 4.0)]
    for order in itertools.permutations(records):
        found = newest_peers(order, run_id=RUN)
        assert [record.issued_at for record in found.values()] == [5.0]
        assert list(found) == [peer.peer_id]


@pytest.mark.parametrize(
    ("asked", "granted"),
    [
        (60, 60),
        (MAX_TTL_S, MAX_TTL_S),
        (1e12, MAX_TTL_S),
        (float("inf"), MAX_TTL_S),
        (0, 0),
        (-1, 0),
        (float("nan"), 0),
    ],
)
def test_lifetimes_are_cut_to_what_is_allowed(asked: float, granted: float) -> None:
    assert clamp_ttl(asked) == granted


def test_a_hundred_thousand_keys_of_one_signer_do_not_crowd_out_others() -> None:
    quota = RecordQuota()
    refused = 0
    for i in range(100_000):
        topic = i.to_bytes(4, "big")
        if quota.refusal(topic, b"flooder", 700, expires_at=60.0, now=0.0) is None:
            quota.note(topic, b"flooder", 700, 60.0)
        else:
            refused += 1
    assert len(quota) == MAX_TOPICS_PER_SIGNER
    assert refused == 100_000 - MAX_TOPICS_PER_SIGNER
    assert quota.refusal(b"topic", b"other", 700, expires_at=60.0, now=0.0) is None


def test_many_signers_cannot_grow_a_topic_or_the_whole_beyond_its_bound() -> None:
    quota = RecordQuota()

    def fill(topics: int) -> set[Refusal]:
        refusals: set[Refusal] = set()
        for i in range(2000):
            topic, signer = bytes([i % topics]), i.to_bytes(4, "big") + bytes([topics])
            refusal = quota.refusal(topic, signer, 8000, expires_at=60.0, now=0.0)
            if refusal is None:
                quota.note(topic, signer, 8000, 60.0)
            else:
                refusals.add(refusal)
        return refusals

    assert fill(1) == {Refusal.TOPIC_FULL}
    assert len(quota) == MAX_BYTES_PER_TOPIC // 8000
    assert Refusal.FULL in fill(7)
    assert len(quota) == MAX_BYTES // 8000


def test_expired_records_make_room() -> None:
    quota = RecordQuota()
    for i in range(MAX_TOPICS_PER_SIGNER):
        quota.note(bytes([i]), b"signer", 100, 10.0)
    assert quota.refusal(b"new", b"signer", 100, expires_at=99.0, now=5.0) is Refusal.SIGNER_FULL
    assert quota.refusal(b"new", b"signer", 100, expires_at=99.0, now=20.0) is None
    assert len(quota) == 0


def test_renewing_a_record_takes_no_more_room() -> None:
    quota = RecordQuota()
    for i in range(10_000):
        assert quota.refusal(b"topic", b"signer", 5000, expires_at=60.0 + i, now=float(i)) is None
        quota.note(b"topic", b"signer", 5000, 60.0 + i)
    assert len(quota) == 1


@pytest.mark.parametrize("expires_at", [0.0, 5.0, float("nan"), float("-inf")])
def test_what_has_expired_is_refused(expires_at: float) -> None:
    assert RecordQuota().refusal(b"topic", b"signer", 1, expires_at=expires_at, now=5.0) is Refusal.EXPIRED


@pytest.mark.anyio
async def test_records_vanish_when_their_time_is_over() -> None:
    clock, run = ManualClock(), Identity.generate()
    store = DirectoryStore()
    directory = MemoryDirectory(store, run, clock)
    assert await directory.announce(head_topic(RUN), head(run, 1), ttl_s=60)
    clock.advance(59)
    assert len(await directory.find(head_topic(RUN))) == 1
    clock.advance(2)
    assert await directory.find(head_topic(RUN)) == []
    assert len(store) == 0


@pytest.mark.anyio
async def test_a_record_stays_announced_and_follows_its_maker() -> None:
    import anyio

    clock, run = ManualClock(), Identity.generate()
    directory = MemoryDirectory(DirectoryStore(), run, clock)
    made: list[int] = []
    event = anyio.Event()

    def make_record() -> bytes:
        made.append(len(made))
        return head(run, len(made))

    async with anyio.create_task_group() as tasks:

        async def keep() -> None:
            await keep_announced(directory, head_topic(RUN), make_record, every_s=3600, ttl_s=60, changed=lambda: event)

        tasks.start_soon(keep)
        await anyio.wait_all_tasks_blocked()
        old, event = event, anyio.Event()
        old.set()
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    newest = newest_head(await directory.find(head_topic(RUN)), run_id=RUN, run_key=run.public_key)
    assert newest is not None
    assert newest.policy_version == 2
