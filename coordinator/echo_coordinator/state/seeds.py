"""Sampling seeds. The coordinator chooses them, so that nobody can look for lucky ones."""

import functools
import hashlib
import struct


@functools.lru_cache(maxsize=1 << 12)
def member_seed(run_seed: int, group_id: int, member: int, draw: int) -> int:
    """Return the seed, below 2**63, of one completion; `draw` counts the seeds of its slot.

    A function of the run's seed and of what is sampled, not of who samples: the data of a run do not depend on which
    nodes take part or fail, and no two members of a group share a seed. Remembered from the lease until its push.
    """
    packed = struct.pack("<QQII", run_seed, group_id, member, draw)
    return int.from_bytes(hashlib.sha256(b"echo-swarm seed" + packed).digest()[:8], "little") >> 1
