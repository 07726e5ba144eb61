"""What cgroups leave to this process, of CPUs and of memory. Linux; elsewhere there is no limit.

Version 2 has one tree, version 1 one for each controller; some machines have both. The group that a process is in need
not be the one with the limit: each group above it counts, too. Inside a container the tree often begins at the
container's own group, while the process is told a path from the machine's root: then only the top is found, which is
where its limit stands.
"""

import os
from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_NO_LIMIT_BYTES = 1 << 60
"""Version 1 writes a huge number where there is no limit."""


def cpu_count() -> int:
    """Return how many CPUs this process may use, at least 1: those it may run on, within its groups' quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota()
    return max(1, count if quota is None else min(count, round(quota)))


def cpu_quota(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> float | None:
    """Return how many CPUs' time the tightest group gives; None without a quota."""
    quotas: list[float] = []
    for folder, version in _groups("cpu", mount, membership):
        try:
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text(encoding="utf-8").split())
            else:
                quota, period = _number(folder / "cpu.cfs_quota_us") or 0, _number(folder / "cpu.cfs_period_us") or 0
        except (OSError, ValueError):  # There is none, or it says `max`.
            continue
        if quota > 0 and period > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def memory_room_bytes(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Return how much memory the tightest group still gives; None without a limit."""
    rooms: list[int] = []
    for folder, version in _groups("memory", mount, membership):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        limit, usage = _number(folder / names[0]), _number(folder / names[1])
        if limit is not None and limit < _NO_LIMIT_BYTES:
            # Page cache counts as usage, but is given back on demand.
            rooms.append(max(0, limit - (usage or 0) + _reclaimable(folder / "memory.stat", version)))
    return min(rooms, default=None)


def _groups(controller: str, mount: Path, membership: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folder and version of the own group and of each above it, wherever `controller` may stand."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            root, version = mount / "unified" if (mount / "unified").is_dir() else mount, 2
        elif controller in controllers.split(","):
            root, version = mount / controller, 1
        else:
            continue
        own = Path(path.lstrip("/"))
        for part in (own, *own.parents):
            yield root / part, version


def _reclaimable(stat: Path, version: int) -> int:
    # In version 1 the plain name leaves out the groups below.
    name = "inactive_file" if version == 2 else "total_inactive_file"
    try:
        fields = dict(line.split(" ", 1) for line in stat.read_text(encoding="utf-8").splitlines() if " " in line)
        return int(fields.get(name, 0))
    except (OSError, ValueError):
        return 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
