"""The processes of the distribution benchmark, as it sees them: started on a host, spoken to, waited for, ended."""

import json
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks._distribution_net import Net
from benchmarks._report import ROOT
from echo_swarm.children import describe_exit, last_line

END_S = 3.0
LOOK_S = 0.25


class PartFailed(Exception):
    """One part of the benchmark came to nothing; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What a process said."""

    worker: "Worker"
    name: str
    at: float
    """Time of day."""
    values: dict[str, Any]


class Worker:
    """A process on one host."""

    def __init__(self, name: str, process: "subprocess.Popen[str]", log: Path, inbox: "queue.Queue[Event]") -> None:
        self.name = name
        self.process = process
        self.log = log
        self._inbox = inbox
        threading.Thread(target=self._listen, daemon=True, name=f"lines of {name}").start()

    def order(self, **what: Any) -> None:
        """Tell it what to do."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            self._inbox.put(Event(worker=self, name=said["event"], at=said["at"], values=said))

    def cpu_s(self) -> float:
        """Processor seconds of it and of everything that it has started."""
        total = 0.0
        with suppress(psutil.Error):
            process = psutil.Process(self.process.pid)
            for one in [process, *process.children(recursive=True)]:
                with suppress(psutil.Error):
                    # Of children, only those that have ended are in a parent's sum.
                    total += sum(one.cpu_times()[:4])
        return total


class Workers:
    """All processes of one part. Leaving the block ends them."""

    def __init__(self, net: Net, folder: Path) -> None:
        self.folder = folder
        self.all: list[Worker] = []
        self._net = net
        self._inbox: queue.Queue[Event] = queue.Queue()

    def __enter__(self) -> "Workers":
        """Make the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *error: object) -> None:
        """Close their pipes, at which they leave; end those that do not."""
        for worker in self.all:
            with suppress(OSError):
                assert worker.process.stdin is not None
                worker.process.stdin.close()
        until = time.monotonic() + END_S
        for worker in self.all:
            try:
                worker.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                # What they have started ends with them.
                worker.process.kill()
                worker.process.wait(END_S)

    def start(self, name: str, host: int, command: list[str], **environment: str) -> Worker:
        """Start a command on a host."""
        log = self.folder / f"{name}.log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [*self._net.inside(host), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                # A Ctrl-C is for the benchmark, which ends its processes itself.
                start_new_session=True,
                env={
                    **os.environ,
                    "ECHO_PARENT_PID": str(os.getpid()),
                    "PYTHONUNBUFFERED": "1",
                    "OMP_NUM_THREADS": "1",
                    **environment,
                },
            )
        worker = Worker(name, process, log, self._inbox)
        self.all.append(worker)
        return worker

    def until(self, condition: Callable[[], bool], *, limit_s: float, what: str, also: Callable[[Event], None]) -> None:
        """Return once `condition` holds; everything said on the way goes to `also`.

        Raises:
            PartFailed: it takes too long, or a process has ended.

        """
        until = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > until:
                raise PartFailed(f"not within {limit_s:.0f} s: {what} (logs: {self.folder})")
            try:
                said = self._inbox.get(timeout=LOOK_S)
            except queue.Empty:
                self._look()
                continue
            also(said)
            if said.name == "failed":
                raise PartFailed(f"{said.worker.name}: {said.values['reason']} (log: {said.worker.log})")

    def wait(
        self, event: str, of: Collection[Worker], *, limit_s: float, also: Callable[[Event], None] | None = None
    ) -> dict[str, Event]:
        """Return what each of `of` says under the name `event`; everything said on the way goes to `also`, too.

        Raises:
            PartFailed: it takes too long, or a process has ended.

        """
        heard: dict[str, Event] = {}

        def hear(said: Event) -> None:
            if also is not None:
                also(said)
            if said.name == event and said.worker in of:
                heard[said.worker.name] = said

        names = ", ".join(worker.name for worker in of)
        self.until(lambda: len(heard) == len(of), limit_s=limit_s, what=f"`{event}` from {names}", also=hear)
        return heard

    def ask(
        self,
        worker: Worker,
        event: str,
        *,
        limit_s: float = 30.0,
        also: Callable[[Event], None] | None = None,
        **order: Any,
    ) -> dict[str, Any]:
        """Tell one to do something and return what it answers."""
        worker.order(**order)
        return self.wait(event, [worker], limit_s=limit_s, also=also)[worker.name].values

    def cpu_s(self) -> float:
        """Processor seconds of all, so far."""
        return sum(worker.cpu_s() for worker in self.all)

    def _look(self) -> None:
        for worker in self.all:
            if (code := worker.process.poll()) is not None:
                raise PartFailed(
                    f"{worker.name} ended with {describe_exit(code)}: {last_line(worker.log)} (log: {worker.log})"
                )
