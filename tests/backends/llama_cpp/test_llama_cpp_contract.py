"""What holds for every backend, for llama.cpp: inside this process and inside a child."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from echo_node.backends.base import Backend
from echo_node.backends.child import start_backend
from echo_node.backends.inline import InlineBackend
from echo_node.backends.llama_cpp_engine import LlamaCppEngine
from echo_node.backends.options import LlamaCppOptions
from tests.backends.llama_cpp.support import write_gguf_policy
from tests.contract.test_backend_contract import *  # noqa: F403
from tests.contract.test_backend_contract import BATCH, Write

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def write() -> Write:
    return write_gguf_policy


@pytest.fixture(scope="module", params=["llama_cpp", "llama_cpp child"])
async def running(request: pytest.FixtureRequest, folder: Path) -> AsyncGenerator[Backend]:
    options = LlamaCppOptions(batch=BATCH, threads=1)
    if request.param == "llama_cpp":
        yield InlineBackend(LlamaCppEngine(options))
    else:
        async with start_backend(options, log_path=folder / "child.log", nice=0) as backend:
            yield backend
