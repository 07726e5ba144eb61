"""A run with a llama.cpp node: versions published as GGUF, trajectories accepted with what sampled them."""

from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from echo_node.backends.inline import InlineBackend
from echo_node.backends.llama_cpp_engine import LlamaCppEngine
from echo_node.backends.options import LlamaCppOptions
from tests.swarm.support import stand_ins
from tests.swarm.test_gguf_publishing import gguf_run, llama

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """The coordinator runs on asyncio."""
    return "asyncio"


async def test_a_llama_cpp_node_trains_a_run_beside_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_ins, "weights", lambda version, _=0: llama(version))
    run = gguf_run(tmp_path, "f16", "q8_0", updates=3, max_staleness=2)
    options = LlamaCppOptions(batch=4, threads=1)

    @asynccontextmanager
    async def open_backend():
        engine = LlamaCppEngine(options)
        try:
            yield InlineBackend(engine)
        finally:
            engine.close()

    async with (
        run.coordinator() as coordinator,
        run.node("scripted") as scripted,
        run.node("laptop", open_backend=open_backend, wanted_files=options.wanted()) as laptop,
    ):
        with anyio.fail_after(60):
            await coordinator.ended.wait()
        status = coordinator.reporter.status()
    assert status.policy_version == 3 and status.failed_conversions == 0 and not status.rejected.get("unknown_policy")
    assert laptop.verdicts["accepted"] > 0 and scripted.verdicts["accepted"] > 0
    made = {
        member.backend: member.precision for batch in run.trainer.trained for g in batch.groups for member in g.members
    }
    assert made["llama_cpp"] == "q8_0"
