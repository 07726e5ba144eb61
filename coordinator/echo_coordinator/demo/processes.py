"""The demo's peers as real processes: started, watched, ended, and every one accounted for."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired

import psutil

from echo_swarm.children import describe_exit, last_line


@dataclass(slots=True, kw_only=True)
class Peer:
    """One command line of ours, running."""

    name: str
    process: Popen[bytes]
    log_path: Path

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self.process.poll()

    def complaint(self) -> str | None:
        """Return what is wrong with the way it ended; None while it runs and when it ended with 0."""
        code = self.exit_code
        if not code:
            return None
        return f"{self.name} ended with {describe_exit(code)}: {last_line(self.log_path)} (log: {self.log_path})"


@dataclass(slots=True)
class Peers:
    """All peers of a demo, and all processes that these have started."""

    log_folder: Path
    peers: list[Peer] = field(default_factory=list[Peer])
    _seen: dict[int, float] = field(default_factory=dict[int, float])
    """Creation time by process id, of everything below us that was ever seen."""

    def start(self, name: str, module: str, arguments: Sequence[str]) -> Peer:
        """Start `python -m module arguments`; it ends with us, however we end."""
        self.log_folder.mkdir(parents=True, exist_ok=True)
        log_path = self.log_folder / f"{name}.log"
        with log_path.open("wb") as log:
            process = Popen(
                [sys.executable, "-m", "echo_swarm.under_parent", module, *arguments],
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                start_new_session=True,
                env={**os.environ, "ECHO_PARENT_PID": str(os.getpid()), "PYTHONUNBUFFERED": "1"},
            )
        peer = Peer(name=name, process=process, log_path=log_path)
        self.peers.append(peer)
        return peer

    def look(self) -> None:
        """Remember every process that now descends from us."""
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    self._seen.setdefault(child.pid, child.create_time())

    def end(self, *, grace_s: float) -> None:
        """Ask what still runs to end, wait, then kill."""
        for peer in self.peers:
            if peer.exit_code is None:
                peer.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + grace_s
        for peer in self.peers:
            with contextlib.suppress(TimeoutExpired):
                peer.process.wait(max(0.1, until - time.monotonic()))
        for peer in self.peers:
            if peer.exit_code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(peer.process.pid, signal.SIGKILL)
                peer.process.wait(10)

    def left_behind(self) -> list[str]:
        """Return a description of every process once seen that still runs."""
        found: list[str] = []
        for pid, created in self._seen.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(f"{pid} {' '.join(process.cmdline()[:6])}")
        return found
