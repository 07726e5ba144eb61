"""What the command line asks of a coordinator that runs on this machine, and what it shows when none does."""

import time
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console

from echo_coordinator.control import NotRunning, ask
from echo_coordinator.run_folder import RunFolder
from echo_swarm.errors import Unavailable
from echo_swarm.render import duration, render_run_status
from echo_swarm.status import RunStatus

STOP_S = 6 * 3600.0 + 60
"""Longest update, and a little: what `stop` waits for."""
UNLOCK_S = 60.0
"""For the processes to end once the last version is published."""


def request(root: Path, op: str, *, timeout_s: float = 30.0, **arguments: Any) -> dict[str, Any]:
    """Ask the coordinator running on `root`. Raises UsageError, NotRunning, Unavailable, or its own error."""
    folder = RunFolder(root)
    folder.require()
    return anyio.run(lambda: ask(folder, op, timeout_s=timeout_s, **arguments))


def stop(root: Path) -> int | None:
    """Stop the coordinator and wait until it has ended, so that `start` may follow. Returns the newest version."""
    reply = request(root, "stop", timeout_s=STOP_S)
    if not RunFolder(root).wait_free(UNLOCK_S):
        raise Unavailable(f"the coordinator of {root} has stopped training, but its process has not ended; see its log")
    return reply.get("policy_version")


def show_status(root: Path, console: Console, *, as_json: bool) -> None:
    """Show the run's health; when it is not running, how it was last seen.

    Raises:
        NotRunning: no coordinator runs; after showing what is known.

    """
    try:
        status = RunStatus.model_validate(request(root, "status")["status"])
    except NotRunning:
        last = _last_seen(RunFolder(root))
        if last is not None:
            status, age_s = last
            if not as_json:
                console.print(f"not running; as it was {duration(age_s)} ago:", style="yellow")
            _show(status, console, as_json=as_json)
        raise
    _show(status, console, as_json=as_json)


def _show(status: RunStatus, console: Console, *, as_json: bool) -> None:
    if as_json:
        print(status.model_dump_json(indent=2))
    else:
        console.print(render_run_status(status))


def _last_seen(folder: RunFolder) -> tuple[RunStatus, float] | None:
    """Return what the coordinator last wrote down and its age in seconds."""
    try:
        status = RunStatus.model_validate_json(folder.last_status.read_bytes())
        age_s = max(0.0, time.time() - folder.last_status.stat().st_mtime)
    except (OSError, ValueError):
        return None
    ended = "finished" if status.state == "finished" else "stopped"
    nodes = [node.model_copy(update={"live": False, "last_seen_s": node.last_seen_s + age_s}) for node in status.nodes]
    trainer = status.trainer.model_copy(update={"state": ended, "detail": "", "since_s": age_s, "normal": True})
    return status.model_copy(
        update={
            "state": ended,
            "trainer": trainer,
            "nodes": nodes,
            "trajectories_per_s": 0.0,
            "tokens_per_s": 0.0,
            "version_age_s": None if status.version_age_s is None else status.version_age_s + age_s,
        }
    ), age_s
