"""How the last files of versions came to this machine, as the coordinator is told at each beat.

Several attempts at one file are one entry. What is said is bounded by the file's size, whatever was fetched twice.
"""

from collections import OrderedDict
from dataclasses import replace

from echo_swarm.checkpoint.fetch_report import FetchReport, Origin, add_bytes
from echo_swarm.identity import PeerId
from echo_swarm.transfers import LIES, MAX_FAULTS, MAX_TRANSFERS, SourceBytes, SourceFault, Transfer

_MOST_SECONDS = 4e9
_MOST_FAILURES = 2**32 - 1


class TransferLog:
    """The last transfers of this process, MAX_TRANSFERS at most."""

    def __init__(self) -> None:
        self._entries: OrderedDict[tuple[int, bytes], FetchReport] = OrderedDict()

    def note(self, digest: bytes, report: FetchReport) -> None:
        """Take in how an attempt at the file with this digest went."""
        key = (report.policy_version, digest)
        before = self._entries.get(key)
        self._entries[key] = _copy(report) if before is None else _together(before, report)
        self._entries.move_to_end(key)
        while len(self._entries) > MAX_TRANSFERS:
            self._entries.popitem(last=False)

    def said(self, coordinator: PeerId) -> tuple[Transfer, ...]:
        """Return what a beat says, the newest last."""
        return tuple(_said(digest, report, coordinator) for (_, digest), report in self._entries.items())


def _copy(report: FetchReport) -> FetchReport:
    """Return what is kept of a report: no words, and a lie counts as a failure."""
    return replace(
        report,
        failures={},
        liars={},
        retries=report.retries + len(report.liars),
        bytes_by_source=dict(report.bytes_by_source),
        delta_by_source=dict(report.delta_by_source),
        reasons=dict(report.reasons),
    )


def _together(before: FetchReport, later: FetchReport) -> FetchReport:
    """Return two attempts as one. What the later one resumed, the earlier one brought, or had found on disk."""
    both = _copy(before)
    both.path = later.path or before.path
    add_bytes(both.bytes_by_source, later.bytes_by_source)
    add_bytes(both.delta_by_source, later.delta_by_source)
    both.copied_bytes += later.copied_bytes
    both.made_bytes += later.made_bytes
    both.retries += later.retries + len(later.liars)
    both.seconds += later.seconds
    for peer, reason in later.reasons.items():
        both.blame(peer, reason)
    return both


def _said(digest: bytes, report: FetchReport, coordinator: PeerId) -> Transfer:
    size, whole = report.size_bytes, report.path is not None
    made = min(report.made_bytes, size)
    fetched = _by_kind(report.bytes_by_source, coordinator, limit=size - made)
    rest = size - made - fetched.total
    # A file that was whole before is read again, not fetched: then all of it lay here.
    disk = rest if whole else min(rest, report.resumed_bytes + report.copied_bytes)
    faults = sorted(report.reasons.items(), key=lambda item: item[1] not in LIES)[:MAX_FAULTS]
    return Transfer(
        policy_version=report.policy_version,
        digest=digest,
        whole=whole,
        fetched=fetched,
        deltas=_by_kind(report.delta_by_source, coordinator, limit=size),
        made_bytes=made,
        disk_bytes=disk,
        seconds=min(report.seconds, _MOST_SECONDS),
        failures=min(report.retries, _MOST_FAILURES),
        faults=tuple(SourceFault(source=source[:512], reason=reason) for source, reason in faults),
    )


def _by_kind(by_source: dict[PeerId, int], coordinator: PeerId, *, limit: int) -> SourceBytes:
    counts = dict.fromkeys(Origin, 0)
    for source, count in by_source.items():
        origin = Origin.of(source, coordinator)
        counts[origin] += min(count, limit)
        limit -= min(count, limit)
    return SourceBytes(coordinator=counts[Origin.COORDINATOR], peers=counts[Origin.PEER], mirrors=counts[Origin.MIRROR])
