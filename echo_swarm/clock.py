"""Time as an argument. Wall-clock time only ever expires things; durations use the monotonic clock."""

import time
from typing import Protocol


class Clock(Protocol):
    """Where deciders and services get the time from."""

    def wall_s(self) -> float:
        """Seconds since 1970, comparable between machines up to their skew."""
        ...

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary start, never running backwards."""
        ...


class SystemClock:
    """The machine's clocks."""

    def wall_s(self) -> float:
        """Return `time.time()`."""
        return time.time()

    def monotonic_s(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to, for tests and simulations."""

    def __init__(self, start_s: float = 1_000_000.0) -> None:
        self._now_s = start_s

    def wall_s(self) -> float:
        """Return the set time."""
        return self._now_s

    def monotonic_s(self) -> float:
        """Return the set time."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move both clocks forward by `seconds` >= 0."""
        if seconds < 0:
            raise ValueError("time does not run backwards")
        self._now_s += seconds
