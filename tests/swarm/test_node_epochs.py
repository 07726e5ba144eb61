"""What a node does about a coordinator that another one has replaced."""

from pathlib import Path

import pytest

from echo_node import policy_sync
from echo_swarm.clock import SystemClock
from echo_swarm.directory.base import head_topic
from echo_swarm.directory.memory import MemoryDirectory
from echo_swarm.envelope import seal
from echo_swarm.epoch import Epoch, HighestEpoch
from echo_swarm.identity import Identity
from echo_swarm.records import HeadRecord
from tests.support.small_disks import fill, small_disk
from tests.swarm.support.node_harness import Swarm, make_swarm, until

pytestmark = pytest.mark.anyio


def epoch(swarm: Swarm, number: int, signer: Identity | None = None) -> bytes:
    """An epoch whose base is the newest version there is."""
    head = swarm.coordinator.store.head()
    assert head is not None
    fields = Epoch(
        run_id=swarm.coordinator.run_id,
        number=number,
        nonce=bytes(16),
        started_at=1.0,
        base_version=head.message.policy_version,
        base_digest=head.digest,
    )
    return seal(signer or swarm.coordinator.identity, fields)


async def announce(swarm: Swarm, raw: bytes, signer: Identity | None = None) -> None:
    signer = signer or swarm.coordinator.identity
    record = HeadRecord(
        run_id=swarm.coordinator.run_id, policy_version=0, manifest_digest=bytes(32), issued_at=2.0, epoch=raw
    )
    directory = MemoryDirectory(swarm.directory, signer, SystemClock())
    await directory.announce(head_topic(swarm.coordinator.run_id), seal(signer, record), ttl_s=600)


async def test_a_busy_node_leaves_a_coordinator_that_was_replaced_says_so_and_shows_it_the_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(policy_sync, "WATCH_S", 0.05)
    swarm = make_swarm(tmp_path)
    swarm.coordinator.publish(0)
    async with swarm.serving(), swarm.node() as running:
        await until(lambda: len(swarm.coordinator.accepted) >= 4)
        higher = epoch(swarm, 3)
        await announce(swarm, higher)
        await until(lambda: "was replaced" in running.node.activity.headline)
        await until(lambda: swarm.coordinator.hellos[-1].epoch == higher)
        assert not running.node.link.is_up and running.error is None
        joins = running.node.link.joins
        greeted = len(swarm.coordinator.hellos)
        await until(lambda: len(swarm.coordinator.hellos) > greeted)
        assert running.node.link.joins == joins
    store = running.node.store
    highest = HighestEpoch(
        run_id=swarm.coordinator.run_id,
        run_key=swarm.coordinator.identity.public_key,
        persisted=[raw for raw in (store.epoch(),) if raw is not None],
    )
    assert highest.rank[0] == 3
    async with swarm.serving(), swarm.node() as again:
        await until(lambda: "was replaced" in again.node.activity.headline, "it remembers after a restart")
        assert again.node.link.joins == 0


async def test_records_of_others_and_forged_epochs_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(policy_sync, "WATCH_S", 0.05)
    swarm = make_swarm(tmp_path)
    swarm.coordinator.publish(0)
    async with swarm.serving(), swarm.node() as running:
        await until(lambda: len(swarm.coordinator.accepted) >= 4)
        liar = Identity.generate()
        await announce(swarm, epoch(swarm, 3, liar), liar)
        await announce(swarm, epoch(swarm, 3, liar))
        before = len(swarm.coordinator.accepted)
        await until(lambda: len(swarm.coordinator.accepted) >= before + 8)
        await running.node.policies._heads.look()
        assert running.node.link.is_up and running.node.link.joins == 1
        assert running.node.store.epoch() is None


async def test_a_node_on_a_full_disk_leaves_at_once_and_remembers_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(policy_sync, "WATCH_S", 0.05)
    swarm = make_swarm(tmp_path)
    with small_disk(tmp_path / "disk", 24) as disk:
        swarm.folder = disk
        swarm.coordinator.publish(0)
        async with swarm.serving(), swarm.node() as running:
            await until(lambda: len(swarm.coordinator.accepted) >= 4)
            ballast = fill(disk)
            higher = epoch(swarm, 3)
            await announce(swarm, higher)
            await until(lambda: "was replaced" in running.node.activity.headline)
            assert not running.node.link.is_up
            assert running.node.store.epoch() is None and running.error is None
            ballast.unlink()
            await until(lambda: running.node.store.epoch() == higher)
