"""Which peers a download may ask now, and when to stop asking. Pure but for the callable that names providers."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from echo_swarm.identity import PeerId

Providers = Sequence[PeerId] | Callable[[], Awaitable[Sequence[PeerId]]]
"""Peers to ask; or who knows them at the moment (through the directory, for example)."""

GIVEN_UP_REST_S = 5.0
"""Less than `starve_s`, so that a coordinator that comes back is found before a fetch ends for lack of sources."""
MAX_KNOWN = 512
"""Peers in one download; anybody may name others."""


@dataclass(slots=True)
class _Standing:
    active: bool = False
    attempts: int = 0
    """Failures in a row without a piece in between."""
    not_before_s: float = 0.0
    liar: bool = False


class SourceBook:
    """Standing of each provider within one download.

    Args:
        max_active: sources asked at the same time.
        max_attempts: failures in a row before a source is given up.
        retry_s: pause after the first failure; doubles with each.

    """

    def __init__(self, *, max_active: int, max_attempts: int, retry_s: float) -> None:
        self._max_active = max_active
        self._max_attempts = max_attempts
        self._retry_s = retry_s
        self._standings: dict[PeerId, _Standing] = {}

    @property
    def active(self) -> int:
        """Number of sources being asked."""
        return sum(standing.active for standing in self._standings.values())

    def know(self, peer: PeerId) -> None:
        """Add a provider, unless there are MAX_KNOWN."""
        if len(self._standings) < MAX_KNOWN:
            self._standings.setdefault(peer, _Standing())

    def start(self, now_s: float) -> list[PeerId]:
        """Return the sources to start now, those with the fewest failures first, and count them as active."""
        room = self._max_active - self.active
        ready = [p for p, s in self._standings.items() if not s.active and self._may_start(s, now_s)]
        chosen = sorted(ready, key=lambda peer: self._standings[peer].attempts)[: max(0, room)]
        for peer in chosen:
            self._standings[peer].active = True
        return chosen

    def delivered(self, peer: PeerId) -> None:
        """A verified piece came from it."""
        self._standings[peer].attempts = 0

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
