"""Killed before a change of the disk, a run goes on: the same ledger, the same versions, and both sides count alike."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.swarm.killed_in_an_update import faults_in

ROOT = Path(__file__).parents[2]
STRIDE = 60
"""Steps from one kill to the next. `benchmarks/crash_steps.py` has a kill before each of them."""


@pytest.mark.parametrize("first", [1, 23])
def test_a_run_that_is_killed_before_any_write_ends_like_one_that_is_not(first: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.swarm.killed_in_an_update", str(tmp_path), str(first), str(STRIDE)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    *killed, undisturbed = map(json.loads, done.stdout.splitlines())
    assert len(killed) >= 3 and (undisturbed["step"], undisturbed["status"]) == (0, 0)
    wanted = json.loads(undisturbed["end"])
    assert (wanted["ledger"], wanted["published"], wanted["trained_groups"]) == ([[0, 1], [2, 3]], 2, 4)
    assert [fault for line in [*killed, undisturbed] for fault in faults_in(line, undisturbed)] == []
