"""What a node says of its transfers: all attempts together, by kind of source, never more than the file has."""

from pathlib import Path
from typing import Any

from echo_node.transfer_log import TransferLog
from echo_swarm.checkpoint.fetch_report import FetchReport
from echo_swarm.identity import PeerId
from echo_swarm.transfers import MAX_FAULTS, MAX_TRANSFERS, FaultReason, SourceBytes, SourceFault, Transfer

COORDINATOR, PEER, OTHER = PeerId("coordinator"), PeerId("peer"), PeerId("other")
MIRROR = PeerId("https://files.example")
DIGEST = bytes(32)


def report(version: int = 1, *, whole: bool = True, **changes: Any) -> FetchReport:
    path = Path("file") if whole else None
    return FetchReport(policy_version=version, size_bytes=1000, path=path, **changes)


def said(*reports: FetchReport) -> Transfer:
    log = TransferLog()
    for entry in reports:
        log.note(DIGEST, entry)
    return log.said(COORDINATOR)[-1]


def test_bytes_are_told_by_kind_of_source_and_deltas_apart():
    found = said(
        report(
            bytes_by_source={COORDINATOR: 100, PEER: 200, OTHER: 50, MIRROR: 30},
            delta_by_source={COORDINATOR: 7, OTHER: 8},
            made_bytes=400,
            resumed_bytes=20,
            copied_bytes=200,
            seconds=3.0,
        )
    )
    assert found.fetched == SourceBytes(coordinator=100, peers=250, mirrors=30)
    assert found.deltas == SourceBytes(coordinator=7, peers=8, mirrors=0)
    assert (found.made_bytes, found.disk_bytes, found.whole, found.seconds) == (400, 220, True, 3.0)


def test_several_attempts_are_one_transfer_and_what_was_resumed_counts_as_it_came():
    first = report(
        whole=False, resumed_bytes=100, bytes_by_source={PEER: 300}, seconds=2.0, retries=1,
        reasons={PEER: FaultReason.WRONG_BYTES},
    )  # fmt: skip
    second = report(
        resumed_bytes=400, bytes_by_source={COORDINATOR: 600}, seconds=1.0, reasons={PEER: FaultReason.HUNG_UP}
    )
    found = said(first, second)
    assert found.fetched == SourceBytes(coordinator=600, peers=300, mirrors=0)
    assert (found.disk_bytes, found.whole, found.seconds, found.failures) == (100, True, 3.0, 1)
    assert found.faults == (SourceFault(source="peer", reason=FaultReason.WRONG_BYTES),)
    assert first.bytes_by_source == {PEER: 300}


def test_a_file_that_lay_here_is_all_on_disk():
    assert (said(report()).disk_bytes, said(report()).whole) == (1000, True)


def test_what_was_fetched_twice_is_never_told_as_more_than_the_file():
    found = said(
        report(whole=False, bytes_by_source={PEER: 900, COORDINATOR: 800}, delta_by_source={PEER: 5000}),
        report(made_bytes=300, bytes_by_source={MIRROR: 900}),
    )
    assert found.fetched.total + found.made_bytes + found.disk_bytes == 1000
    assert found.deltas.total == 1000


def test_only_the_last_transfers_and_the_worst_sources_are_told():
    log = TransferLog()
    for version in range(20):
        log.note(DIGEST, report(version))
    assert [entry.policy_version for entry in log.said(COORDINATOR)] == list(range(20 - MAX_TRANSFERS, 20))
    slow = {PeerId(f"slow {n}"): FaultReason.SILENT for n in range(12)}
    found = said(report(reasons={**slow, PEER: FaultReason.BROKEN_PROMISE}))
    assert said(report(retries=2, liars={PEER: "lied"}), report(liars={OTHER: "lied"})).failures == 4
    assert len(found.faults) == MAX_FAULTS and found.faults[0].source == "peer"
