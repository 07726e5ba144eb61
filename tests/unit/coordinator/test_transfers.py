"""What peers say of transfers: counted once, bounded by the files, and timed from publication."""

from typing import Any

import pytest

from echo_coordinator.state.slices import at_once
from echo_coordinator.state.transfers import KEPT_VERSIONS, MAX_PEERS, ROWS_PER_PEER, RowRefused, TransferTable
from echo_swarm.identity import PeerId
from echo_swarm.manifest import Artifact, ArtifactKind, CheckpointManifest
from echo_swarm.status import VersionTransfers
from echo_swarm.transfers import FaultReason, SourceBytes, SourceFault, Transfer

SIZE = 1000
ANN, BEN, CAT = PeerId("ann"), PeerId("ben"), PeerId("cat")
NOTHING = SourceBytes(coordinator=0, peers=0, mirrors=0)


def digest(version: int, place: int = 0) -> bytes:
    return bytes([version % 256, place]) * 16


def manifest(version: int, *kinds: ArtifactKind) -> CheckpointManifest:
    artifacts = [
        Artifact(
            kind=kind,
            precision="float32",
            size_bytes=SIZE,
            digest=digest(version, place),
            piece_bytes=1 << 16,
            piece_digests=bytes(32),
            layout_digest=bytes(32),
        )
        for place, kind in enumerate(kinds or (ArtifactKind.SAFETENSORS,))
    ]
    return CheckpointManifest(
        run_id="ab" * 16,
        policy_version=version,
        parent_digest=None,
        issued_at=1.0,
        expires_at=2.0,
        artifacts=tuple(artifacts),
    )


def table(*versions: int, nodes: tuple[PeerId, ...] = (ANN, BEN, CAT), at_s: float = 100.0) -> TransferTable:
    found = TransferTable()
    for version in versions:
        found.published(manifest(version), at_s, nodes)
    return found


def row(version: int = 1, *, place: int = 0, peers: int = 0, coordinator: int = 0, **changes: Any) -> Transfer:
    values: dict[str, Any] = {
        "policy_version": version,
        "digest": digest(version, place),
        "whole": True,
        "fetched": SourceBytes(coordinator=coordinator, peers=peers, mirrors=0),
        "deltas": NOTHING,
        "made_bytes": 0,
        "disk_bytes": 0,
        "seconds": 2.0,
        "failures": 0,
        "faults": (),
    }
    return Transfer(**(values | changes))


def shown(transfers: TransferTable, version: int = 1, served: dict[bytes, int] | None = None) -> VersionTransfers:
    return next(entry for entry in at_once(transfers.report(served or {}, 200.0)) if entry.policy_version == version)


def fault(source: str, reason: FaultReason = FaultReason.WRONG_BYTES) -> SourceFault:
    return SourceFault(source=source, reason=reason)


def test_bytes_are_added_up_by_where_they_came_from():
    transfers = table(1)
    transfers.take(ANN, [row(coordinator=600, peers=400)], 101.0)
    transfers.take(BEN, [row(peers=100, disk_bytes=900)], 101.0)
    deltas = SourceBytes(coordinator=10, peers=5, mirrors=3)
    transfers.take(CAT, [row(made_bytes=1000, deltas=deltas)], 101.0)
    found = shown(transfers, served={digest(1): 700, digest(2): 9})
    assert (found.bytes_coordinator, found.bytes_peers, found.bytes_mirrors) == (610, 505, 3)
    assert (found.bytes_deltas, found.bytes_made, found.bytes_disk, found.bytes_served) == (18, 1000, 900, 700)
    assert (found.told, found.whole, found.slowest_s) == (3, 3, 2.0)


def test_a_delta_fetched_for_its_own_sake_counts_as_one():
    transfers = TransferTable()
    transfers.published(manifest(1, ArtifactKind.SAFETENSORS, ArtifactKind.DELTA), 100.0)
    transfers.take(ANN, [row(place=1, peers=70)], 101.0)
    assert (shown(transfers).bytes_peers, shown(transfers).bytes_deltas) == (70, 70)


def test_a_replay_changes_nothing_and_a_new_word_replaces_the_old_one():
    transfers = table(1)
    for _ in range(3):
        transfers.take(ANN, [row(peers=400, whole=False, failures=1)], 101.0)
    assert (shown(transfers).bytes_peers, shown(transfers).failures, shown(transfers).whole) == (400, 1, 0)
    transfers.take(ANN, [row(peers=900, failures=2)], 102.0)
    assert (shown(transfers).bytes_peers, shown(transfers).failures, shown(transfers).told) == (900, 2, 1)


def test_a_restarted_node_that_finds_the_file_on_its_disk_does_not_hide_how_it_came():
    transfers = table(1)
    transfers.take(ANN, [row(peers=1000)], 101.0)
    transfers.take(ANN, [row(disk_bytes=1000)], 150.0)
    assert (shown(transfers).bytes_peers, shown(transfers).bytes_disk) == (1000, 0)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (row(2), RowRefused.UNKNOWN_VERSION),
        (row(digest=bytes(32)), RowRefused.UNKNOWN_ARTIFACT),
        (row(peers=10 * SIZE), RowRefused.TOO_MANY_BYTES),
        (row(peers=600, coordinator=401), RowRefused.TOO_MANY_BYTES),
        (row(peers=600, made_bytes=300, disk_bytes=101), RowRefused.TOO_MANY_BYTES),
        (row(deltas=SourceBytes(coordinator=0, peers=2**63 - 1, mirrors=2**63 - 1)), RowRefused.TOO_MANY_BYTES),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason_once_and_the_good_rows_beside_it_count(
    said: Transfer, reason: RowRefused
):
    transfers = table(1)
    transfers.take(BEN, [row(peers=1000)], 101.0)
    transfers.published(manifest(0), None)
    good = row(0, peers=7)
    assert transfers.take(ANN, [said, good], 101.0) == [reason]
    assert transfers.take(ANN, [said, good], 102.0) == []
    assert shown(transfers).bytes_peers == 1000 and shown(transfers).had == 1
    assert shown(transfers, 0).bytes_peers == 7


def test_half_and_all_are_timed_by_the_words_of_those_who_lived_at_publication():
    transfers = table(1, nodes=(ANN, BEN, CAT, PeerId("dan")))
    transfers.take(ANN, [row(peers=1)], 101.0)
    assert (shown(transfers).half_s, shown(transfers).all_s, shown(transfers).had) == (None, None, 1)
    transfers.holds(BEN, 1, 104.0)
    transfers.holds(BEN, 1, 140.0)
    transfers.take(PeerId("newcomer"), [row(peers=1000)], 104.0)
    assert (shown(transfers).half_s, shown(transfers).all_s, shown(transfers).nodes) == (4.0, None, 4)
    transfers.take(CAT, [row(peers=1, whole=False)], 105.0)
    transfers.holds(CAT, 1, 106.0)
    transfers.holds(PeerId("dan"), 1, 109.0)
    assert (shown(transfers).half_s, shown(transfers).all_s, shown(transfers).had) == (4.0, 9.0, 4)


def test_a_version_of_an_earlier_process_has_no_times_and_no_zeros_in_their_place():
    transfers = TransferTable()
    transfers.published(manifest(1), None)
    transfers.take(ANN, [row(peers=1000)], 101.0)
    transfers.holds(ANN, 1, 101.0)
    found = shown(transfers, served={digest(1): 5})
    assert not found.timed and (found.half_s, found.all_s, found.bytes_served, found.age_s) == (None,) * 4
    assert found.bytes_peers == 1000
    transfers.published(manifest(1), 150.0, [ANN])
    assert not shown(transfers).timed


def test_of_an_adapter_only_the_adapter_is_a_version_that_a_node_has():
    transfers = TransferTable()
    transfers.published(manifest(0, ArtifactKind.LORA, ArtifactKind.SAFETENSORS), 100.0, [ANN])
    transfers.take(ANN, [row(0, place=1, peers=1000)], 103.0)
    assert shown(transfers, 0).had == 0
    transfers.take(ANN, [row(0, place=1, peers=1000), row(0, peers=10)], 104.0)
    assert (shown(transfers, 0).had, shown(transfers, 0).all_s, shown(transfers, 0).is_base) == (1, 4.0, True)


def test_liars_are_named_by_how_many_say_so_and_stand_before_those_that_only_failed():
    transfers = table(1)
    slow = fault("slow", FaultReason.SILENT)
    transfers.take(ANN, [row(faults=(slow, fault("liar"), fault("liar")))], 101.0)
    transfers.take(BEN, [row(faults=(slow, fault("liar")))], 101.0)
    transfers.take(CAT, [row(faults=(slow, fault("ann")))], 101.0)
    assert [(f.source, f.reason, f.named_by, f.lie) for f in shown(transfers).faults] == [
        ("liar", "wrong_bytes", 2, True),
        ("ann", "wrong_bytes", 1, True),
        ("slow", "silent", 3, False),
    ]


def test_who_names_everybody_stays_bounded_and_the_rest_is_counted():
    transfers = table(*range(1, 4))
    for number in range(6):
        peer = PeerId(f"peer {number}")
        transfers.take(peer, [row(faults=tuple(fault(f"{peer} {n}") for n in range(8)))], 101.0)
    transfers.take(ANN, [row(faults=(fault("true liar"),))], 101.0)
    transfers.take(BEN, [row(faults=(fault("true liar"),))], 101.0)
    found = shown(transfers)
    assert found.faults[0].source == "true liar" and (len(found.faults), found.faults_left_out) == (16, 33)


def test_memory_is_bounded_in_versions_rows_and_peers():
    transfers = table()
    for version in range(40):
        transfers.published(manifest(version), 100.0)
        transfers.take(ANN, [row(version, peers=1)], 101.0)
    assert [entry.policy_version for entry in at_once(transfers.report({}, 200.0))] == list(
        range(39, 39 - KEPT_VERSIONS, -1)
    )
    assert transfers.take(ANN, [row(3, peers=10 * SIZE)], 102.0) == []  # no longer listed
    for number in range(MAX_PEERS + 10):
        transfers.take(PeerId(str(number)), [row(39, peers=1)], 103.0)
    assert shown(transfers, 39).told == MAX_PEERS
    many = TransferTable()
    for version in range(2 * ROWS_PER_PEER):
        many.published(manifest(version, *[ArtifactKind.SAFETENSORS] * 3), 100.0)
        many.take(ANN, [row(version, place=place, peers=1) for place in range(3)], 101.0)
    assert sum(entry.bytes_peers for entry in at_once(many.report({}, 200.0))) == ROWS_PER_PEER


def test_the_base_of_adapters_stays_listed():
    transfers = TransferTable()
    transfers.published(manifest(0, ArtifactKind.LORA, ArtifactKind.SAFETENSORS), None)
    for version in range(1, 40):
        transfers.published(manifest(version, ArtifactKind.LORA), 100.0)
    transfers.take(ANN, [row(0, place=1, peers=1000)], 101.0)
    assert shown(transfers, 0).bytes_peers == 1000 and len(at_once(transfers.report({}, 200.0))) == KEPT_VERSIONS + 1


def test_a_report_leaves_room_for_others_and_what_happens_then_neither_breaks_it_nor_is_counted_twice():
    transfers = table(*range(1, KEPT_VERSIONS + 1))
    for number in range(100):
        transfers.take(PeerId(f"peer {number}"), [row(1, peers=SIZE), row(2, peers=SIZE)], 101.0)
    work, yields = transfers.report({}, 200.0), 0
    while True:
        try:
            next(work)
        except StopIteration as e:
            found = {entry.policy_version: entry for entry in e.value}
            break
        yields += 1
        transfers.take(PeerId(f"newcomer {yields}"), [row(1), row(2)], 102.0)
        transfers.take(PeerId("peer 0"), [row(2, peers=SIZE, failures=yields)], 102.0)
        if yields == 10:
            transfers.published(manifest(KEPT_VERSIONS + 1), 103.0)
    assert yields >= KEPT_VERSIONS
    assert set(found) == set(range(2, KEPT_VERSIONS + 1)), "version 1 was let go meanwhile"
    assert (found[2].told, found[2].bytes_peers) == (100, 100 * SIZE)
