"""The processes of the crash benchmark: forked from one that has imported everything, killed, started again.

A start costs what the program does, not what its imports cost: five of them a minute fit on a busy core. The children
that these processes start (trainer, scorers, backends) are fresh interpreters, as ever.
"""

import importlib
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks._chaos_processes import MARK
from echo_swarm.children import describe_exit, die_with_parent, last_line

KINDS = ("coordinator", "trainer", "scorer", "node", "backend")
"""Of processes that are killed."""
_CHILDREN = {
    "trainer": "echo_coordinator.trainer",
    "scorer": "echo_coordinator.scoring",
    "backend": "echo_node.backends",
}
"""Kind of child → what its command line has."""
GONE_S = 30.0
"""For the children of a killed process to go too."""


IMPORTED = (
    "echo_coordinator.cli",
    "echo_coordinator.commands.start",
    "echo_node.cli",
    "echo_node.join",
    "echo_swarm.directory.dht",
    "echo_swarm.transport.hivemind",
    "hivemind.dht.node",
)
"""By coordinators and nodes, sooner or later."""


@dataclass(slots=True)
class Forked:
    """A command line that is started again and again on the same folders."""

    name: str
    module: str
    arguments: Sequence[str]
    folder: Path
    lives: int = 0
    pid: int = 0
    exit_code: int | None = None
    killed: bool = False
    """In this life, by us."""
    started_s: float = 0.0
    family: set[int] = field(default_factory=set[int])
    """Children of this life that were ever seen."""

    @property
    def log(self) -> Path:
        """Everything that it and its earlier lives printed."""
        return self.folder / f"{self.name}.log"

    def start(self) -> None:
        """Fork, and become the command line in the child. It dies with us."""
        self.lives += 1
        self.exit_code, self.killed, self.family, self.started_s = None, False, set(), time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._become(parent)

    def _become(self, parent: int) -> None:
        code = 1
        try:
            os.setsid()
            os.environ["ECHO_PARENT_PID"] = str(parent)
            die_with_parent()
            _redirect(self.log)
            random.seed()
            sys.argv = [self.module, *self.arguments]
            importlib.import_module(self.module).main()
            code = 0
        except SystemExit as e:
            code = e.code if isinstance(e.code, int) else int(e.code is not None)
        except BaseException:  # noqa: BLE001 - whatever it is, it must not run the parent's code
            import traceback

            traceback.print_exc()
        finally:
            with suppress(ValueError, OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    def poll(self) -> int | None:
        """Return how it ended, None while it runs."""
        if self.exit_code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.exit_code = os.waitstatus_to_exitcode(status)
        return self.exit_code

    def send(self, sent: signal.Signals) -> None:
        """Send a signal to it, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, sent)

    def wait(self, seconds: float) -> int:
        """Return how it ended; kill it when it does not within this time."""
        until = time.monotonic() + seconds
        while self.poll() is None:
            if time.monotonic() > until:
                self.send(signal.SIGKILL)
            time.sleep(0.02)
        assert self.exit_code is not None
        return self.exit_code

    def children(self, kind: str) -> list[int]:
        """Return its children of a kind."""
        found = children_of(self.pid)
        self.family.update(found)
        return [pid for pid in found if _CHILDREN[kind] in _line(pid)]

    def left_behind(self) -> list[int]:
        """Return those of its children that are still there some time after its end."""
        until = time.monotonic() + GONE_S
        while left := [pid for pid in self.family if _runs(pid)]:
            if time.monotonic() > until:
                break
            time.sleep(0.02)
        return left

    def last_words(self) -> str:
        """Return how it ended, and the last line of its log."""
        return f"{describe_exit(self.exit_code or 0)}: {last_line(self.log)}"


def _redirect(log: Path) -> None:
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)


def children_of(pid: int) -> list[int]:
    """Return the processes that any thread of a process started."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return found


def _line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    return ""


def _runs(pid: int) -> bool:
    """Whether it is there, is ours (ids are used again), and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX" and os.environ[MARK].encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def kill(pid: int) -> bool:
    """Send SIGKILL; return whether there was somebody."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
