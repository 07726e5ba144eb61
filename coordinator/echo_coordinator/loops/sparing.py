"""An answer that costs something, given to whoever asks: the last one again, while a new one would cost too much."""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio

from echo_coordinator.state.slices import Sliced, in_slices

T = TypeVar("T")

SHARE = 0.02
"""Of the time that may go into making answers, however often they are asked for."""


class Sparing(Generic[T]):
    """Makes an answer anew as often as its cost allows, between other tasks.

    One that takes a millisecond is at most 50 ms old, one that takes a third of a second 17 s; and whoever asks while a
    new one is being made gets the one before.

    Args:
        make: makes it. What it raises is passed on, and nothing is kept.
        clock: seconds; tests pass their own.

    """

    def __init__(self, make: Callable[[], Sliced[T]], clock: Callable[[], float] = time.perf_counter) -> None:
        self._make = make
        self._clock = clock
        self._last: T | None = None
        self._good_until = float("-inf")
        self._turn = anyio.Lock()

    async def __call__(self) -> T:
        """Return an answer."""
        if self._last is not None and (self._clock() < self._good_until or self._turn.locked()):
            return self._last
        async with self._turn:
            if self._last is None or self._clock() >= self._good_until:
                self._last, cost_s = await in_slices(self._make(), self._clock)
                self._good_until = self._clock() + cost_s / SHARE
            return self._last
