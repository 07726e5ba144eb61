"""How long it takes from the news of a version to tokens under it, and where that time goes.

    heard ─manifest─► first byte asked for ─fetch─► last byte ─verify─► usable ─wait─► ─load─► ─first token─► sampling
                                                                         │
                          what runs finishes on the old weights, and work that wants the new ones has to come

Sampling goes on with the old version until the load begins. Only a version's first load counts.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from echo_node.backends.base import LoadTimes
from echo_swarm.clock import Clock

KEPT = 32
"""Swaps remembered, and versions heard of and not yet loaded: a coordinator may name as many as it likes."""
SAY_EVERY_S = 60.0
"""Versions may come every few seconds; a line about one is printed no more often than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """One change of version. Seconds; all parts but `rest_s` together are `total_s`."""

    version: int
    size_bytes: int
    """Fetched from peers for it; 0 when it lay here already."""
    total_s: float
    """From the moment this node heard of the version to the first token under it."""
    manifest_s: float
    """Until its manifest was here and trusted, an earlier download's end included."""
    fetch_s: float
    """Pieces from peers, each checked as it came; of an adapter's base as well, the first time."""
    verify_s: float
    """Flushing to disk, hashing the whole file, looking at its header."""
    wait_s: float
    """Until running completions were done and work for the version was there."""
    load_s: float
    """From the file into the engine."""
    first_token_s: float
    """Of the self-test, which is the first to sample; 0 for a backend without one."""
    rest_s: float
    """From there until leases are served: the rest of the self-test."""

    def __str__(self) -> str:
        """Return the parts that matter in words."""
        return f"{_s(self.total_s)} from its announcement to its first token: {', '.join(_parts(self))}"


@dataclass(slots=True, kw_only=True)
class _Coming:
    """A version that was heard of. Times are monotonic; None: not yet."""

    heard_s: float
    begun_s: float | None = None
    usable_s: float | None = None
    verify_s: float = 0.0
    size_bytes: int = 0


class Swaps:
    """Takes note of each step; knows what came of it. No IO."""

    def __init__(self, clock: Clock, say: Callable[[str], None]) -> None:
        self._clock = clock
        self._say = say
        self._coming: dict[int, _Coming] = {}
        self._done: deque[Swap] = deque(maxlen=KEPT)
        self._quiet_until_s = clock.monotonic_s()

    @property
    def done(self) -> Sequence[Swap]:
        """The last KEPT, oldest first."""
        return tuple(self._done)

    def heard(self, version: int) -> None:
        """A version exists. What counts is the first time."""
        self._coming.setdefault(version, _Coming(heard_s=self._clock.monotonic_s()))
        while len(self._coming) > KEPT:
            del self._coming[min(self._coming)]

    def fetching(self, version: int) -> None:
        """Its manifest is trusted, and its pieces are asked for from now on."""
        if (coming := self._coming.get(version)) and coming.begun_s is None:
            coming.begun_s = self._clock.monotonic_s()

    def fetched(self, version: int, *, size_bytes: int, verify_s: float) -> None:
        """Some of its bytes are here, whole files or not; so much of the time since `fetching` went into checking."""
        if coming := self._coming.get(version):
            coming.size_bytes += size_bytes
            coming.verify_s += verify_s

    def usable(self, version: int) -> None:
        """All its files are here and checked."""
        if coming := self._coming.get(version):
            coming.usable_s = self._clock.monotonic_s()

    def loaded(self, version: int, times: LoadTimes) -> None:
        """A backend serves requests with it as of now."""
        coming = self._coming.get(version)
        self._coming = {v: other for v, other in self._coming.items() if v > version}
        if coming is None or coming.begun_s is None or coming.usable_s is None:
            return
        now_s = self._clock.monotonic_s()
        swap = Swap(
            version=version,
            size_bytes=coming.size_bytes,
            total_s=now_s - times.rest_s - coming.heard_s,
            manifest_s=coming.begun_s - coming.heard_s,
            fetch_s=max(0.0, coming.usable_s - coming.begun_s - coming.verify_s),
            verify_s=coming.verify_s,
            wait_s=max(0.0, now_s - coming.usable_s - times.total_s),
            load_s=times.load_s,
            first_token_s=times.first_token_s,
            rest_s=times.rest_s,
        )
        self._done.append(swap)
        if now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + SAY_EVERY_S
            self._say(f"version {version}: {swap}")


def summary(swaps: Sequence[Swap]) -> str:
    """Return the typical swap of several in words."""
    typical = median(swap.total_s for swap in swaps)
    longest = max(swaps, key=lambda swap: swap.total_s)
    many = "one version" if len(swaps) == 1 else f"the last {len(swaps)} versions"
    return f"{many}: typically {_s(typical)} from announcement to first token; version {longest.version}: {longest}"


def _parts(swap: Swap) -> list[str]:
    named = {
        "manifest": swap.manifest_s,
        "fetch": swap.fetch_s,
        "verify": swap.verify_s,
        "wait for running work": swap.wait_s,
        "load": swap.load_s,
        "first token": swap.first_token_s,
    }
    return [f"{name} {_s(seconds)}" for name, seconds in named.items() if seconds >= 0.05] or ["nothing that took long"]


def _s(seconds: float) -> str:
    return f"{seconds:.1f} s"
