"""Processes that must end with somebody else."""

import sys
from pathlib import Path

import anyio
import psutil
import pytest


async def gone(pid: int) -> None:
    """Wait until no process `pid` runs; a zombie that nobody reaps counts as gone."""
    for _ in range(600):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return
        await anyio.sleep(0.05)
    pytest.fail(f"process {pid} is still there")


async def a_killed_parent_leaves_no_child(options: str, log_path: Path) -> None:
    """Start a backend child in a process of its own, kill that, and wait for the child. `options`: a class's name."""
    code = f"""
import anyio, sys
from pathlib import Path
from echo_node.backends.child import start_backend
from echo_node.backends.options import {options}
async def main():
    async with start_backend({options}(), log_path=Path({str(log_path)!r})) as backend:
        print(backend.pid, flush=True)
        await anyio.sleep_forever()
anyio.run(main)
"""
    async with await anyio.open_process([sys.executable, "-c", code], stderr=None) as parent:
        assert parent.stdout is not None
        pid = int(await parent.stdout.receive())
        assert psutil.pid_exists(pid)
        parent.kill()
    await gone(pid)
