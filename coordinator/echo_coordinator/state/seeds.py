"""Sampling seeds. The coordinator chooses them, so that nobody can look for lucky ones."""

import functools
import hashlib
import struct


@functools.lru_cache(maxsize=1 << 12)
def member_seed(run_seed: int, group_id: int, member: int, attempt: int) -> int:
    """Return the seed, below 2**63, of one attempt at one completion.

    A function of the run's seed and of what is sampled, not of who samples: the data of a run do not depend on which
    nodes take part, and no two leases of a group share a seed. Remembered from the lease until its push.
    """
    packed = struct.pack("<QQII", run_seed, group_id, member, attempt)
    return int.from_bytes(hashlib.sha256(b"echo-swarm seed" + packed).digest()[:8], "little") >> 1
