"""What moving a version costs in memory: pieces in flight, however large the file."""

import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20


def grown(folder: Path, size: int) -> int:
    """Return by how much the memory of a process grew that served and fetched a file of `size` bytes."""
    command = [sys.executable, "-m", "tests.swarm.checkpoint_memory_child", str(folder), str(size), str(MIB)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
def test_memory_is_bounded_by_pieces_in_flight_whatever_the_size_of_the_file(tmp_path: Path):
    """Of pieces of the same size, 16 of them and 512."""
    small, large = grown(tmp_path / "small", 16 * MIB), grown(tmp_path / "large", 512 * MIB)
    # Eight pieces in flight, at both ends and between them.
    assert large < small + 24 * MIB < 80 * MIB, (small / MIB, large / MIB)
