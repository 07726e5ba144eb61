"""The llama.cpp engine in its child: killed, started again, and swapped twenty times."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from echo_node.backends.base import Completion, LoadRefused, PolicyFiles
from echo_node.backends.child import start_backend
from echo_node.backends.options import LlamaCppOptions
from echo_node.backends.restart import RestartPolicy
from echo_swarm.errors import BackendFailed
from tests.backends.llama_cpp.support import write_gguf_policy
from tests.backends.swap_memory import GROWTH, grown, lora_versions, whole_versions
from tests.unit.backends.support import request

pytestmark = pytest.mark.anyio

OPTIONS = LlamaCppOptions(batch=8, threads=1)


async def test_a_killed_child_is_started_again_and_gives_the_same_ids(tmp_path: Path) -> None:
    """Kill it amid its work; what the next child samples for the same seeds is what this one would have sampled."""
    policy = write_gguf_policy(tmp_path)
    restarts, results = RestartPolicy(), []
    with anyio.fail_after(120):
        for killed in (True, False, False):
            try:
                async with start_backend(OPTIONS, log_path=tmp_path / "log", nice=0) as backend:
                    await backend.load(policy)
                    await backend.submit([request(i, max_tokens=64) for i in range(200)])
                    if killed:
                        os.kill(backend.pid, signal.SIGKILL)
                    outcomes = [await backend.next_outcome() for _ in range(200)]
                    results.append({o.request_id: o.token_ids for o in outcomes if isinstance(o, Completion)})
            except BackendFailed as e:
                assert "llama_cpp backend ended with signal SIGKILL" in str(e)
                assert restarts.failed(anyio.current_time()) == 1.0
    assert restarts.recent_failures == 1
    assert results[0] == results[1] and len(results[0]) == 200


async def test_a_refused_file_leaves_the_child_alive_and_says_what_llama_cpp_said(tmp_path: Path) -> None:
    good, bad = write_gguf_policy(tmp_path / "good"), write_gguf_policy(tmp_path / "bad", version=1)
    bad.artifact.write_bytes(bad.artifact.read_bytes()[:-5000])
    with anyio.fail_after(60):
        async with start_backend(OPTIONS, log_path=tmp_path / "log", nice=0) as backend:
            await backend.load(good)
            with pytest.raises(LoadRefused, match=r"version 1: llama\.cpp cannot load model-f32\.gguf: .*bounds"):
                await backend.load(bad)
            await backend.load(good)
            await backend.submit([request(0)])
            assert isinstance(await backend.next_outcome(), Completion)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("make", [whole_versions, lora_versions])
async def test_twenty_swaps_leave_memory_where_it_was(tmp_path: Path, make: Callable[..., list[PolicyFiles]]) -> None:
    """Field case 53, for llama.cpp."""
    versions = make(tmp_path, gguf=True)
    with anyio.fail_after(120):
        async with start_backend(OPTIONS, log_path=tmp_path / "log", nice=0) as backend:
            assert await grown(backend, versions) <= GROWTH
