"""What a person is told of a version on its way: bytes verified of all, share, rate, time left, from how many peers.

Looked at again and again: the rate is that of the last few looks. Pure; reads a `FetchWatch`. What is over goes into
`TransferLog`, for the coordinator.
"""

from collections import deque
from dataclasses import dataclass

from echo_node.transfer_log import TransferLog
from echo_swarm.checkpoint.watch import FetchWatch, Stage
from echo_swarm.render import duration, size

RATE_WINDOW_S = 15.0
"""Looks older than this do not count for the rate, but the one before does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferNow:
    """One look at a transfer."""

    what: str
    """Such as `fetching version 7`."""
    done_bytes: int
    total_bytes: int
    bytes_per_s: float | None
    sources: int = 0
    mirrors: int = 0
    """Among the sources."""
    resumed_bytes: int = 0

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return min(1.0, self.done_bytes / max(1, self.total_bytes))

    @property
    def left_s(self) -> float | None:
        """Seconds until the end at the present rate; None while nothing moves."""
        return (self.total_bytes - self.done_bytes) / self.bytes_per_s if self.bytes_per_s else None

    def __str__(self) -> str:
        """Return it in words."""
        parts = [f"{self.what}: {size(self.done_bytes)} of {size(self.total_bytes)} ({_percent(self.share)})"]
        if self.bytes_per_s is not None:
            parts.append(f"{size(round(self.bytes_per_s))}/s")
        if self.left_s is not None and self.share < 1:
            parts.append(f"{duration(self.left_s)} left")
        if self.sources:
            peers = counted(self.sources - self.mirrors, "peer")
            mirrors = counted(self.mirrors, "mirror")
            parts.append(f"from {' and '.join(filter(None, (peers, mirrors)))}")
        if self.resumed_bytes:
            parts.append(f"resumed at {_percent(self.resumed_bytes / max(1, self.total_bytes))}")
        return ", ".join(parts)


class TransferView:
    """The transfer that a node has under way, if any."""

    def __init__(self) -> None:
        self.log = TransferLog()
        self._watch: FetchWatch | None = None
        self._name = ""
        self._looks: deque[tuple[float, int]] = deque()
        self._looked_at: object = None

    def begin(self, name: str) -> FetchWatch:
        """Follow a new transfer."""
        self._watch, self._name = FetchWatch(), name
        return self._watch

    def end(self, watch: FetchWatch, digest: bytes) -> None:
        """Follow it no longer: the file with this digest is here, or it was given up."""
        if watch.report is not None:
            self.log.note(digest, watch.report)
        if self._watch is watch:
            self._watch = None

    def look(self, now_s: float) -> TransferNow | None:
        """Return how far it is; None when there is none, or its size is not known yet."""
        watch = self._watch
        if watch is None or watch.total_bytes <= 0:
            return None
        itself = watch.change == 0
        fetching = watch.stage is Stage.FETCHING
        done_bytes = min(watch.done_bytes, watch.total_bytes)
        return TransferNow(
            what=self._what(watch),
            done_bytes=done_bytes,
            total_bytes=watch.total_bytes,
            bytes_per_s=self._rate(watch, done_bytes, now_s),
            sources=watch.sources if fetching else 0,
            mirrors=watch.mirrors if fetching else 0,
            resumed_bytes=(watch.resumed_bytes or 0) if fetching and itself else 0,
        )

    def _what(self, watch: FetchWatch) -> str:
        name = self._name
        if watch.change:
            name = f"change {watch.change} of {watch.changes} that make {name}"
        elif watch.stage is Stage.APPLYING:
            name = f"the changes that make {name}"
        return f"{watch.stage.value} {name}"

    def _rate(self, watch: FetchWatch, done_bytes: int, now_s: float) -> float | None:
        key = (id(watch), watch.stage, watch.change)
        if key != self._looked_at or (self._looks and done_bytes < self._looks[-1][1]):
            self._looked_at = key
            self._looks.clear()
        self._looks.append((now_s, done_bytes))
        while len(self._looks) > 2 and now_s - self._looks[1][0] >= RATE_WINDOW_S:
            self._looks.popleft()
        since_s, before = self._looks[0]
        return (done_bytes - before) / (now_s - since_s) if now_s > since_s else None


def counted(number: int, what: str) -> str:
    """Return such as `2 peers`; nothing for none."""
    return f"{number} {what}{'s' if number > 1 else ''}" if number else ""


def _percent(share: float) -> str:
    return f"{int(100 * share)} %"
