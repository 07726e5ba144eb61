"""Field case 51: a node under real limits of memory and processor time keeps to them, whatever the machine has."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from echo_swarm import codec
from tests.cgroups import Group
from tests.unit.backends.test_hardware import GIB, QWEN3_06B, run_of


def doctor(group: Group, state: Path) -> "subprocess.CompletedProcess[str]":
    return group.run(
        sys.executable,
        "-m",
        "echo_node.cli",
        "doctor",
        "--quick",
        "--json",
        "--backend",
        "torch",
        "--state-dir",
        str(state),
    )


def test_doctor_sees_what_the_group_leaves_and_fits_the_model_into_it(
    limited: Callable[[int, float], Group], tmp_path: Path
) -> None:
    done = doctor(limited(2 * GIB, 1.0), tmp_path)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["machine"]["cpu_count"] == 1
    # The command itself takes some of it; the page cache it fills does not count.
    assert 1.0 * GIB < shown["machine"]["available_bytes"] < 2 * GIB
    (torch,) = [card for card in shown["backends"] if card["name"] == "torch"]
    assert torch["fits"] and torch["needed_bytes"] <= torch["available_bytes"] < 0.85 * 2 * GIB


def test_doctor_refuses_a_model_that_the_group_has_no_room_for_with_both_figures(
    limited: Callable[[int, float], Group], tmp_path: Path
) -> None:
    done = doctor(limited(GIB, 1.0), tmp_path)
    assert done.returncode == 6, (done.stdout, done.stderr)
    (torch,) = [card for card in json.loads(done.stdout)["backends"] if card["name"] == "torch"]
    assert not torch["fits"] and not torch["usable"]
    assert "134,515,008 parameters in float32" in torch["problem"] and "memory has 0." in torch["problem"]


CHOOSE = """
import sys
import time
from pathlib import Path
from echo_node.hardware import choose
from echo_swarm import codec
from echo_swarm.errors import BackendFailed
from echo_swarm.manifest import MANIFEST_LIMITS, RunManifest
try:
    choose("torch", RunManifest.from_wire(codec.decode(Path(sys.argv[1]).read_bytes(), MANIFEST_LIMITS)))
except BackendFailed as e:
    print(e)
    sys.exit(e.exit_code)
"""
"""What `join` does once it knows the run, and before it fetches anything."""


def test_a_join_is_refused_before_a_byte_of_the_model_is_fetched(
    limited: Callable[[int, float], Group], tmp_path: Path
) -> None:
    (tmp_path / "run").write_bytes(codec.encode(run_of(QWEN3_06B).to_wire()))
    done = limited(2 * GIB, 1.0).run(sys.executable, "-c", CHOOSE, str(tmp_path / "run"))
    assert done.returncode == 6, done.stderr
    assert "596,049,920 parameters in float32" in done.stdout and "memory has 1." in done.stdout


THREADS = """
from echo_node.backends.options import TorchOptions
from echo_node.backends.torch_engine import TorchEngine
print(TorchEngine(TorchOptions(device="cpu")).report().device)
print(TorchEngine(TorchOptions(device="cpu", threads=3)).report().device)
"""


def test_a_backend_takes_as_many_threads_as_the_group_gives_processors(limited: Callable[[int, float], Group]) -> None:
    done = limited(2 * GIB, 1.0).run(sys.executable, "-c", THREADS)
    assert done.stdout.splitlines() == ["cpu (1 threads)", "cpu (3 threads)"], done.stderr
