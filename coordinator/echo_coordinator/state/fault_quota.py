"""How much useless work one peer may make us look at. Pure; times are monotonic seconds.

A leaky bucket for each peer: refusals that are the peer's own fault fill it, time drains it. While it is full, pushes
are answered `over_quota` unread. Work that came late or twice counts an eighth: it happens to honest nodes, whose
whole outbox may come again after a restart, but not without end. Work that grew stale never counts; a lease bounds it.
"""

from collections import OrderedDict

from echo_swarm.identity import PeerId
from echo_swarm.trajectory import Reason

BURST = 1024
"""Refusals at once, or eight times as many replays. An honest node with an outbox full of work that nobody knows any
more stays below."""
PER_S = 4.0
"""Refusals a second that are forgiven."""
MAX_PEERS = 4096
"""Peers remembered; identities cost nothing."""

FAULTS = frozenset(Reason) - {
    Reason.ACCEPTED,
    Reason.LATE,
    Reason.STALE,
    Reason.DUPLICATE,
    Reason.OVER_QUOTA,
    Reason.UNSCORABLE,
}
"""What fills the bucket."""
REPLAYS = frozenset({Reason.LATE, Reason.DUPLICATE})
"""What fills it slowly; also a submission that is answered as before."""
REPLAY_COST = 1 / 8


class FaultQuota:
    """The buckets."""

    def __init__(self) -> None:
        self._levels: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()
        """Peer → level and when it was taken; the last charged comes last."""

    def is_exhausted(self, peer: PeerId, now: float) -> bool:
        """Whether a push of this peer is to be refused unread."""
        return self._level(peer, now) >= BURST

    def charge(self, peer: PeerId, reasons: list[Reason], now: float) -> None:
        """Count refusals against a peer."""
        faults = sum(1.0 if reason in FAULTS else REPLAY_COST * (reason in REPLAYS) for reason in reasons)
        if not faults:
            return
        self._levels[peer] = (self._level(peer, now) + faults, now)
        self._levels.move_to_end(peer)
        if len(self._levels) > MAX_PEERS:
            self._levels.popitem(last=False)

    def _level(self, peer: PeerId, now: float) -> float:
        level, at = self._levels.get(peer, (0.0, now))
        return max(0.0, level - PER_S * (now - at))
