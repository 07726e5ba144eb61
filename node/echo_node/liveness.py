"""Whether a status file is of a node that still runs: by its age, on a clock that nobody sets.

The wall clock may be put forward or back by hours while a node runs (a wrong battery, NTP, daylight saving done by
hand). The monotonic clock may not, and all processes between two starts of a machine share it; which start that was,
Linux tells by a random id. A file from another start of the machine is of a process that is gone.
"""

from functools import cache
from pathlib import Path
from typing import Protocol, TypedDict

from echo_swarm.clock import Clock

GONE_BEATS = 3
"""A node silent for this many beats is shown as gone, as the coordinator does."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Stamp(TypedDict):
    """When a status was written."""

    written_at: float
    """Seconds since 1970."""
    written_up_s: float | None
    """The same moment on the monotonic clock; None from a node that is too old to tell."""
    boot: str
    """Which start of the machine that clock counts from; empty where there is no telling."""


class Stamped(Protocol):
    """What a status says about when it was written."""

    @property
    def written_at(self) -> float: ...  # noqa: D102 - as in Stamp
    @property
    def written_up_s(self) -> float | None: ...  # noqa: D102
    @property
    def boot(self) -> str: ...  # noqa: D102
    @property
    def beat_s(self) -> float: ...  # noqa: D102
    @property
    def running(self) -> bool: ...  # noqa: D102


@cache
def boot_id() -> str:
    """Return what tells this start of the machine from others; empty where the system has nothing of the kind."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()[:64]
    except (OSError, UnicodeDecodeError):
        return ""


def stamp(clock: Clock) -> Stamp:
    """Return the stamp of now."""
    return Stamp(written_at=clock.wall_s(), written_up_s=clock.monotonic_s(), boot=boot_id())


def age_and_life(status: Stamped, clock: Clock, boot: str) -> tuple[float, bool]:
    """Return how many seconds ago a status was written, and whether its node still runs.

    `boot` is the `boot_id` of now. The age of a node that is gone is for people: then a sleep of the machine, during
    which the monotonic clock stood still, counts as well.
    """
    by_wall_s = max(0.0, clock.wall_s() - status.written_at)
    if status.written_up_s is None:
        return by_wall_s, status.running and _is_young(by_wall_s, status)
    lived_s = clock.monotonic_s() - status.written_up_s
    if status.boot != boot or lived_s < 0:
        return by_wall_s, False
    if status.running and _is_young(lived_s, status):
        return lived_s, True
    return max(lived_s, by_wall_s), False


def _is_young(age_s: float, status: Stamped) -> bool:
    return age_s <= GONE_BEATS * max(status.beat_s, 1.0)
