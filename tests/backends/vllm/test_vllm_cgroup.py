"""Field case 51 for vLLM, which knows nothing of quotas: its threads follow the processors of the group."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cgroups import Group
from tests.unit.backends.test_hardware import GIB

BUSY = 0.02
"""Of the first thread's time. A second one that samples takes a tenth with this small model, an idle one nothing."""


@pytest.mark.parametrize(("threads", "busy"), [(0, 1), (2, 2)], ids=["by itself", "told otherwise"])
def test_vllm_samples_with_as_many_threads_as_the_group_gives_processors(
    limited: Callable[[int, float], Group], vllm_python: str, tmp_path: Path, threads: int, busy: int
) -> None:
    script = ("-m", "tests.backends.vllm.sample_and_count", vllm_python, str(tmp_path), str(threads))
    done = limited(8 * GIB, 1.0).run(sys.executable, *script)
    assert done.returncode == 0, done.stderr
    spent_s = json.loads(done.stdout)["spent_s"]
    assert sum(s > BUSY * spent_s[0] for s in spent_s) == busy, spent_s
