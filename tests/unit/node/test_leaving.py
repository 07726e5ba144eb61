"""Ending a node by hand: what is said meanwhile, and that a second signal ends it at once, busy or not."""

import os
import signal
import subprocess
import sys

import anyio
import pytest

from echo_node.leaving import told_while_leaving, words
from echo_node.signals import FORCED_EXIT, caught_signals
from echo_node.status import summary_lines
from echo_swarm.ticker import Ticker
from tests.unit.node.test_cli import local_status


@pytest.mark.parametrize(
    ("running", "unanswered", "said"),
    [
        (8, 0, "waiting for 8 running completions"),
        (0, 36, "waiting for verdicts on 36 finished ones"),
        (2, 3, "waiting for 2 running completions and verdicts on 3 finished ones"),
        (0, 0, "handing work back"),
    ],
)
def test_leaving_says_what_it_waits_for(running: int, unanswered: int, said: str):
    assert words(running, unanswered) == said


@pytest.mark.anyio
async def test_leaving_is_told_at_once_with_its_limit(monkeypatch: pytest.MonkeyPatch):
    lines: list[str] = []
    told = anyio.Event()

    def say(line: str) -> None:
        lines.append(line)
        told.set()

    with anyio.fail_after(30):
        async with told_while_leaving(say, lambda: (1, 0), limit_s=10):
            await told.wait()
    assert lines == ["leaving, in about 10 s at most: waiting for 1 running completions"]


@pytest.mark.anyio
async def test_the_first_signal_is_an_event():
    with anyio.fail_after(30), caught_signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        await signals.first()
    assert signals.seen == 1


def test_the_second_signal_ends_a_process_whose_event_loop_is_busy():
    program = """
import anyio, os, signal, time
from echo_node.signals import caught_signals

async def main():
    with caught_signals():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            time.sleep(0.01)

anyio.run(main)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (FORCED_EXIT, "")


@pytest.mark.anyio
async def test_a_step_that_takes_long_is_told_again_and_one_that_has_ended_is_not():
    lines: list[str] = []
    repeated = anyio.Event()

    def emit(line: str) -> None:
        lines.append(line)
        if line.startswith("still"):
            repeated.set()

    ticker = Ticker(emit, every_s=0.01)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ticker.run)
            with ticker.step("connecting"):
                await repeated.wait()
            count = len(lines)
            await anyio.sleep(0.05)
            assert len(lines) == count
            tasks.cancel_scope.cancel()
    assert lines[0] == "connecting" and lines[1].startswith("still connecting, for ")


def test_work_without_a_verdict_is_said_to_be_kept():
    lines = summary_lines(local_status(pending=36))
    assert any(
        line.startswith("36 trajectories have no verdict yet: they are kept, and handed in when") for line in lines
    )
    assert not any("no verdict" in line for line in summary_lines(local_status()))
