"""How much each peer may have in flight: what it has shown, not what it claims. Pure; times are monotonic seconds.

A window as in congestion control (slow start, validated by use). It begins at `probe_members`. A completion that is
accepted in time raises it by GROWTH as long as the peer uses a third of it; one that took much longer than the
run's others lowers it, down to the probe; one that was refused by the peer's own fault lowers it, down to one.
Work that ran out sets it back to the probe and halves it, work handed back as failed halves it; after REST_AFTER of
these in a row the peer gets one completion at a time, with pauses that double, until it delivers. One accepted
completion brings it back to the probe.

So a peer holds at most about three times what it lately held and delivered, whatever speed it claims. An honest node
with 64 places has 4, 12, 36, then 64 of them filled: all after 30 accepted completions. What it claims still bounds
what it gets at once. There is no bound by rate times `lease_target_s`: a node whose completions take longer than that
could never fill its places.
"""

from collections import OrderedDict
from dataclasses import dataclass
from math import inf

from echo_coordinator.state.work_settings import WorkSettings
from echo_swarm.identity import PeerId

GROWTH = 2
"""Completions more for each accepted one: three times as many each round."""
PATIENCE = 4.0
"""A completion is in time that took at most this many times `lease_target_s` or the run's mean, the longer of both."""
REST_AFTER = 3
"""Failures in a row before a peer has to pause."""
MAX_PEERS = 4096
"""Peers remembered; a forgotten one is a newcomer again."""
_LEAST_WEIGHT = 0.02
"""Of the newest completion in the mean time, once there are many."""


@dataclass(slots=True)
class _Shown:
    window: int
    peak: int = 0
    """What it had in flight after its newest grant."""
    failures: int = 0
    """In a row: nothing accepted in between."""
    failed_at: float = 0.0
    accepted_at: float = -inf


class Pace:
    """The windows of all peers."""

    def __init__(self, settings: WorkSettings) -> None:
        self._settings = settings
        self._shown: OrderedDict[PeerId, _Shown] = OrderedDict()
        """The one touched last comes last."""
        self.on_probation: set[PeerId] = set()
        """Peers that failed an audit: one completion at a time until some are clean, whatever they deliver."""
        self._mean_s = 0.0
        self._taken = 0

    @property
    def patience_s(self) -> float:
        """How old a lease may be when its work comes, to count as delivered in time."""
        return PATIENCE * max(self._settings.lease_target_s, self._mean_s)

    def allowance(self, peer: PeerId, now: float) -> int:
        """Return how many completions a peer may have in flight while others could take them too."""
        shown = self._shown.get(peer)
        if shown is not None and shown.failures >= REST_AFTER:
            return int(now >= shown.failed_at + self._rest_s(shown.failures))
        window = self._settings.probe_members if shown is None else shown.window
        return min(1, window) if peer in self.on_probation else window

    def longest_s(self, peer: PeerId) -> float:
        """Return for how long beats may keep a new lease alive: half as long after each failure in a row."""
        shown, settings = self._shown.get(peer), self._settings
        longest = settings.lease_max_s / 2 ** min(shown.failures if shown else 0, 32)
        return max(longest, min(settings.lease_s, settings.lease_max_s))

    def granted(self, peer: PeerId, in_flight: int) -> None:
        """Note what a peer has in flight after a grant."""
        self._of(peer).peak = in_flight

    def has_delivered_since(self, peer: PeerId, since: float) -> bool:
        """Whether anything of a peer was accepted at `since` or later."""
        shown = self._shown.get(peer)
        return shown is not None and shown.accepted_at >= since

    def accepted(self, peer: PeerId, granted_at: float, now: float) -> None:
        """Note an accepted completion of a lease granted then."""
        took_s = now - granted_at
        in_time = took_s <= self.patience_s or not self._taken
        self._taken += 1
        self._mean_s += max(_LEAST_WEIGHT, 1 / self._taken) * (took_s - self._mean_s)
        shown, probe = self._of(peer), self._settings.probe_members
        shown.failures, shown.accepted_at = 0, now
        shown.window = max(shown.window, probe)
        if not in_time:
            shown.window = max(probe, shown.window - GROWTH)
        elif (GROWTH + 1) * shown.peak >= shown.window:
            shown.window = min(shown.window + GROWTH, self._settings.max_in_flight_per_peer)

    def refused(self, peer: PeerId) -> None:
        """Note a completion that was refused, by the peer's own fault."""
        shown = self._of(peer)
        shown.window = max(1, shown.window - 1)

    def failed(self, peer: PeerId, now: float) -> None:
        """Note leases that were handed back as failed or too late, or that the peer did not know of."""
        shown = self._of(peer)
        shown.window = max(1, shown.window // 2)
        shown.failures += 1
        shown.failed_at = now

    def expired(self, peer: PeerId, now: float) -> None:
        """Note leases that ran out."""
        shown = self._of(peer)
        shown.window = min(shown.window, self._settings.probe_members)
        self.failed(peer, now)

    def _rest_s(self, failures: int) -> float:
        return min(self._settings.lease_max_s, self._settings.lease_s * 2 ** min(failures - REST_AFTER, 32))

    def _of(self, peer: PeerId) -> _Shown:
        shown = self._shown.setdefault(peer, _Shown(window=self._settings.probe_members))
        self._shown.move_to_end(peer)
        if len(self._shown) > MAX_PEERS:
            self._shown.popitem(last=False)
        return shown
