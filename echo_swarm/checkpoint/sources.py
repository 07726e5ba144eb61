"""Which peers a download may ask now, and when to stop asking. Pure but for the callable that names providers."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from echo_swarm.checkpoint.fetch_report import FetchSettings
from echo_swarm.identity import PeerId

Providers = Sequence[PeerId] | Callable[[], Awaitable[Sequence[PeerId]]]
"""Peers to ask; or who knows them at the moment (through the directory, for example)."""

GIVEN_UP_REST_S = 5.0
"""Less than `starve_s`, so that a coordinator that comes back is found before a fetch ends for lack of sources."""
MAX_KNOWN = 512
"""Peers in one download; anybody may name others."""
USELESS_S = 4.0
"""A source that gave nothing for so long gives way to one that was not tried yet."""


@dataclass(slots=True)
class _Standing:
    active: bool = False
    attempts: int = 0
    """Failures in a row without a piece in between."""
    not_before_s: float = 0.0
    liar: bool = False
    useful_at_s: float = 0.0
    """When it began, or gave the last piece."""


class SourceBook:
    """Standing of each provider within one download.

    Args:
        max_active: sources asked at the same time.
        max_attempts: failures in a row before a source is given up.
        retry_s: pause after the first failure; doubles with each.
        reserved: the coordinator: a place is kept for it, since all others may be of no use.

    """

    def __init__(self, *, max_active: int, max_attempts: int, retry_s: float, reserved: PeerId | None = None) -> None:
        self._reserved = reserved
        self._max_active = max_active
        self._max_attempts = max_attempts
        self._retry_s = retry_s
        self._standings: dict[PeerId, _Standing] = {}

    @classmethod
    def of(cls, settings: FetchSettings, coordinator: PeerId | None) -> "SourceBook":
        """Return the book of a fetch with these settings."""
        return cls(
            max_active=settings.max_sources,
            max_attempts=settings.max_attempts,
            retry_s=settings.retry_s,
            reserved=coordinator,
        )

    @property
    def active(self) -> int:
        """Number of sources being asked."""
        return sum(standing.active for standing in self._standings.values())

    def know(self, peer: PeerId) -> None:
        """Add a provider. With MAX_KNOWN of them, one that failed makes room, or it is not added."""
        if peer in self._standings:
            return
        if len(self._standings) >= MAX_KNOWN:
            idle = [p for p, s in self._standings.items() if not (s.active or s.liar) and s.attempts]
            if not idle and peer != self._reserved:
                return
            if idle:
                del self._standings[max(idle, key=lambda peer: self._standings[peer].attempts)]
        self._standings[peer] = _Standing()

    def start(self, now_s: float) -> list[PeerId]:
        """Return the sources to start now, those with the fewest failures first, and count them as active."""
        ready = [p for p, s in self._standings.items() if not s.active and self._may_start(s, now_s)]
        others = sorted((p for p in ready if p != self._reserved), key=lambda peer: self._standings[peer].attempts)
        chosen = [p for p in ready if p == self._reserved] + others[: max(0, self._open_places)]
        chosen = chosen[: max(0, self._max_active - self.active)]
        for peer in chosen:
            self._standings[peer].active = True
            self._standings[peer].useful_at_s = now_s
        return chosen

    @property
    def _open_places(self) -> int:
        """Free places for others than the reserved source."""
        standing = self._standings.get(self._reserved) if self._reserved is not None else None
        kept = int(standing is not None and not standing.liar and self._max_active > 1)
        return self._max_active - kept - sum(s.active for p, s in self._standings.items() if p != self._reserved)

    def has_untried(self, now_s: float) -> bool:
        """Return whether a source that could be asked now was never asked: it waits for a place."""
        return any(not s.active and s.attempts == 0 and self._may_start(s, now_s) for s in self._standings.values())

    def gives_way(self, now_s: float) -> PeerId | None:
        """Return the source to stop, if all places are taken and another was not tried yet; `failed` ends it."""
        useless = {
            p: s.useful_at_s
            for p, s in self._standings.items()
            if s.active and p != self._reserved and now_s - s.useful_at_s >= USELESS_S
        }
        if not useless or self._open_places > 0 or not self.has_untried(now_s):
            return None
        return min(useless, key=lambda peer: useless[peer])

    def delivered(self, peer: PeerId, now_s: float) -> None:
        """A verified piece came from it."""
        self._standings[peer].attempts = 0
        self._standings[peer].useful_at_s = now_s

    def failed(self, peer: PeerId, now_s: float) -> None:
        """It is no longer asked; perhaps again later."""
        standing = self._standings[peer]
        standing.active = False
        standing.attempts += 1
        standing.not_before_s = now_s + self._retry_s * 2 ** (standing.attempts - 1)

    def lied(self, peer: PeerId) -> None:
        """It is never asked again."""
        self._standings[peer].active = False
        self._standings[peer].liar = True

    @property
    def exhausted(self) -> bool:
        """Whether nobody is asked and nobody may be asked later."""
        return not any(standing.active or self._usable(standing) for standing in self._standings.values())

    def _may_start(self, standing: _Standing, now_s: float) -> bool:
        # One that was given up may have come back: it is tried again, but not waited for.
        rest_s = 0.0 if self._usable(standing) else GIVEN_UP_REST_S
        return not standing.liar and standing.not_before_s + rest_s <= now_s

    def _usable(self, standing: _Standing) -> bool:
        return not standing.liar and standing.attempts < self._max_attempts
