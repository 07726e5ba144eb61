"""Long work in the event loop, cut up: a generator that yields wherever others may run meanwhile."""

import time
from collections.abc import Callable, Generator
from typing import TypeVar

import anyio.lowlevel

T = TypeVar("T")
Sliced = Generator[None, None, T]
"""Work and its result. What it reads may change at each yield."""

SLICE_S = 0.005
"""About as long as the loop is held at a time."""


def at_once(work: Sliced[T]) -> T:
    """Do all of it now."""
    while True:
        try:
            next(work)
        except StopIteration as e:
            return e.value


async def in_slices(work: Sliced[T], clock: Callable[[], float] = time.perf_counter) -> tuple[T, float]:
    """Do it between other tasks. Returns the result and the seconds that it took, others' not counted."""
    spent_s = 0.0
    while True:
        began = clock()
        try:
            while clock() - began < SLICE_S:
                next(work)
        except StopIteration as e:
            return e.value, spent_s + clock() - began
        spent_s += clock() - began
        await anyio.lowlevel.checkpoint()
