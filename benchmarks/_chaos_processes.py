"""The processes of the chaos benchmark: started, listened to, killed at a moment of their own telling, started again.

A process says when it enters a phase. The thread that reads this kills it, after the delay that was drawn: milliseconds
later at most. Which phase it died in is what it had said by then, not what was aimed at.
"""

import json
import os
import queue
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from benchmarks._report import ROOT
from echo_swarm.children import describe_exit, last_line

MARK = "ECHO_CHAOS_PROCESS"
"""In the environment of a process and of all that it starts: how they are found when it is gone."""
GONE_S, END_S = 30.0, 5.0
PRECEDENCE = (
    "applying", "verifying", "loading", "pruning", "resuming", "fetching",
    "making a delta", "publishing", "writing a checkpoint",
)  # fmt: skip
"""Of several phases at once, the first names the kill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A line of a process."""

    who: str
    life: int
    event: str
    values: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """When a process is to be killed."""

    phase: str
    delay_s: float
    """After it has entered the phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What was hit."""

    who: str
    aimed: str
    hit: str


@dataclass(slots=True)
class Life:
    """One process, from its start to its end."""

    number: int
    process: "subprocess.Popen[str]"
    active: dict[str, int] = field(default_factory=dict[str, int])
    """Phase → calls that are in it."""
    joined: bool = False
    killed: str | None = None
    """The phase that was aimed at."""
    reader: threading.Thread | None = None
    started_s: float = field(default_factory=time.monotonic)

    @property
    def phase(self) -> str:
        """What it is in the middle of."""
        if not self.joined:
            return "starting"
        return next((phase for phase in PRECEDENCE if self.active.get(phase)), "idle")


class Chaotic:
    """A process that is started again and again on the same folders."""

    def __init__(self, name: str, command: list[str], folder: Path, inbox: "queue.Queue[Said]") -> None:
        self.name = name
        self.aim: Aim | None = None
        self.lives = 0
        self.start_s: list[float] = []
        """From the start of each life to its having joined."""
        self._command = command
        self._folder = folder
        self._inbox = inbox
        self.life = self._start()

    def _start(self) -> Life:
        """Start it. From the main thread only: it dies with the thread that started it."""
        self.lives += 1
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                start_new_session=True,
                env={**os.environ, MARK: self.mark, "ECHO_PARENT_PID": str(os.getpid()), "OMP_NUM_THREADS": "1"},
            )
        life = Life(self.lives, process)
        life.reader = threading.Thread(target=self._listen, args=(life, process.stdout), daemon=True)
        life.reader.start()
        return life

    def restart(self) -> None:
        """Start it again."""
        self.life = self._start()

    @property
    def log(self) -> Path:
        """Everything that it and its earlier lives printed."""
        return self._folder / f"{self.name}.log"

    @property
    def mark(self) -> str:
        """Value of MARK, for the processes of all lives."""
        return f"{os.getpid()}-{self.name}"

    @property
    def ended(self) -> bool:
        """Whether it has ended and all that it said is in the inbox."""
        return self.life.process.poll() is not None and not (self.life.reader and self.life.reader.is_alive())

    def kill(self, aimed: str) -> None:
        """End it without a word."""
        if self.life.process.poll() is None:
            self.life.killed = aimed
            os.kill(self.life.process.pid, signal.SIGKILL)

    def last_words(self) -> str:
        """Return how it ended, and the last line of its log."""
        return f"{describe_exit(self.life.process.returncode)}: {last_line(self.log)}"

    def _listen(self, life: Life, lines: "IO[str] | None") -> None:
        assert lines is not None
        for line in lines:
            try:
                values = json.loads(line)
            except ValueError:
                continue  # Killed in the middle of it.
            self._note(life, values)
            self._inbox.put(Said(who=self.name, life=life.number, event=values["event"], values=values))

    def _note(self, life: Life, values: dict[str, Any]) -> None:
        if values["event"] == "joined" and not life.joined:
            life.joined = True
            self.start_s.append(time.monotonic() - life.started_s)
        if values["event"] != "phase":
            return
        phase, change = values["phase"], 1 if values["on"] else -1
        life.active[phase] = life.active.get(phase, 0) + change
        aim = self.aim
        if aim is not None and aim.phase == phase and values["on"] and life.joined and life.killed is None:
            self.aim = None
            time.sleep(aim.delay_s)
            self.kill(aim.phase)

    def end(self) -> None:
        """Close its pipe, at which it leaves; kill it if it does not."""
        with suppress(OSError):
            assert self.life.process.stdin is not None
            self.life.process.stdin.close()
        try:
            self.life.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill("end")
            self.life.process.wait()


def left_over(mark: str, *, timeout_s: float = GONE_S) -> list[str]:
    """Return the processes with this mark that are still there after some time."""
    until = time.monotonic() + timeout_s
    while found := _marked(mark):
        if time.monotonic() > until:
            return found
        time.sleep(0.05)
    return []


def _marked(mark: str) -> list[str]:
    found: list[str] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
    return found
