"""An asyncio event loop whose clock jumps to the next thing that is to happen.

Code written for asyncio or anyio runs on it unchanged: an hour of sleeping takes as long as the work done in it.
Nothing outside the process may be waited for (no sockets, no threads), and what runs depends on nothing but the
program: of two timers for the same moment, the one set first comes first.
"""

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

T = TypeVar("T")

EPOCH_S = 1_700_000_000.0
"""Wall-clock time at the start."""


class NothingLeft(RuntimeError):
    """All tasks wait for each other: without a timer, time cannot go on."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time starts at 0."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Jump(self._skip))

    def time(self) -> float:
        """Return seconds of virtual time since the start."""
        return self._now_s

    def _skip(self, seconds: float | None) -> None:
        if seconds is None:
            raise NothingLeft("no task can go on, and none waits for a moment in time")
        self._now_s += max(0.0, seconds)


class _Jump(selectors.SelectSelector):
    """Instead of waiting for files, lets time pass."""

    def __init__(self, skip: Callable[[float | None], None]) -> None:
        super().__init__()
        self._skip = skip

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._skip(timeout)
        return []


class LoopClock:
    """`Clock` on the running loop's time, possibly a wrong clock."""

    def __init__(self, *, skew_s: float = 0.0, drift: float = 0.0) -> None:
        """Describe the clock.

        Args:
            skew_s: what its wall clock is ahead.
            drift: how much faster it runs; 0.01 gains 36 seconds an hour.

        """
        self._skew_s = skew_s
        self._rate = 1.0 + drift

    def wall_s(self) -> float:
        """Return seconds since 1970, as this clock has it."""
        return EPOCH_S + self._skew_s + self.monotonic_s()

    def monotonic_s(self) -> float:
        """Return seconds since the start, at this clock's rate."""
        return self._rate * asyncio.get_running_loop().time()


def run_virtually(main: Callable[[], Awaitable[T]]) -> T:
    """Run `main` to its end in virtual time."""
    return anyio.run(main, backend="asyncio", backend_options={"loop_factory": VirtualLoop})
