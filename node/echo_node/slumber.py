"""Notices that the machine slept, stood still, or that somebody set its clock.

A sleep shows in two ways. Where the monotonic clock stands still meanwhile (Linux, macOS), the wall clock runs ahead of
it; where it does not (Windows, a stopped process), a short pause of ours took hours. Either way connections may be dead
without anybody's knowing for the next half minute, leases have run out, and the clock may be wrong: so the link is
renewed at once, and the hello measures the clock anew.
"""

from collections.abc import Callable
from dataclasses import dataclass

import anyio

from echo_swarm.clock import Clock
from echo_swarm.render import duration

LOOK_S = 5.0
GAP_S = 30.0
"""A machine under load may be late by seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Both clocks, read together."""

    wall_s: float
    monotonic_s: float


def describe_gap(before: Moment, after: Moment, *, paused_s: float) -> str:
    """Return what happened between two looks that should lie `paused_s` apart; empty if nothing did.

    From (wall 1000, monotonic 50) to (wall 29805, monotonic 55) with a pause of 5 s it slept for 8 h.
    """
    wall_s, lived_s = after.wall_s - before.wall_s, after.monotonic_s - before.monotonic_s
    if lived_s - paused_s > GAP_S:
        return f"this machine slept or stood still for {duration(lived_s - paused_s)}"
    if wall_s - lived_s > GAP_S:
        return f"this machine slept, or its clock was set forward, by {duration(wall_s - lived_s)}"
    if lived_s - wall_s > GAP_S:
        return f"this machine's clock was set back by {duration(lived_s - wall_s)}"
    return ""


async def watch_for_sleep(clock: Clock, noticed: Callable[[str], None]) -> None:
    """Call `noticed` with what happened, each time that something did, until cancelled."""
    before = _now(clock)
    while True:
        await anyio.sleep(LOOK_S)
        after = _now(clock)
        if gap := describe_gap(before, after, paused_s=LOOK_S):
            noticed(gap)
        before = after


def _now(clock: Clock) -> Moment:
    return Moment(wall_s=clock.wall_s(), monotonic_s=clock.monotonic_s())
