"""Sample with a vLLM child and print, as JSON, the processor time of each of its threads that sampled. Run in a cgroup.

Usage: python -m tests.backends.vllm.sample_and_count PYTHON FOLDER [THREADS]
"""

import json
import sys
from pathlib import Path

import anyio
import psutil

from echo_node.backends.child import start_backend
from echo_node.backends.options import VllmOptions
from tests.backends.vllm.support import complete, request, write_policy


def _spent_s(pid: int) -> dict[int, float]:
    return {thread.id: thread.user_time + thread.system_time for thread in psutil.Process(pid).threads()}


async def main(python: str, folder: Path, threads: int) -> None:
    options = VllmOptions(batch=8, threads=threads)
    async with start_backend(options, log_path=folder / "log", nice=0, python=python) as backend:
        await backend.load(write_policy(folder / "policy"))
        await complete(backend, [request(i, max_tokens=48) for i in range(8)])
        before = _spent_s(backend.pid)
        await complete(backend, [request(i, max_tokens=64) for i in range(400)])
        spent = {key: total - before.get(key, 0.0) for key, total in _spent_s(backend.pid).items()}
    print(json.dumps({"device": backend.report.device, "spent_s": sorted(spent.values(), reverse=True)[:6]}))


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
