"""The life of a vLLM child: killed, started again, without memory, without vLLM."""

import json
import os
import signal
import sys
from pathlib import Path

import anyio
import psutil
import pytest

from echo_node.backends.base import Completion
from echo_node.backends.child import start_backend
from echo_node.backends.options import TorchOptions, VllmOptions
from echo_swarm.errors import BackendFailed
from tests.backends.vllm.support import CONFIGS, complete, greedy_completion, request, write_policy
from tests.swarm.support.orphans import gone

pytestmark = pytest.mark.anyio

PROMPT = (9, 8, 2, 6)
OPTIONS = VllmOptions(batch=4, threads=1)


async def test_a_killed_child_fails_its_waiters_and_the_next_one_works(
    vllm_python: str, folder: Path, tmp_path: Path
) -> None:
    """Field case 52, and none of vLLM's own processes stays behind."""
    policy = write_policy(folder / "restart")
    with anyio.fail_after(300):
        async with start_backend(OPTIONS, log_path=tmp_path / "log", nice=0, python=vllm_python) as backend:
            await backend.load(policy)
            children = psutil.Process(backend.pid).children(recursive=True)
            await backend.submit([request(i, max_tokens=64) for i in range(64)])
            assert isinstance(await backend.next_outcome(), Completion)
            os.kill(backend.pid, signal.SIGKILL)
            with pytest.raises(BackendFailed, match="vllm backend ended with signal SIGKILL"):
                while True:
                    await backend.next_outcome()
        for child in children:
            await gone(child.pid)
        async with start_backend(OPTIONS, log_path=tmp_path / "log", nice=0, python=vllm_python) as backend:
            await backend.load(policy)
            done = await complete(backend, [request(0, prompt_ids=PROMPT, temperature=0.0)])
            assert done[0].token_ids.tolist() == greedy_completion("qwen3", 1, PROMPT, 12)


async def test_a_batch_that_does_not_fit_into_memory_shrinks_and_the_report_says_so(
    vllm_python: str, folder: Path, tmp_path: Path
) -> None:
    """Field case 51. 4,096 sequences of 160 Ki tokens would take 640 GiB."""
    tokens = 160 << 10
    policy = write_policy(
        folder / "long",
        max_prompt_tokens=tokens // 2,
        max_completion_tokens=tokens // 2,
        model_config_json=json.dumps({**CONFIGS["qwen3"], "max_position_embeddings": tokens}),
    )
    options = VllmOptions(batch=4096, threads=1)
    with anyio.fail_after(300):
        async with start_backend(options, log_path=tmp_path / "log", nice=0, python=vllm_python) as backend:
            assert backend.report.batch == 4096
            await backend.load(policy)
            assert 1 <= backend.report.batch <= 64
            await complete(backend, [request(i) for i in range(3)])


async def test_without_vllm_the_child_says_where_to_look(tmp_path: Path) -> None:
    with anyio.fail_after(120):
        with pytest.raises(BackendFailed, match=r"vLLM cannot be imported .*--backend-python"):
            async with start_backend(OPTIONS, log_path=tmp_path / "log", nice=0, python=sys.executable) as backend:
                await backend.next_outcome()


async def test_the_torch_engine_runs_in_the_other_environment_too(
    vllm_python: str, folder: Path, tmp_path: Path
) -> None:
    """The interpreter and the engine are independent of each other."""
    options = TorchOptions(batch=2, threads=1)
    with anyio.fail_after(120):
        async with start_backend(options, log_path=tmp_path / "log", nice=0, python=vllm_python) as backend:
            await backend.load(write_policy(folder / "torch"))
            done = await complete(backend, [request(0, prompt_ids=PROMPT, temperature=0.0)])
            assert done[0].token_ids.tolist() == greedy_completion("qwen3", 1, PROMPT, 12)
