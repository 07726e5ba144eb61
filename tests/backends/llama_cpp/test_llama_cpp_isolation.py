"""What goes wrong in a llama.cpp child costs that child: crashes, hangs, wrong results, a library that is not there."""

import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from echo_node.backends.base import Completion
from echo_node.backends.child import ChildBackend, Patience, start_backend
from echo_node.backends.known_model import FOLDER
from echo_node.backends.options import LlamaCppOptions
from echo_node.backends.restart import RestartPolicy
from echo_node.backends.self_test import SelfTestFailed
from echo_node.backends.survey import survey
from echo_node.backends.tested import Verdicts, open_tested
from echo_node.doctor import BUILT_IN
from echo_node.machine import Machine
from echo_node.trial import examine
from echo_swarm.errors import BackendFailed
from tests.backends.llama_cpp.support import write_gguf_policy
from tests.swarm.support.node_harness import make_swarm, until
from tests.swarm.support.orphans import a_killed_parent_leaves_no_child, gone
from tests.unit.backends.support import request

pytestmark = pytest.mark.anyio

OPTIONS = LlamaCppOptions(batch=4, threads=1)


def python_that_first(folder: Path, code: str) -> str:
    """An interpreter that runs `code` before it serves."""
    program, wrapper = folder / "first.py", folder / "python"
    program.write_text(f"import sys\n{code}\nfrom echo_node.backends.serve import main\nmain(sys.argv[3:])\n")
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{program}" "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


async def test_a_child_that_hangs_is_told_and_ended(tmp_path: Path) -> None:
    policy = write_gguf_policy(tmp_path)
    with anyio.fail_after(120):
        async with start_backend(
            OPTIONS, log_path=tmp_path / "log", patience=Patience(silent_s=8.0), nice=0
        ) as backend:
            await backend.load(policy)
            os.kill(backend.pid, signal.SIGSTOP)
            await backend.submit([request(0)])
            with pytest.raises(BackendFailed, match="llama_cpp backend hangs: silent for 8 s"):
                await backend.next_outcome()
            pid = backend.pid
    await gone(pid)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_killed_parent_leaves_no_child(tmp_path: Path) -> None:
    """Field case 52."""
    await a_killed_parent_leaves_no_child("LlamaCppOptions", tmp_path / "log")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_without_the_library_the_child_says_what_to_install(tmp_path: Path) -> None:
    """Field case 90."""
    python = python_that_first(tmp_path, "sys.modules['llama_cpp'] = None")
    with anyio.fail_after(60):
        with pytest.raises(BackendFailed, match=r"llama-cpp-python cannot be imported .*pip install '.*\[llama-cpp\]'"):
            async with start_backend(OPTIONS, log_path=tmp_path / "log", nice=0, python=python) as backend:
                await backend.next_outcome()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_child_works_where_neither_torch_nor_vllm_can_be_imported(tmp_path: Path) -> None:
    python = python_that_first(tmp_path, "sys.modules |= dict.fromkeys(('torch', 'transformers', 'vllm'))")
    lines: list[str] = []
    with anyio.fail_after(60):
        async with open_tested(
            OPTIONS, log_path=tmp_path / "log", verdicts=Verdicts(tmp_path), emit=lines.append, python=python
        ) as backend:
            await backend.load(write_gguf_policy(tmp_path))
            await backend.submit([request(0)])
            assert isinstance(await backend.next_outcome(), Completion)
    assert "self-test passed" in lines[1]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_self_test_passes_once_and_a_build_that_computes_wrongly_fails_it(tmp_path: Path) -> None:
    """Field case 79: a kernel that uses part of each dot product would look like this."""
    lines: list[str] = []
    verdicts = Verdicts(tmp_path)

    def tested(python: str = sys.executable):
        return open_tested(
            OPTIONS, log_path=tmp_path / "log", verdicts=verdicts, emit=lines.append, nice=0, python=python
        )

    with anyio.fail_after(60):
        for _ in range(2):
            async with tested():
                pass
        assert len(lines) == 2 and "in f32 and" in lines[1] and "in q8_0" in lines[1]
        wrong = python_that_first(
            tmp_path,
            "from echo_node.backends.llama_context import LlamaContext\n"
            "right = LlamaContext.decode\n"
            "LlamaContext.decode = lambda *a: right(*a) * 0.9",
        )
        for _ in range(2):
            with pytest.raises(SelfTestFailed, match=r"self-test of llama_cpp .* in f32: log-probabilities differ"):
                async with tested(wrong):
                    pytest.fail("it must not sample")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_doctor_says_that_it_works_here(tmp_path: Path) -> None:
    with anyio.fail_after(60):
        card = await examine(
            "llama_cpp",
            OPTIONS,
            survey()["llama_cpp"],
            BUILT_IN,
            Machine(cpu_count=1, available_bytes=8 << 30),
            log_path=tmp_path / "log",
            verdicts=None,
        )
    assert card.usable and card.fits and card.tokens_per_s and len(card.findings) == 2
    assert "llama-cpp-python" in card.versions and card.build.startswith("llama_cpp ")


class Children:
    """Opens llama.cpp children and remembers them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[ChildBackend] = []

    @asynccontextmanager
    async def open(self):
        async with start_backend(OPTIONS, log_path=self.folder / "backend.log", nice=0) as backend:
            self.started.append(backend)
            yield backend


async def test_a_node_hands_back_the_leases_of_a_killed_child_and_goes_on_with_another(tmp_path: Path) -> None:
    swarm, children = make_swarm(tmp_path), Children(tmp_path)
    swarm.coordinator.publish(0, gguf={"f32": (FOLDER / "model-f32.gguf").read_bytes()})
    wanted = OPTIONS.wanted()
    async with swarm.serving(), swarm.node(open_backend=children.open, wanted_files=wanted) as running:
        await until(lambda: len(swarm.coordinator.accepted) >= 8)
        await until(lambda: running.node.worker.held_leases())
        os.kill(children.started[0].pid, signal.SIGKILL)
        await until(lambda: len(children.started) == 2)
        accepted = len(swarm.coordinator.accepted)
        await until(lambda: len(swarm.coordinator.accepted) >= accepted + 8)
    for child in children.started:
        await gone(child.pid)
    assert all("signal SIGKILL" in release.cause and not release.failed for release in swarm.coordinator.released[:1])


async def test_after_repeated_crashes_the_node_stops_with_the_backends_own_message(tmp_path: Path) -> None:
    swarm, children = make_swarm(tmp_path), Children(tmp_path)
    swarm.coordinator.publish(0, gguf={"f32": (FOLDER / "model-f32.gguf").read_bytes()})
    restarts = RestartPolicy(limit=2, first_delay_s=0.01)
    wanted = OPTIONS.wanted()
    async with (
        swarm.serving(),
        swarm.node(open_backend=children.open, wanted_files=wanted, restarts=restarts) as running,
    ):
        for number in range(1, 3):
            await until(lambda number=number: len(children.started) == number)
            os.kill(children.started[-1].pid, signal.SIGSEGV)
        with pytest.raises(
            BackendFailed, match=r"failed 2 times; the last: llama_cpp backend ended with signal SIGSEGV"
        ):
            await running.wait()
    for child in children.started:
        await gone(child.pid)
