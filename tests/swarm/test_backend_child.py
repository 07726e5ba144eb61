"""Backend children that crash, hang, lose their parent, or never start."""

import os
import signal
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from echo_node.backends.base import MAX_OUTSTANDING, Completion
from echo_node.backends.child import Patience, start_backend
from echo_node.backends.options import ScriptedOptions, TorchOptions
from echo_swarm.errors import BackendFailed, UsageError
from tests.swarm.support.orphans import a_killed_parent_leaves_no_child, gone
from tests.unit.backends.support import request, write_policy

pytestmark = pytest.mark.anyio

ENDLESS = ScriptedOptions(batch=4, mean_s=3000.0, sigma=0.0)


@pytest.fixture
def log_path(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "backend.log"


async def test_a_killed_child_fails_every_waiter_with_how_it_ended(tmp_path: Path, log_path: Path) -> None:
    failures: list[str] = []

    async def wait_for_outcome() -> None:
        with pytest.raises(BackendFailed) as caught:
            await backend.next_outcome()
        failures.append(str(caught.value))

    with anyio.fail_after(120):
        async with start_backend(ENDLESS, log_path=log_path, nice=0) as backend:
            policy = write_policy(tmp_path)
            await backend.load(policy)
            await backend.submit([request(0)])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait_for_outcome)
                await anyio.wait_all_tasks_blocked()
                os.kill(backend.pid, signal.SIGKILL)
                with pytest.raises(BackendFailed, match="SIGKILL"):
                    # Behind a request that never ends, so that only the crash answers it.
                    await backend.load(policy)
            with pytest.raises(BackendFailed, match="SIGKILL"):
                await backend.submit([request(1)])
    assert len(failures) == 1 and "scripted backend ended with signal SIGKILL" in failures[0]


async def test_what_finished_before_a_crash_is_still_delivered(tmp_path: Path, log_path: Path) -> None:
    with anyio.fail_after(120):
        async with start_backend(ScriptedOptions(), log_path=log_path, nice=0) as backend:
            await backend.load(write_policy(tmp_path))
            await backend.submit([request(i) for i in range(5)])
            while backend.outstanding:
                await anyio.lowlevel.checkpoint()
            os.kill(backend.pid, signal.SIGKILL)
            done = [await backend.next_outcome() for _ in range(5)]
            assert all(isinstance(outcome, Completion) for outcome in done)
            with pytest.raises(BackendFailed):
                await backend.next_outcome()


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_child_that_hangs_is_told_from_one_that_is_slow(tmp_path: Path, log_path: Path) -> None:
    patience = Patience(silent_s=4.0)
    with anyio.fail_after(120):
        async with start_backend(ENDLESS, log_path=log_path, patience=patience, nice=0) as backend:
            await backend.load(write_policy(tmp_path))
            await backend.submit([request(0)])
            with anyio.move_on_after(5.0) as slow:
                await backend.next_outcome()
            assert slow.cancelled_caught
            os.kill(backend.pid, signal.SIGSTOP)
            with pytest.raises(BackendFailed, match="hangs: silent for 4 s"):
                await backend.next_outcome()
            pid = backend.pid
    await gone(pid)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_child_that_cannot_start_says_why_in_its_own_words(log_path: Path) -> None:
    with anyio.fail_after(120):
        with pytest.raises(BackendFailed, match=r"torch backend ended with exit code 1: .*(CUDA|device)"):
            async with start_backend(TorchOptions(device="cuda:63"), log_path=log_path, nice=0) as backend:
                await backend.next_outcome()


async def test_a_child_ends_with_the_block_though_its_work_never_would(tmp_path: Path, log_path: Path) -> None:
    with anyio.fail_after(120):
        async with start_backend(ENDLESS, log_path=log_path, nice=0) as backend:
            await backend.load(write_policy(tmp_path))
            await backend.submit([request(i) for i in range(40)])
            pid = backend.pid
    await gone(pid)
    with pytest.raises(BackendFailed, match="has been stopped"):
        await backend.submit([request(100)])


async def test_what_the_block_raises_comes_out_as_it_is(log_path: Path) -> None:
    with pytest.raises(UsageError, match="my own"):
        async with start_backend(ScriptedOptions(), log_path=log_path, nice=0):
            raise UsageError("my own")


async def test_a_killed_parent_leaves_no_child(tmp_path: Path) -> None:
    """Field case 52."""
    await a_killed_parent_leaves_no_child("ScriptedOptions", tmp_path / "log")


async def test_requests_need_ids_of_their_own_and_have_a_limit(tmp_path: Path, log_path: Path) -> None:
    with anyio.fail_after(120):
        async with start_backend(ENDLESS, log_path=log_path, nice=0) as backend:
            await backend.load(write_policy(tmp_path))
            await backend.submit([request(0)])
            with pytest.raises(UsageError, match="id of its own"):
                await backend.submit([request(0)])
            with pytest.raises(UsageError, match=f"more than {MAX_OUTSTANDING}"):
                await backend.submit([request(i) for i in range(1, MAX_OUTSTANDING + 1)])
            await backend.submit([request(1)])


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_child_imports_nothing_that_lies_in_the_folder_where_the_node_was_started(
    tmp_path: Path, log_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("msgpack", "numpy", "torch"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('somebody else s file')")
    monkeypatch.chdir(tmp_path)
    with anyio.fail_after(120):
        async with start_backend(TorchOptions(device="cpu"), log_path=log_path, nice=0) as backend:
            assert backend.report.backend == "torch"
