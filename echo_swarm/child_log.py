"""A child's log, bounded while the child runs.

The child's stderr is the file itself, opened for appending: libraries and grandchildren write there too, and no parent
has to keep reading. A thread of the child looks at the size. Once that is beyond the limit, the file is copied to
`NAME.1`, in place of the copy before, and emptied; whoever has it open goes on at its beginning. What is written
between copy and emptying is lost.
"""

import contextlib
import os
import shutil
import threading
import time
from pathlib import Path
from typing import BinaryIO

MAX_LOG_BYTES = 10_000_000
"""A log that is longer is put aside: at the child's start, and within LOOK_EVERY_S while it runs."""
LOOK_EVERY_S = 1.0
_PATH = "ECHO_LOG_PATH"
_STDERR = 2


def open_log(path: Path) -> BinaryIO:
    """Open the log of a child that is about to start; one that has grown large begins anew. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(OSError):
        if path.stat().st_size > MAX_LOG_BYTES:
            path.replace(_aside(path))
    return path.open("ab", buffering=0)


def log_variables(path: Path) -> dict[str, str]:
    """Return what tells a child where its log is."""
    return {_PATH: str(path.absolute())}


def bound_log() -> None:
    """Keep this process's log small from now on, if the parent named one."""
    # Taken out, so that our own children do not look after it too.
    named = os.environ.pop(_PATH, "")
    if named:
        threading.Thread(target=_watch, args=(Path(named),), name="log", daemon=True).start()


def _watch(path: Path) -> None:
    while True:
        with contextlib.suppress(OSError):
            put_aside(path, _STDERR)
        time.sleep(LOOK_EVERY_S)


def put_aside(path: Path, descriptor: int, limit_bytes: int = MAX_LOG_BYTES) -> bool:
    """Empty the log that `descriptor` has open once it is longer than the limit. Returns whether it was.

    Raises:
        OSError: the copy cannot be made; the log is emptied all the same, or a full disk would stay full.

    """
    found = os.fstat(descriptor)
    if found.st_size <= limit_bytes or not os.path.samestat(found, path.stat()):
        return False
    try:
        shutil.copyfile(path, _aside(path))
    finally:
        os.ftruncate(descriptor, 0)
    return True


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}.1")
