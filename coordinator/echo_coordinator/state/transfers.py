"""How each version reached the nodes: what they say in their beats, and when they first had it. Pure.

    beat ──► take ──► each row: known version? ─► its artifact? ─► no more bytes than the file has? ─► kept
                      └ the peer's former row of this file is replaced: a replay changes nothing

A row is one peer's word about one file, so that a liar spoils its own row and no other; what is added up is never more
than the sizes of the files times the peers. Sources at fault are named with the number of peers that name them.

Nothing of this is stored: after a restart nodes say again what they still know, and a version that was published before
has no times (`VersionTransfers.timed`) rather than wrong ones. See docs/adr/0013-transfers.md.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from heapq import nsmallest
from math import ceil
from operator import add

from echo_coordinator.state.slices import Sliced
from echo_swarm.identity import PeerId
from echo_swarm.manifest import ADAPTER_KINDS, BASE_VERSION, Artifact, ArtifactKind, CheckpointManifest
from echo_swarm.status import FaultStatus, VersionTransfers
from echo_swarm.transfers import LIES, FaultReason, Transfer

KEPT_VERSIONS = 16
"""Beside the base of a LoRA run, which newcomers fetch at any time."""
ROWS_PER_PEER = 16
NAMES_PER_PEER = 16
"""Sources that one peer names, in its newest rows. With these three, memory stays below 100 MB whoever reports."""
MAX_PEERS = 4096
"""As many as the roster has. Those heard last stay."""
PEERS_AT_ONCE = 32
"""Counted for a report before others may run: half a millisecond."""
LISTED_FAULTS = 16
"""Of one version, those that most peers name. Bounds the status (docs/protocol.md: items of a frame)."""


class RowRefused(StrEnum):
    """Why what a peer says of a transfer is not counted."""

    UNKNOWN_VERSION = "unknown_version"
    UNKNOWN_ARTIFACT = "unknown_artifact"
    TOO_MANY_BYTES = "too_many_bytes"


@dataclass(slots=True, kw_only=True)
class _Version:
    artifacts: dict[bytes, Artifact]
    published_s: float | None
    """None: by an earlier process."""
    nodes: frozenset[PeerId]
    """Live when it was published."""
    had: dict[PeerId, float] = field(default_factory=dict[PeerId, float])
    """Of these: seconds after publication until their word arrived that they have it."""
    is_base: bool = False


@dataclass(frozen=True, slots=True)
class _Row:
    """A `Transfer` in little memory: coordinator, peers, mirrors, deltas of these, made, disk, in bytes."""

    counts: tuple[int, int, int, int, int, int]
    seconds: float
    failures: int
    whole: bool
    faults: tuple[tuple[str, FaultReason], ...]

    @property
    def is_disk_only(self) -> bool:
        return not any(self.counts[:5])


class TransferTable:
    """The newest versions and what peers say of them."""

    def __init__(self) -> None:
        self._versions: dict[int, _Version] = {}
        self._rows: OrderedDict[PeerId, OrderedDict[tuple[int, bytes], _Row]] = OrderedDict()
        self._said: dict[PeerId, int] = {}
        """Hash of what each said last, so that a repetition costs nothing and is not refused anew."""

    def published(self, manifest: CheckpointManifest, now_s: float | None, nodes: Collection[PeerId] = ()) -> None:
        """Know a version.

        Args:
            manifest: what it consists of.
            now_s: when it was published; None: by an earlier process.
            nodes: those that are to have it: the live ones.

        """
        version = manifest.policy_version
        if version in self._versions:
            return
        self._versions[version] = _Version(
            artifacts={artifact.digest: artifact for artifact in manifest.artifacts},
            published_s=now_s,
            nodes=frozenset(nodes),
            is_base=version == BASE_VERSION and any(a.kind in ADAPTER_KINDS for a in manifest.artifacts),
        )
        for old in sorted(self._versions)[:-KEPT_VERSIONS]:
            if not self._versions[old].is_base:
                del self._versions[old]

    def holds(self, peer: PeerId, version: int | None, now_s: float) -> None:
        """Hear from a peer that it has a version."""
        entry = None if version is None else self._versions.get(version)
        if entry is not None and entry.published_s is not None and peer in entry.nodes:
            entry.had.setdefault(peer, max(0.0, now_s - entry.published_s))

    def take(self, peer: PeerId, transfers: Sequence[Transfer], now_s: float) -> list[RowRefused]:
        """Hear a peer's rows; return why some of them are not counted."""
        said = hash(tuple(transfers))
        if not transfers or self._said.get(peer) == said:
            return []
        self._said[peer] = said
        rows = self._rows.setdefault(peer, OrderedDict())
        self._rows.move_to_end(peer)
        refused: list[RowRefused] = []
        for transfer in transfers:
            reason = self._keep(rows, transfer)
            if reason is not None:
                refused.append(reason)
            elif transfer.whole and self._is_policy(transfer):
                self.holds(peer, transfer.policy_version, now_s)
        while len(rows) > ROWS_PER_PEER:
            rows.popitem(last=False)
        _forget_names(rows)
        while len(self._rows) > MAX_PEERS:
            gone, _ = self._rows.popitem(last=False)
            del self._said[gone]
        return refused

    def report(self, served: Mapping[bytes, int], now_s: float) -> Sliced[list[VersionTransfers]]:
        """Return a row a version, the newest first. Others may run where it yields: each row is as it was one moment.

        Args:
            served: bytes that the coordinator gave, by artifact, since it started.
            now_s: now.

        """
        tallies = {version: _Tally() for version in self._versions}
        for number, own in enumerate(list(self._rows.values())):
            if number % PEERS_AT_ONCE == PEERS_AT_ONCE - 1:
                yield
            _count(own, tallies)
        found: list[VersionTransfers] = []
        for version in sorted(tallies, reverse=True):
            yield
            if version in self._versions:
                found.append(self._report(version, tallies[version], served, now_s))
        return found

    def _keep(self, rows: OrderedDict[tuple[int, bytes], _Row], transfer: Transfer) -> RowRefused | None:
        entry = self._versions.get(transfer.policy_version)
        if entry is None:
            # One that is no longer listed was right when it was said first.
            too_new = transfer.policy_version > max(self._versions, default=-1)
            return RowRefused.UNKNOWN_VERSION if too_new else None
        artifact = entry.artifacts.get(transfer.digest)
        if artifact is None:
            return RowRefused.UNKNOWN_ARTIFACT
        of_file = transfer.fetched.total + transfer.made_bytes + transfer.disk_bytes
        # Changes are used where they are less than the file.
        if max(of_file, transfer.deltas.total) > artifact.size_bytes:
            return RowRefused.TOO_MANY_BYTES
        key, row = (transfer.policy_version, transfer.digest), _row(transfer, artifact)
        # A restarted node finds the file on its disk, which is not how it came.
        if not (row.is_disk_only and key in rows):
            rows[key] = row
            rows.move_to_end(key)
        return None

    def _is_policy(self, transfer: Transfer) -> bool:
        entry = self._versions.get(transfer.policy_version)
        if entry is None:
            return False
        kind = entry.artifacts[transfer.digest].kind
        return kind in ADAPTER_KINDS if entry.is_base else kind is not ArtifactKind.DELTA

    def _report(self, version: int, tally: "_Tally", served: Mapping[bytes, int], now_s: float) -> VersionTransfers:
        entry = self._versions[version]
        coordinator, peers, mirrors, deltas, made, disk = tally.counts
        timed = entry.published_s is not None
        return VersionTransfers(
            policy_version=version,
            is_base=entry.is_base,
            timed=timed,
            age_s=None if entry.published_s is None else max(0.0, now_s - entry.published_s),
            nodes=len(entry.nodes),
            had=len(entry.had),
            half_s=_time(entry, 0.5),
            all_s=_time(entry, 1.0),
            told=tally.told,
            whole=tally.whole,
            bytes_coordinator=coordinator,
            bytes_peers=peers,
            bytes_mirrors=mirrors,
            bytes_deltas=deltas,
            bytes_made=made,
            bytes_disk=disk,
            bytes_served=sum(served.get(digest, 0) for digest in entry.artifacts) if timed else None,
            slowest_s=tally.slowest_s,
            failures=tally.failures,
            faults=_faults(tally.named),
            faults_left_out=max(0, len(tally.named) - LISTED_FAULTS),
        )


@dataclass(slots=True)
class _Tally:
    """What all peers say of one version."""

    counts: list[int] = field(default_factory=lambda: [0] * 6)
    slowest_s: float = 0.0
    failures: int = 0
    told: int = 0
    whole: int = 0
    named: Counter[tuple[str, FaultReason]] = field(default_factory=Counter[tuple[str, FaultReason]])
    """By how many peers each source is named, whatever the number of files with which one names it."""


def _count(own: Mapping[tuple[int, bytes], _Row], tallies: Mapping[int, _Tally]) -> None:
    """Add one peer's rows to those of their versions."""
    of_version: dict[int, list[_Row]] = {}
    for (version, _), row in own.items():
        of_version.setdefault(version, []).append(row)
    for version, rows in of_version.items():
        tally = tallies.get(version)
        if tally is None:
            continue
        tally.told += 1
        tally.whole += any(row.whole for row in rows)
        for row in rows:
            tally.counts = list(map(add, tally.counts, row.counts))
            tally.slowest_s = max(tally.slowest_s, row.seconds)
            tally.failures += row.failures
        tally.named.update({fault for row in rows for fault in row.faults})


def _row(transfer: Transfer, artifact: Artifact) -> _Row:
    by_kind = [
        getattr(transfer.fetched, name) + getattr(transfer.deltas, name) for name in ("coordinator", "peers", "mirrors")
    ]
    deltas = transfer.fetched.total if artifact.kind is ArtifactKind.DELTA else transfer.deltas.total
    return _Row(
        counts=(by_kind[0], by_kind[1], by_kind[2], deltas, transfer.made_bytes, transfer.disk_bytes),
        seconds=transfer.seconds,
        failures=transfer.failures,
        whole=transfer.whole,
        faults=tuple((fault.source, fault.reason) for fault in transfer.faults),
    )


def _time(entry: _Version, share: float) -> float | None:
    """Return after how many seconds that share of the nodes had it; None if they do not, or nobody knows."""
    needed = ceil(share * len(entry.nodes))
    if not needed or len(entry.had) < needed:
        return None
    return sorted(entry.had.values())[needed - 1]


def _forget_names(rows: OrderedDict[tuple[int, bytes], _Row]) -> None:
    """Keep what the newest rows of a peer name."""
    left = NAMES_PER_PEER
    for key in reversed(rows):
        row = rows[key]
        if len(row.faults) > left:
            rows[key] = replace(row, faults=row.faults[:left])
        left -= min(left, len(row.faults))


def _faults(named: Counter[tuple[str, FaultReason]]) -> list[FaultStatus]:
    """Return those that are listed: lies first, then those whom most name."""
    order = nsmallest(LISTED_FAULTS, named.items(), key=lambda item: (item[0][1] not in LIES, -item[1], item[0]))
    return [
        FaultStatus(source=source, reason=reason.value, named_by=count, lie=reason in LIES)
        for (source, reason), count in order
    ]
