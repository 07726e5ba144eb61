"""The two command lines as processes: run to their end, or kept running and accounted for."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

COORDINATOR = "echo_coordinator.cli"
NODE = "echo_node.cli"
DEADLINE_S = 300.0
"""For anything that is waited for; only a failing test waits that long."""
LOOK_S = 0.1

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "COLUMNS": "160", "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line on stderr that a failed command leaves."""
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        return lines[0]

    def json(self) -> Any:
        """What `--json` printed."""
        assert self.code == 0, self.err
        return json.loads(self.out)


def call(module: str, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> Result:
    """Run a command to its end."""
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
        env={**os.environ, **ENVIRONMENT, **(environment or {})},
    )
    return Result(code=done.returncode, out=done.stdout, err=done.stderr)


@dataclass(slots=True, kw_only=True)
class Running:
    """A command that keeps running; its output goes to a file."""

    process: subprocess.Popen[bytes]
    log: Path
    family: dict[int, psutil.Process] = field(default_factory=dict[int, psutil.Process])
    """Every process below it that was ever looked at."""

    def output(self) -> str:
        """Return what it has printed so far, stdout and stderr."""
        return self.log.read_text()

    def look(self) -> list[psutil.Process]:
        """Remember and return what runs below it now."""
        try:
            below = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.Error:
            return []
        self.family.update({process.pid: process for process in below})
        return below

    def named(self, *parts: str) -> list[psutil.Process]:
        """Return the processes below it whose command line has all of `parts`."""
        found: list[psutil.Process] = []
        for process in self.look():
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if all(part in line for part in parts):
                found.append(process)
        return found

    def wait_for(self, what: str, ready: Callable[[], Any], *, timeout_s: float = DEADLINE_S) -> Any:
        """Return the first true result of `ready`. Fails with this command's output when it ends before that."""
        until = time.monotonic() + timeout_s
        while True:
            self.look()
            if found := ready():
                return found
            if self.process.poll() is not None:
                pytest.fail(f"ended with {self.process.returncode} before {what}:\n{self.output()}")
            if time.monotonic() > until:
                pytest.fail(f"no {what} within {timeout_s:.0f} s:\n{self.output()}")
            time.sleep(LOOK_S)

    def end(self, sent: signal.Signals, *, timeout_s: float = DEADLINE_S) -> int:
        """Send a signal and return the exit code."""
        self.look()
        self.process.send_signal(sent)
        return self.process.wait(timeout_s)

    def end_group(self, sent: signal.Signals, *, timeout_s: float = DEADLINE_S) -> int:
        """Send a signal to the whole process group, as a terminal does, and return the exit code."""
        self.look()
        os.killpg(self.process.pid, sent)
        return self.process.wait(timeout_s)

    def left_behind(self, *, timeout_s: float) -> list[str]:
        """Return what of its family still runs after `timeout_s` at the latest."""
        _, alive = psutil.wait_procs(list(self.family.values()), timeout=timeout_s)
        return [f"{process.pid} {' '.join(process.cmdline())}" for process in alive if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


@contextmanager
def running(
    module: str, *arguments: str | Path, log: Path, environment: Mapping[str, str] | None = None
) -> Generator[Running]:
    """Run a command for the length of the block. It ends with the test process, however that ends."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "echo_swarm.under_parent", module, *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **ENVIRONMENT, "ECHO_PARENT_PID": str(os.getpid()), **(environment or {})},
        )
    command = Running(process=process, log=log)
    try:
        yield command
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(DEADLINE_S)
