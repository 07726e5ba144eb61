"""What this machine has: CPUs, free memory within cgroup limits, GPUs. Reads files, runs `nvidia-smi`; no torch."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

_NO_LIMIT_BYTES = 1 << 60
"""cgroup v1 writes a huge number where there is no limit."""

_VECTOR_FLAGS = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve"),
)
"""x86, then ARM. A build for one that is missing ends with an illegal instruction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One NVIDIA device, as `nvidia-smi` names it."""

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a backend may use."""

    cpu_count: int
    """CPUs that this process may run on, at least 1; affinity and cgroup quota included."""
    available_bytes: int
    """Memory that can be had without swapping, within the cgroup's limit."""
    gpus: tuple[Gpu, ...] = ()

    def describe(self) -> str:
        """Return one line for people."""
        parts = [f"{self.cpu_count} CPUs", f"{gib(self.available_bytes)} of memory free"]
        parts += [f"{gpu.name} ({gib(gpu.free_bytes)} of {gib(gpu.total_bytes)} free)" for gpu in self.gpus]
        return ", ".join(parts)


def probe() -> Machine:
    """Look at this machine. Blocks for up to some seconds where `nvidia-smi` is slow; run it in a thread."""
    return Machine(cpu_count=cpu_count(), available_bytes=_available_bytes(), gpus=_gpus())


def gib(size_bytes: int) -> str:
    """Return a size for people."""
    return f"{size_bytes / 2**30:.1f} GiB"


def cpu_count() -> int:
    """Return how many CPUs this process may use, at least 1; affinity and cgroup quota included."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_cpus(Path("/sys/fs/cgroup"))
    return max(1, count if quota is None else min(count, round(quota)))


def cpu_flags() -> tuple[str, ...]:
    """Return which of `_VECTOR_FLAGS` this processor has; nothing where that cannot be told."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    line = next((line for line in text.splitlines() if line.lower().startswith(("flags", "features"))), "")
    return tuple(flag for flag in _VECTOR_FLAGS if flag in line.split())


def _available_bytes() -> int:
    free = psutil.virtual_memory().available
    room = cgroup_room_bytes(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return free if room is None else max(0, min(free, room))


def cgroup_room_bytes(mount: Path, membership: Path) -> int | None:
    """Return how much memory the tightest cgroup above this process still gives, None without a limit.

    Args:
        mount: where cgroups are mounted; version 2, or version 1 with a `memory` folder.
        membership: `/proc/self/cgroup`.

    """
    rooms: list[int] = []
    for folder, limit_name, usage_name in _memory_cgroups(mount, membership):
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is not None and limit < _NO_LIMIT_BYTES:
            # Page cache counts as usage, but is given back on demand.
            rooms.append(limit - (usage or 0) + _reclaimable(folder / "memory.stat"))
    return min(rooms, default=None)


def _memory_cgroups(mount: Path, membership: Path) -> list[tuple[Path, str, str]]:
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found: list[tuple[Path, str, str]] = []
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            root, names = mount, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root, names = mount / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        relative = Path(path.lstrip("/"))
        found += [(root / part, *names) for part in (relative, *relative.parents)]
    return found


def _reclaimable(stat: Path) -> int:
    try:
        fields = dict(line.split(" ", 1) for line in stat.read_text(encoding="utf-8").splitlines() if " " in line)
        return int(fields.get("inactive_file", 0))
    except (OSError, ValueError):
        return 0


def _cgroup_cpus(mount: Path) -> float | None:
    try:
        quota, period = (mount / "cpu.max").read_text(encoding="utf-8").split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _gpus() -> tuple[Gpu, ...]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ()
    query = "--query-gpu=name,memory.total,memory.free"
    try:
        done = subprocess.run(
            [command, query, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(done.stdout)


def parse_gpus(csv: str) -> tuple[Gpu, ...]:
    """Read `nvidia-smi`'s lines of name, total and free MiB. A line of another form is left out."""
    gpus: list[Gpu] = []
    for line in csv.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and fields[1].isdigit() and fields[2].isdigit():
            gpus.append(Gpu(name=fields[0], total_bytes=int(fields[1]) << 20, free_bytes=int(fields[2]) << 20))
    return tuple(gpus)
