"""How a coordinator ended, written down in its run's folder for `status` to tell when nobody watched the terminal.

RUN/last_end.json is removed when a coordinator starts and written when it ends. Without it, a run that was once started
was killed, or the machine went down.
"""

import contextlib
import json
import logging
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

from echo_coordinator.run_folder import RunFolder, remove_quietly, write_json
from echo_swarm.command_line import error_name
from echo_swarm.errors import EchoError, LocalFault
from echo_swarm.render import duration
from echo_swarm.wire import clean

log = logging.getLogger(__name__)

LONGEST = 2_000
"""Characters of a message that are kept."""


@contextmanager
def ending_noted(folder: RunFolder) -> Generator[None]:
    """Note how the block ends, in RUN/last_end.json and in the log. The folder's lock must be held."""
    remove_quietly(folder.last_end)
    try:
        yield
    except EchoError as e:
        log.error("ended: %s", e)
        _note(folder, error=error_name(e), message=str(e), exit_code=e.exit_code)
        raise
    except Exception as e:
        log.exception("ended by a fault of the program")
        _note(folder, error=type(e).__name__, message=str(e), exit_code=1)
        raise
    log.info("ended in good order")
    _note(folder, error=None, message="stopped, or the run has finished", exit_code=0)


def _note(folder: RunFolder, *, error: str | None, message: str, exit_code: int) -> None:
    values = {"at": time.time(), "error": error, "message": message[:LONGEST], "exit_code": exit_code}
    # A full disk may be the very reason; the log and the terminal have it too.
    with contextlib.suppress(LocalFault):
        write_json(folder.last_end, values)


def how_it_ended(folder: RunFolder) -> str:
    """Return how the coordinator of a run ended, as the end of a sentence; empty when it never ran."""
    try:
        end: Any = json.loads(folder.last_end.read_bytes())
        at, error, message, code = (end[name] for name in ("at", "error", "message", "exit_code"))
        ago = duration(max(0.0, time.time() - float(at)))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return "it was killed, or the machine went down" if folder.last_status.exists() else ""
    if error is None:
        return f"it ended in good order {ago} ago"
    said = clean(cast(str, str(message)[:LONGEST]))
    return f"it ended {ago} ago with exit code {code}, {clean(str(error)[:80])}: {said}"
