"""How much of a GPU vLLM may be told to take. Pure."""

import math
from collections.abc import Sequence

from echo_node.backends.base import OutOfMemory

LEFT_FREE_BYTES = 1 << 30
"""Beside what vLLM is told: its CUDA context, and what the desktop or another program takes meanwhile."""
LEAST_SHARE = 0.02


def memory_share(wanted: float, devices: Sequence[tuple[int, int]]) -> float:
    """Return the share of each device's memory that vLLM may take: `wanted`, or less where less is free now.

    vLLM refuses to start when it is told a share of which a part is taken. With 8 GiB, of which a desktop holds 1.5,
    and 0.85 wanted, that is (6.5 - 1) / 8 = 0.687.

    Args:
        wanted: share of the whole memory, 0 to 1.
        devices: free and total bytes of each; none: nothing is known.

    Raises:
        OutOfMemory: hardly anything is free on one of them.

    """
    shares = [wanted, *((free - LEFT_FREE_BYTES) / total for free, total in devices)]
    share = math.floor(min(shares) * 1000) / 1000
    if share < LEAST_SHARE:
        free, total = min(devices, key=lambda device: device[0] / device[1])
        raise OutOfMemory(f"{free >> 20} MiB of the GPU's {total >> 20} MiB are free; end what holds the rest")
    return share
