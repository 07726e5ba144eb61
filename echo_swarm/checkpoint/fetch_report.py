"""What a fetch is allowed, what it did, and whom it does not ask again."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from echo_swarm.checkpoint.reach import Reach, is_mirror
from echo_swarm.errors import Unavailable
from echo_swarm.identity import PeerId
from echo_swarm.transfers import LIES, FaultReason

SILENT_HOLD_S = 60.0
"""How long a peer is avoided that left a question open."""
MAX_FAULTS = 16
"""Peers named with what they did."""


class Origin(StrEnum):
    """What kind of source bytes came from."""

    COORDINATOR = "coordinator"
    PEER = "peer"
    MIRROR = "mirror"

    @classmethod
    def of(cls, source: PeerId, coordinator: PeerId | None) -> "Origin":
        """Return the kind of a source."""
        if is_mirror(source):
            return cls.MIRROR
        return cls.COORDINATOR if source == coordinator else cls.PEER


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchSettings:
    """Limits and deadlines of a fetch."""

    max_sources: int = 12
    """Peers asked at the same time."""
    window: int = 8
    """Requests in flight with one peer."""
    max_in_flight: int = 64
    """With all peers."""
    max_in_flight_bytes: int = 32 << 20
    """The same by the size of pieces; bounds memory."""
    max_bytes_per_s: float | None = None
    """Of pieces asked for, from all peers and for all artifacts together; None for no limit."""
    answer_timeout_s: float = 15.0
    """For reaching a peer and learning which pieces it has; added to the time that a piece may take."""
    min_bytes_per_s: float = 64 * 1024
    """A peer slower than this, with its window full, is replaced."""
    max_attempts: int = 3
    """Failures in a row after which a peer is given up for this fetch."""
    retry_s: float = 0.5
    """Pause before a peer is asked again; doubles."""
    refresh_s: float = 0.5
    """How often it is looked for other peers to ask; pause before a peer that had no news is asked again."""
    news_wait_s: float = 10.0
    """How long a peer that is still downloading may wait with its answer until it has more."""
    greet_first_s: float = 0.1
    """Pause before a peer that has everything is asked who else is after it; doubles, up to `greet_s`."""
    greet_s: float = 15.0
    """How often a peer that has everything is asked again: it then knows that we want it still, and says who else."""
    providers_every_s: float = 2.0
    """How often a callable is asked for providers; every `refresh_s` while nobody is being asked."""
    enough_sources: int = 4
    """With so many being asked, `greet_s` passes before it is asked again, and then twice as long each time: those name
    others, and a search of the directory costs more bytes with every peer in it."""
    near: Reach = Reach.GLOBAL
    """How near an address of a peer may be that another one names."""
    starve_s: float = 20.0
    """How long to wait while nobody who is asked has a piece that is missing; and, when `sources` is a callable, for a
    provider to appear when none is left."""


@dataclass(slots=True, kw_only=True)
class FetchReport:
    """What one fetch did."""

    policy_version: int
    size_bytes: int
    path: Path | None = None
    """Where the whole, verified artifact lies."""
    resumed_bytes: int = 0
    """Verified bytes of an earlier attempt."""
    copied_bytes: int = 0
    """From other versions on this disk."""
    made_bytes: int = 0
    """Made of an older version and deltas."""
    delta_by_source: dict[PeerId, int] = field(default_factory=dict[PeerId, int])
    """Fetched of these deltas; not in `bytes_by_source`, which is of the artifact itself."""
    delta_fault: str = ""
    """Why a delta that promised to be cheaper was not used, or not to the end."""
    bytes_by_source: dict[PeerId, int] = field(default_factory=dict[PeerId, int])
    """Verified and written."""
    wasted_bytes: int = 0
    """Came twice (end game) or wrong."""
    retries: int = 0
    """Sources that failed and were, or could have been, asked again."""
    failures: dict[PeerId, str] = field(default_factory=dict[PeerId, str])
    """Last failure of each source that had one."""
    liars: dict[PeerId, str] = field(default_factory=dict[PeerId, str])
    """Sources that sent something wrong, and what."""
    reasons: dict[PeerId, FaultReason] = field(default_factory=dict[PeerId, FaultReason])
    """What kind of fault it was, of those that were at fault in this fetch (and not avoided for an earlier one)."""
    seconds: float = 0.0
    verify_s: float = 0.0
    """Of these, flushing the whole file to disk and hashing it; pieces are hashed as they come."""

    @property
    def delta_bytes(self) -> int:
        """Fetched of deltas, from all."""
        return sum(self.delta_by_source.values())

    def blame(self, peer: PeerId, reason: FaultReason) -> None:
        """Note what kind of fault a source's last one was. A lie is not made up for by a lesser one."""
        if self.reasons.get(peer) not in LIES or reason in LIES:
            self.reasons[peer] = reason

    @property
    def mirrors(self) -> int:
        """Return the bytes of `bytes_by_source` that came from mirrors."""
        return sum(size for source, size in self.bytes_by_source.items() if is_mirror(source))

    @property
    def faults(self) -> list[tuple[PeerId, str]]:
        """Return who did something wrong, and what: those that lied first, MAX_FAULTS at most."""
        return list({**self.liars, **{p: why for p, why in self.failures.items() if p not in self.liars}}.items())[
            :MAX_FAULTS
        ]

    def add_delta(self, delta: "FetchReport") -> None:
        """Count what fetching a delta for this artifact did."""
        add_bytes(self.delta_by_source, delta.bytes_by_source)
        self.wasted_bytes += delta.wasted_bytes
        self.retries += delta.retries
        self.liars.update(delta.liars)
        for peer, reason in delta.reasons.items():
            self.blame(peer, reason)


def add_bytes(to: dict[PeerId, int], more: Mapping[PeerId, int]) -> None:
    """Add bytes by source."""
    for peer, count in more.items():
        to[peer] = to.get(peer, 0) + count


class SourcesExhausted(Unavailable):
    """Nobody is left to ask for an artifact; `report` has what happened. What was verified stays on disk."""

    def __init__(self, report: FetchReport, missing_bytes: int) -> None:
        self.report = report
        listed = "; ".join(f"{peer}: {reason}" for peer, reason in report.faults) or "no provider known"
        super().__init__(
            f"version {report.policy_version}: {missing_bytes} of {report.size_bytes} bytes are missing and no source "
            f"is left ({listed})"
        )


class Grudges:
    """Peers that lied, for a while and in bounded number. The identity is free, so this only saves time."""

    def __init__(self, *, hold_s: float = 600.0, limit: int = 1024) -> None:
        self._hold_s = hold_s
        self._limit = limit
        self._until: dict[PeerId, tuple[float, str]] = {}
        self._silent: set[PeerId] = set()

    def add(self, peer: PeerId, reason: str, now_s: float, *, lied: bool = True) -> None:
        """Remember a liar; or for a shorter time one that is silent, which may only be slow."""
        self._until.pop(peer, None)
        self._until[peer] = (now_s + (self._hold_s if lied else SILENT_HOLD_S), reason)
        (self._silent.discard if lied else self._silent.add)(peer)
        self._silent.intersection_update(self._until)
        while len(self._until) > self._limit:
            del self._until[next(iter(self._until))]

    def reason(self, peer: PeerId, now_s: float) -> str | None:
        """Return why a peer is avoided now, or None."""
        until_s, reason = self._until.get(peer, (0.0, ""))
        return reason if until_s > now_s else None

    def avoids(self, peer: PeerId, report: FetchReport, now_s: float) -> bool:
        """Whether a peer is avoided now; the report says why."""
        reason = self.reason(peer, now_s)
        if reason is not None:
            (report.failures if peer in self._silent else report.liars).setdefault(peer, reason)
        return reason is not None

    def listed(self, now_s: float) -> dict[PeerId, str]:
        """Return the peers avoided now and why, for status."""
        return {peer: reason for peer, (until_s, reason) in self._until.items() if until_s > now_s}
