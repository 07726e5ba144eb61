"""What `make check-gpu` runs on a GPU, on the CPU: the samplers that need an install of their own."""

from pathlib import Path

import anyio
import pytest

from tools.gpu_checks import VERSIONS, Setup, check_llama_cpp, check_vllm
from tools.make_vllm_env import python_in, up_to_date


def test_llama_cpp_passes_its_check(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="make test-backends installs it", exc_type=ImportError)
    figures = anyio.run(check_llama_cpp, Setup(device="cpu", folder=tmp_path, speed=False))
    assert [finding["precision"] for finding in figures["self_test"]] == ["f32", "q8_0"]


def test_vllm_passes_its_check(tmp_path: Path) -> None:
    if not up_to_date():
        pytest.fail("the environment of the vLLM backend is missing or out of date; make it: make vllm-env")
    setup = Setup(device="cpu", folder=tmp_path, vllm_python=str(python_in()), speed=False)
    figures = anyio.run(check_vllm, setup)
    assert [version["version"] for version in figures["versions"]] == list(range(len(VERSIONS)))
    assert max(version["gap_to_its_model"] for version in figures["versions"]) < 1e-3
