"""The vLLM backend's child runs in an environment of its own; these tests run in the project's, with transformers."""

from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest

from echo_node.backends.base import Backend
from echo_node.backends.child import ChildBackend, start_backend
from echo_node.backends.options import VllmOptions
from tests.backends.vllm.support import BATCH
from tools.make_vllm_env import python_in, up_to_date


@pytest.fixture(scope="session")
def vllm_python() -> str:
    if not up_to_date():
        pytest.fail("the environment of the vLLM backend is missing or out of date; make it: make vllm-env")
    return str(python_in())


@pytest.fixture(scope="module", params=["asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """One loop: what differs between loops is shared by all backends, and a vLLM child is slow to start."""
    return request.param


@pytest.fixture(scope="module")
async def backend(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[ChildBackend]:
    """One child for all tests of a module: starting vLLM takes ten seconds and more."""
    log_path = tmp_path_factory.mktemp("vllm") / "child.log"
    async with start_backend(
        VllmOptions(batch=BATCH, threads=1), log_path=log_path, nice=0, python=vllm_python
    ) as running:
        yield running


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("policies")


@pytest.fixture
async def patiently(backend: Backend) -> AsyncGenerator[None]:
    """No wait of a test lasts forever."""
    with anyio.fail_after(300):
        yield
