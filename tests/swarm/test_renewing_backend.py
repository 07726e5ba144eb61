"""A child that leaks is replaced between two versions; nothing is lost, and a child that does not leak stays."""

import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import psutil
import pytest

from echo_node.backends.base import Completion
from echo_node.backends.child import ChildBackend, start_backend
from echo_node.backends.options import ScriptedOptions
from echo_node.backends.renewing import MemoryBound, open_renewing, resident_bytes
from echo_swarm.errors import BackendFailed
from tests.swarm.test_backend_child import gone
from tests.unit.backends.support import request, write_policy

pytestmark = pytest.mark.anyio

LEAK_BYTES = 32 << 20
BOUND = MemoryBound(settled_loads=1, factor=1.1, slack_bytes=2 * LEAK_BYTES)
LEAKY = f"""
import sys
from echo_node.backends.scripted import ScriptedEngine
from echo_node.backends.serve import main
kept, load = [], ScriptedEngine.load
def leak(self, policy):
    kept.append(b"x" * {LEAK_BYTES})
    load(self, policy)
ScriptedEngine.load = leak
main(sys.argv[3:])  # -m echo_node.backends.serve
"""


@pytest.fixture
def leaky_python(tmp_path: Path) -> str:
    """An interpreter whose scripted engine keeps 32 MiB more with each version."""
    program, wrapper = tmp_path / "leaky.py", tmp_path / "python"
    program.write_text(LEAKY)
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{program}" "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


class Opener:
    """Opens children and remembers them."""

    def __init__(self, log_path: Path, python: str = sys.executable) -> None:
        self.pids: list[int] = []
        self._log_path = log_path
        self._python = python

    @asynccontextmanager
    async def __call__(self) -> AsyncGenerator[ChildBackend]:
        options = ScriptedOptions(batch=4)
        async with start_backend(options, log_path=self._log_path, nice=0, python=self._python) as child:
            self.pids.append(child.pid)
            yield child


async def test_a_child_that_leaks_is_replaced_between_versions_and_every_request_is_answered(
    tmp_path: Path, leaky_python: str
) -> None:
    """Field case 53, where the library does not give memory back."""
    opener, lines, answered, sizes = Opener(tmp_path / "log", leaky_python), [], [], []
    with anyio.fail_after(120):
        async with open_renewing(opener, emit=lines.append, bound=BOUND) as backend, anyio.create_task_group() as tasks:

            async def collect() -> None:
                while len(answered) < 96:
                    answered.append(await backend.next_outcome())

            tasks.start_soon(collect)
            for version in range(12):
                # What was submitted before runs while the load waits.
                await backend.load(write_policy(tmp_path, version=version))
                await backend.submit([request(8 * version + i) for i in range(8)])
                sizes.append(resident_bytes(backend.pid))
        assert backend.renewals == len(opener.pids) - 1 == len(lines) >= 2
    assert sorted(outcome.request_id for outcome in answered) == list(range(96))
    versions = {o.request_id: o.newest_version for o in answered if isinstance(o, Completion)}
    assert versions == {i: i // 8 for i in range(96)}
    assert max(sizes) < sizes[0] + 6 * LEAK_BYTES, [size >> 20 for size in sizes]
    assert "has grown from 0." in lines[0] and "started anew for version" in lines[0]
    for pid in opener.pids:
        await gone(pid)


async def test_a_child_that_does_not_grow_is_kept(tmp_path: Path) -> None:
    opener = Opener(tmp_path / "log")
    with anyio.fail_after(60):
        async with open_renewing(opener, emit=print, bound=BOUND) as backend:
            for version in range(10):
                await backend.load(write_policy(tmp_path, version=version))
                await backend.submit([request(version)])
                outcome = await backend.next_outcome()
                assert isinstance(outcome, Completion) and outcome.newest_version == version
            assert backend.renewals == 0 and opener.pids == [backend.pid]


async def test_a_child_that_dies_fails_its_waiters_as_ever(tmp_path: Path) -> None:
    with anyio.fail_after(60):
        with pytest.raises(BackendFailed, match="SIGKILL"):
            async with open_renewing(Opener(tmp_path / "log"), emit=print) as backend:
                await backend.load(write_policy(tmp_path))
                os.kill(backend.pid, signal.SIGKILL)
                await backend.next_outcome()


async def test_a_child_that_does_not_start_says_so_the_first_time_and_when_it_is_replaced(
    tmp_path: Path, leaky_python: str
) -> None:
    opener = Opener(tmp_path / "log", leaky_python)
    with anyio.fail_after(60):
        with pytest.raises(BackendFailed, match="no such engine"):
            async with open_renewing(opener, emit=print, bound=BOUND) as backend:
                (tmp_path / "leaky.py").write_text("raise SystemExit('no such engine')")
                for version in range(12):
                    await backend.load(write_policy(tmp_path, version=version))
        with pytest.raises(BackendFailed, match="no such engine"):
            async with open_renewing(opener, emit=print):
                pytest.fail("it did not start")


def test_the_size_of_a_process_counts_what_runs_below_it() -> None:
    mine = psutil.Process().memory_info().rss
    assert resident_bytes(os.getpid()) >= mine // 2
    assert resident_bytes(2**22 + 1) == 0
