"""What this machine has for this process: CPUs and memory within cgroup limits, GPUs. No torch; runs `nvidia-smi`."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

from echo_swarm.cgroups import cpu_count, memory_room_bytes

__all__ = ["Gpu", "Machine", "available_bytes", "cpu_count", "cpu_flags", "gib", "parse_gpus", "probe"]

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
    return Machine(cpu_count=cpu_count(), available_bytes=available_bytes(), gpus=_gpus())


def gib(size_bytes: int) -> str:
    """Return a size for people."""
    return f"{size_bytes / 2**30:.1f} GiB"


def cpu_flags() -> tuple[str, ...]:
    """Return which of `_VECTOR_FLAGS` this processor has; nothing where that cannot be told."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ()
    line = next((line for line in text.splitlines() if line.lower().startswith(("flags", "features"))), "")
    return tuple(flag for flag in _VECTOR_FLAGS if flag in line.split())


def available_bytes() -> int:
    """Return how much memory can be had without swapping, within the limits of this process's cgroups."""
    free, room = psutil.virtual_memory().available, memory_room_bytes()
    return free if room is None else min(free, room)


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
