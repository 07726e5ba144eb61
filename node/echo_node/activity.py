"""What the node does or waits for, since when, and what it has done so far: for people, beats and `status`.

Every part of the node sets its own wait; the headline is the most fundamental one (no connection explains no work,
not the other way round). Lines are printed when something changes; what stays the same is repeated ever more rarely
and with a count.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from echo_swarm.clock import Clock
from echo_swarm.render import duration

FIRST_REPEAT_S = 60.0
LAST_REPEAT_S = 3600.0
"""Repeats come after 1, 2, 4, … minutes, then once an hour."""
RATE_WINDOW_S = 30.0
"""Time constant of the token rate."""

Emit = Callable[[str], None]
"""Prints one line."""


class Part(IntEnum):
    """Who may be waiting; the lowest explains the others."""

    LINK = 0
    POLICY = 1
    DISK = 2
    BACKEND = 3
    WORK = 4
    PUSH = 5


@dataclass(slots=True, kw_only=True)
class _Wait:
    cause: str
    since_s: float
    detail: str = ""
    repeat_at_s: float
    interval_s: float = FIRST_REPEAT_S
    count: int = 0


class Activity:
    """The node's own account of itself."""

    def __init__(self, clock: Clock, emit: Emit) -> None:
        self._clock = clock
        self._emit = emit
        self._waits: dict[Part, _Wait] = {}
        self._rejections: dict[str, _Wait] = {}
        self._quiet_until_s: dict[tuple[Part, str], float] = {}
        """A wait that comes and goes (work that arrives in spurts, say) is told once a minute at most."""
        self._doing = "starting"
        self._progress = ""
        self._note = ""

    def say(self, line: str) -> None:
        """Print a line about something that happened once."""
        self._emit(line)

    def doing(self, what: str) -> None:
        """Set what the headline says while nothing is waited for."""
        self._doing = what
        self._progress = ""

    def progress(self, what: str) -> None:
        """Set what the headline says for now, until `doing` is next set. Never printed."""
        self._progress = what

    def note(self, what: str) -> None:
        """Set what the headline adds in brackets while nothing is waited for; empty for nothing. Never printed."""
        self._note = what

    def waits(self, part: Part, cause: str, detail: str = "") -> None:
        """Note that `part` waits for `cause`. Prints it when it is new, and later again, rarely and with a count.

        `cause` is compared with the last one; `detail` (an error's text, say) may differ each time.
        """
        now_s = self._clock.monotonic_s()
        wait = self._waits.get(part)
        if wait is None or wait.cause != cause:
            self._waits[part] = _Wait(cause=cause, since_s=now_s, repeat_at_s=now_s + FIRST_REPEAT_S, detail=detail)
            if now_s >= self._quiet_until_s.get((part, cause), now_s):
                self._quiet_until_s[part, cause] = now_s + FIRST_REPEAT_S
                self._emit(f"waiting for {cause}{_in_brackets(detail)}")
            return
        wait.count += 1
        wait.detail = detail
        if now_s >= wait.repeat_at_s:
            since = duration(now_s - wait.since_s)
            self._emit(f"still waiting for {cause}, for {since} and {wait.count} tries{_in_brackets(detail)}")
            wait.interval_s = min(2 * wait.interval_s, LAST_REPEAT_S)
            wait.repeat_at_s = now_s + wait.interval_s

    def done(self, part: Part, line: str = "") -> None:
        """Note that `part` waits no longer; `line` is printed if it did."""
        if self._waits.pop(part, None) is not None and line:
            self._emit(line)

    def rejected(self, reason: str, detail: str) -> None:
        """Print why work was not accepted: the first of each reason, then at most once a minute with a count."""
        now_s = self._clock.monotonic_s()
        seen = self._rejections.setdefault(reason, _Wait(cause=reason, since_s=now_s, repeat_at_s=now_s))
        seen.count += 1
        if now_s >= seen.repeat_at_s:
            many = f"{seen.count} trajectories" if seen.count > 1 else "a trajectory"
            self._emit(f"{many} not accepted: {reason}{_in_brackets(detail)}")
            seen.count = 0
            seen.repeat_at_s = now_s + FIRST_REPEAT_S

    def is_waiting(self, part: Part) -> bool:
        """Whether `part` waits for something."""
        return part in self._waits

    @property
    def headline(self) -> str:
        """At most 128 characters: what it does, or what it waits for and since when."""
        if not self._waits:
            return f"{self._progress or self._doing}{_in_brackets(self._note)}"[:128]
        wait = self._waits[min(self._waits)]
        since = duration(self._clock.monotonic_s() - wait.since_s)
        return f"waiting for {wait.cause}, {since}{_in_brackets(wait.detail)}"[:128]


class Rate:
    """An exponentially forgetting rate, such as tokens a second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._per_s = 0.0
        self._at_s = clock.monotonic_s()
        self._pending = 0
        self._known = False

    def add(self, amount: int) -> None:
        """Count `amount` now."""
        self._pending += amount

    def per_s(self) -> float:
        """Return the rate over about the last half minute."""
        now_s = self._clock.monotonic_s()
        elapsed_s = now_s - self._at_s
        if elapsed_s < 1.0:
            return self._per_s
        weight = min(1.0, elapsed_s / RATE_WINDOW_S) if self._known else 1.0
        self._per_s += weight * (self._pending / elapsed_s - self._per_s)
        self._known = self._known or self._pending > 0
        self._pending = 0
        self._at_s = now_s
        return self._per_s


def _in_brackets(detail: str) -> str:
    return f" ({detail})" if detail else ""
