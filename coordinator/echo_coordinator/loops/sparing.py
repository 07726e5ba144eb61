"""An answer that costs something, given to whoever asks: the last one again, while a new one would cost too much."""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

SHARE = 0.02
"""Of the time that may go into making answers, however often they are asked for."""


class Sparing(Generic[T]):
    """Makes an answer anew as often as its cost allows.

    One that takes a millisecond is at most 50 ms old, one that takes a third of a second 17 s.

    Args:
        make: makes it. What it raises is passed on, and nothing is kept.
        clock: seconds; tests pass their own.

    """

    def __init__(self, make: Callable[[], T], clock: Callable[[], float] = time.perf_counter) -> None:
        self._make = make
        self._clock = clock
        self._last: T | None = None
        self._good_until = float("-inf")

    def __call__(self) -> T:
        """Return an answer."""
        began = self._clock()
        if self._last is None or began >= self._good_until:
            self._last = self._make()
            ended = self._clock()
            self._good_until = ended + (ended - began) / SHARE
        return self._last
