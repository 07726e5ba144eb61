"""A folder for what a backend's child writes to TMPDIR, removed with the child however that ended.

A child that is killed cannot tidy up: its library's sockets and rendezvous files, and folders with whole models, would
stay in /tmp for good. A parent that is killed leaves the folder; the next start removes it.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from anyio import CancelScope, to_thread

MAX_PATH_BYTES = 60
"""Libraries make unix sockets below it, whose whole path may have 107 bytes."""
_NAME = re.compile(r"echo-backend-(\d+)-\w+")


@asynccontextmanager
async def own_temporary_folder() -> AsyncGenerator[dict[str, str]]:
    """Give the variables that make a child use a folder of its own; none where its path would be too long."""
    base = next((folder for folder in (tempfile.gettempdir(), "/tmp") if _fits(folder)), None)
    if base is None:
        yield {}
        return
    await to_thread.run_sync(_remove_left_over, Path(base))
    folder = await to_thread.run_sync(lambda: tempfile.mkdtemp(prefix=f"echo-backend-{os.getpid()}-", dir=base))
    try:
        yield {"TMPDIR": folder}
    finally:
        with CancelScope(shield=True):
            await to_thread.run_sync(lambda: shutil.rmtree(folder, ignore_errors=True))


def _fits(folder: str) -> bool:
    name = f"echo-backend-{os.getpid()}-12345678"
    return len(os.fsencode(os.path.join(folder, name))) <= MAX_PATH_BYTES and os.access(folder, os.W_OK)


def _remove_left_over(base: Path) -> None:
    """Remove the folders of our own whose process is gone."""
    with contextlib.suppress(OSError):
        for path in base.iterdir():
            found = _NAME.fullmatch(path.name)
            if found and not _is_there(int(found[1])) and not path.is_symlink() and path.stat().st_uid == os.getuid():
                shutil.rmtree(path, ignore_errors=True)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
