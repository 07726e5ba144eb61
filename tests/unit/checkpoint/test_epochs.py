"""What becomes of manifests when another coordinator takes over."""

import contextlib

import pytest

from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.checkpoint.trust import TrustedHead
from echo_swarm.envelope import Signed, seal, unseal
from echo_swarm.epoch import EPOCH_LIMITS, Epoch
from echo_swarm.errors import Untrusted
from echo_swarm.identity import Identity
from echo_swarm.manifest import CheckpointManifest
from tests.support.small_disks import fill, small_disk


def epoch_of(run, number: int, base: Signed[CheckpointManifest] | None, nonce: int = 0, signer=None) -> bytes:
    epoch = Epoch(
        run_id=run.run_id,
        number=number,
        nonce=nonce.to_bytes(16, "big"),
        started_at=1.0,
        base_version=None if base is None else base.message.policy_version,
        base_digest=None if base is None else base.digest,
    )
    return seal(signer or run.identity, epoch)


def head_of(run, *persisted, epoch=None) -> TrustedHead:
    return TrustedHead(run_id=run.run_id, publisher_key=run.identity.public_key, persisted=persisted, epoch=epoch)


@pytest.fixture
def split(run):
    """Version 12, and versions 13 and 14 as two coordinators published them."""
    base = run.signed(12, epoch=epoch_of(run, 1, None))
    lower, higher = epoch_of(run, 2, base), epoch_of(run, 3, base)
    first = [run.sealed(version, epoch=lower) for version in (13, 14)]
    second = [run.sealed(version, epoch=higher) for version in (13, 14)]
    return base, first, second, higher


def test_of_two_manifests_of_one_version_the_higher_epochs_counts_whatever_the_order(run, split):
    base, first, second, _ = split
    for order in ([first[0], second[0]], [second[0], first[0]]):
        head = head_of(run)
        head.update(base.raw, 0.0)
        for raw in order:
            try:
                head.update(raw, 0.0)
            except Untrusted as e:
                assert "another one has replaced" in str(e)
        assert head.head is not None and head.head.raw == second[0]


def test_a_higher_version_of_a_lower_epoch_does_not_come_back(run, split):
    _, first, second, _ = split
    head = head_of(run)
    head.update(first[1], 0.0)
    assert head.update(second[0], 0.0).message.policy_version == 13
    with pytest.raises(Untrusted, match="replaced"):
        head.update(first[1], 0.0)
    restarted = head_of(run, *first, second[0])
    assert restarted.version == 13 and restarted.head is not None and restarted.head.raw == second[0]


def test_a_head_that_falls_is_no_head_and_the_base_is_taken_again(run, split):
    base, first, _, higher = split
    head = head_of(run)
    head.update(first[1], 0.0)
    assert head.hear(higher)
    assert (head.head, head.version) == (None, None)
    with pytest.raises(Untrusted, match="began with version 12"):
        head.update(run.sealed(11), 0.0)
    with pytest.raises(Untrusted, match="replaced"):
        head.update(run.sealed(12, issued_at=1001.0), 0.0)
    assert head.update(base.raw, 0.0).message.policy_version == 12
    assert not head.hear(higher)


def test_a_restart_of_the_same_coordinator_takes_nothing_away(run, split):
    base, _, second, higher = split
    head = head_of(run, epoch=higher)
    newest = head.update(second[1], 0.0)
    assert head.hear(epoch_of(run, 4, newest))
    assert head.head is newest
    assert head.check_past(base.raw).message.policy_version == 12
    assert head.check_past(second[0]).message.policy_version == 13


def test_a_forged_epoch_is_refused_and_changes_nothing(run, split):
    base, _, _, _ = split
    head = head_of(run)
    head.update(base.raw, 0.0)
    forged = epoch_of(run, 9, None, signer=Identity.generate())
    with pytest.raises(Untrusted, match="another key"):
        head.hear(forged)
    with pytest.raises(Untrusted, match="another key"):
        head.update(run.sealed(13, epoch=forged), 0.0)
    assert head.version == 12 and head.epochs.rank[0] == 1


def test_versions_that_fall_leave_the_disk_and_stay_away_after_a_restart(run, store, tmp_path, split):
    base, first, second, higher = split
    store.add(base)
    for raw in first:
        signed = head_of(run).update(raw, 0.0)
        store.add(signed)
        store.save_head(signed)
    fallen = store.take_epoch(unseal(higher, Epoch, EPOCH_LIMITS))
    assert fallen == [13, 14]
    assert (store.versions(), store.head()) == ([12], None)
    assert not store.version_folder(13).exists()
    again = VersionStore(tmp_path, run.run_id)
    head = head_of(run, *again.known_manifests(), epoch=again.epoch())
    assert head.version == 12 and head.epochs.rank[0] == 3
    with pytest.raises(Untrusted):
        head.update(first[0], 0.0)
    again.add(head.update(second[0], 0.0))
    assert again.versions() == [12, 13]


def test_an_epoch_that_comes_to_the_disk_late_lowers_nothing(run, store, split):
    base, _, _, higher = split
    store.take_epoch(unseal(higher, Epoch, EPOCH_LIMITS))
    store.take_epoch(unseal(epoch_of(run, 2, base), Epoch, EPOCH_LIMITS))
    assert store.epoch() == higher


def test_a_crash_between_the_epoch_and_the_drop_is_made_up_at_the_next_start(run, store, tmp_path, split):
    base, first, _, higher = split
    for raw in (base.raw, *first):
        signed = head_of(run).update(raw, 0.0)
        store.add(signed)
        store.save_head(signed)
    (store.folder / "epoch.bin").write_bytes(higher)
    again = VersionStore(tmp_path, run.run_id)
    assert (again.versions(), again.head()) == ([12], None)


def test_a_damaged_epoch_on_disk_stops_nobody(run, store, tmp_path, split):
    base, *_ = split
    store.add(base)
    (store.folder / "epoch.bin").write_bytes(b"damaged")
    again = VersionStore(tmp_path, run.run_id)
    assert again.versions() == [12]
    assert head_of(run, *again.known_manifests(), epoch=again.epoch()).version == 12


def test_on_a_full_disk_what_falls_is_gone_all_the_same_and_the_epoch_is_written_when_there_is_room(
    run, tmp_path, split
):
    base, first, second, higher = split
    with small_disk(tmp_path / "disk", 1) as disk:
        store = VersionStore(disk, run.run_id)
        store.add(base)
        for raw in first:
            signed = head_of(run).update(raw, 0.0)
            store.add(signed)
            store.save_head(signed)
        ballast = fill(disk)
        # What falls makes room, which somebody else takes at once.
        fallen = [path for version in (13, 14) for path in store.version_folder(version).iterdir()]
        with contextlib.ExitStack() as held:
            for path in (*fallen, store.folder / "head.bin"):
                held.enter_context(path.open("rb"))
            assert store.take_epoch(unseal(higher, Epoch, EPOCH_LIMITS)) == [13, 14]
            assert (store.versions(), store.head(), store.epoch(), store.owes_epoch) == ([12], None, None, True)
        ballast.unlink()
        assert store.take_epoch(unseal(higher, Epoch, EPOCH_LIMITS)) == []
        assert (store.epoch(), store.owes_epoch) == (higher, False)
        assert store.add(head_of(run).update(second[0], 0.0)).exists()


def test_the_room_that_falls_free_is_enough_for_the_epoch(run, tmp_path, split):
    _, first, _, higher = split
    with small_disk(tmp_path / "disk", 1) as disk:
        store = VersionStore(disk, run.run_id)
        store.add(head_of(run).update(first[0], 0.0))
        fill(disk)
        assert store.take_epoch(unseal(higher, Epoch, EPOCH_LIMITS)) == [13]
        assert (store.epoch(), store.owes_epoch) == (higher, False)
