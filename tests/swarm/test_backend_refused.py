"""A run that only takes backends whose draws can be followed: others are told so and leave, or are never started."""

from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest

from echo_node.backends.options import ScriptedOptions
from echo_node.backends.scripted import ScriptedEngine
from echo_node.status import LEFT_REFUSED
from echo_swarm.errors import UsageError
from echo_swarm.work import BackendReport
from tests.swarm.support.node_harness import until
from tests.swarm.support.whole_run import WholeRun, joined, make_run, status_of

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Named(ScriptedEngine):
    """A scripted engine that says it is another one."""

    def __init__(self, name: str) -> None:
        super().__init__(ScriptedOptions(batch=4, mean_s=0.02))
        self._name = name

    def report(self) -> BackendReport:
        return super().report().model_copy(update={"backend": self._name})


def make(folder: Path, *, required: bool) -> WholeRun:
    run = make_run(folder, beat_s=0.4)
    audits = run.settings.audits.model_copy(update={"require_followed_seeds": required})
    run.settings = run.settings.model_copy(update={"audits": audits})
    return run


async def test_a_node_whose_draws_cannot_be_followed_is_told_so_and_leaves_while_others_work(tmp_path: Path) -> None:
    run = make(tmp_path, required=True)
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(run.coordinator())
        torch = await stack.enter_async_context(joined(run, "torch", Named("torch")))
        vllm = await stack.enter_async_context(joined(run, "vllm", Named("vllm")))
        with anyio.fail_after(60):
            await vllm.ended.wait()
        assert isinstance(vllm.error, UsageError) and vllm.error.exit_code == 2
        said = str(vllm.error)
        assert "the coordinator refused this node" in said and "no work of the backend vllm" in said
        assert "--backend torch or --backend llama_cpp" in said
        assert vllm.node.status().state == LEFT_REFUSED
        assert status_of(coordinator, vllm) is None
        await until(lambda: torch.node.status().accepted >= 8, "the other one works")
        assert {m.backend for batch in run.trainer.trained for m in batch.members} <= {"torch"}


async def test_a_node_that_worked_leaves_when_the_run_comes_back_with_the_setting(tmp_path: Path) -> None:
    run = make(tmp_path, required=False)
    async with joined(run, "vllm", Named("vllm")) as vllm:
        async with run.coordinator():
            await until(lambda: vllm.node.status().accepted >= 4, "it works")
        run.settings = make(tmp_path, required=True).settings.model_copy(update={"run": run.settings.run})
        async with run.coordinator() as coordinator:
            with anyio.fail_after(60):
                await vllm.ended.wait()
            assert isinstance(vllm.error, UsageError)
            shown = status_of(coordinator, vllm)
            assert shown is None or not shown.live
