"""`make check-gpu` without a GPU: the same checks on the CPU, and what is run when."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from tools.check_gpu import ALL_PASSED, NO_DEVICE, NOT_DONE, SOME_FAILED, Plan, _identity, run
from tools.gpu_checks import CHECKS, CheckFailed, Setup, check_torch, check_trainer


def plan(folder: Path, *names: str, **changes: Any) -> Plan:
    given = {"device": "cpu", "names": names, "vllm_python": sys.executable, "results": folder / "results.json"}
    return Plan(**{**given, "budget_s": 600.0, "speed": False, **changes})


def passed_before(folder: Path, *names: str, **identity: str) -> None:
    checks = {name: {"status": "passed", "seconds": 1.0} for name in names}
    (folder / "results.json").write_text(json.dumps({**_identity("cpu"), **identity, "checks": checks}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_one_line_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "tools.check_gpu"], capture_output=True, text=True, check=False)
    assert done.returncode == NO_DEVICE, done.stderr
    assert done.stderr.splitlines() == ["check-gpu: no CUDA device on this machine: nothing checked"]


def test_the_trainer_passes_its_check_on_the_cpu(tmp_path: Path) -> None:
    figures = anyio.run(check_trainer, Setup(device="cpu", folder=tmp_path, speed=False))
    assert figures["distance_when_continued"] == 0
    assert 0 < figures["logprob_gap_bfloat16"] < 0.06
    assert all(norm > 0 for norm in figures["gradient_norms_adapter"])


def test_the_torch_engine_passes_its_check_on_the_cpu(tmp_path: Path) -> None:
    figures = anyio.run(check_torch, Setup(device="cpu", folder=tmp_path, speed=False))
    assert figures["float32"]["precision"] == "float32" and figures["bfloat16"]["precision"] == "bfloat16"
    assert max(version["gap_to_its_model"] for version in figures["float32"]["versions"]) < 1e-3


def test_what_passed_on_this_device_with_this_commit_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passed_before(tmp_path, "trainer", "torch")
    assert run(plan(tmp_path, "trainer", "torch")) == ALL_PASSED
    assert capsys.readouterr().out.splitlines()[:2] == ["trainer: passed before", "torch: passed before"]


def test_what_is_not_installed_is_skipped_with_the_reason_and_kept_in_the_results(tmp_path: Path) -> None:
    """What passed before with another commit does not count."""
    passed_before(tmp_path, "vllm", commit="another")
    assert run(plan(tmp_path, "vllm", vllm_python="/nonexistent/python")) == ALL_PASSED
    found = json.loads((tmp_path / "results.json").read_text())
    assert (
        found["checks"]["vllm"]["status"] == "skipped" and "/nonexistent/python" in found["checks"]["vllm"]["problem"]
    )


def test_when_time_is_up_the_rest_is_left_for_another_call(tmp_path: Path) -> None:
    at_most_one = plan(tmp_path, "vllm", "trainer", vllm_python="/nonexistent/python", budget_s=0.0)
    assert run(at_most_one) == NOT_DONE
    assert json.loads((tmp_path / "results.json").read_text())["checks"].keys() == {"vllm"}


def test_a_check_that_fails_is_a_failure_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The piece's process cannot even import what it needs."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "transformers.py").write_text("raise SystemExit(3)")
    assert run(plan(tmp_path, "trainer")) == SOME_FAILED
    found = json.loads((tmp_path / "results.json").read_text())["checks"]["trainer"]
    assert found["status"] == "failed" and "exit code 3" in found["problem"]


def test_every_piece_has_a_check() -> None:
    from tools.check_gpu import LIMITS_S

    assert list(LIMITS_S) == list(CHECKS)
    assert issubclass(CheckFailed, Exception)
