"""Files that are either whole or absent, and the two faults of a disk that a person must hear about once.

Blocking; async callers go through `anyio.to_thread`.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Generator
from pathlib import Path

from echo_swarm.errors import LocalFault, StorageFull

_FULL = {errno.ENOSPC, errno.EDQUOT}


class FileBusy(LocalFault):
    """The system does not let go of a file right now (open elsewhere, virus scanner); the same call works later."""


def free_bytes(folder: Path) -> int:
    """Return the room that an ordinary user has on the file system of `folder`."""
    return shutil.disk_usage(folder).free


@contextlib.contextmanager
def explained(path: Path) -> Generator[None]:
    """Turn a full disk into StorageFull, a refused change into FileBusy, any other fault into LocalFault."""
    try:
        yield
    except PermissionError as e:
        raise FileBusy(f"{path} cannot be changed right now ({e.strerror}); tried again later") from e
    except OSError as e:
        if e.errno in _FULL:
            raise StorageFull(f"the disk became full while writing {path}; free some space, then it goes on") from e
        raise LocalFault(f"cannot write {path}: {e.strerror}") from e


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` so that after any crash `path` has the old content or the new one, and the new one once returned.

    Raises:
        StorageFull: no room; nothing is left behind.
        FileBusy: the old file cannot be replaced now.

    """
    temporary = path.with_name(path.name + ".tmp")
    with explained(path):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            remove_file(temporary)
            raise
    sync_folder(path.parent)


def publish_file(temporary: Path, path: Path) -> None:
    """Give a finished, synced file its final name, durably. Raises FileBusy; the temporary file then stays."""
    with explained(path):
        os.replace(temporary, path)
    sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it that are missing, durably. Raises OSError."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make names inside a folder durable, where the system can."""
    if os.name == "posix":
        _sync(folder)


def sync_tree(folder: Path) -> None:
    """Make a folder durable with all that is in it, where the system can; not its own name."""
    if os.name == "posix":
        for path in (*folder.rglob("*"), folder):
            _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_file(path: Path) -> bool:
    """Delete a file. Returns False when the system does not let go of it now."""
    try:
        path.unlink(missing_ok=True)
    except PermissionError:
        return False
    return True


def remove_folder(folder: Path, trash: Path) -> bool:
    """Delete a folder, first moving it to `trash` so that no half of it is ever taken for a whole.

    Returns False when something in it is still open and must be tried again later.
    """
    try:
        os.replace(folder, trash)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    shutil.rmtree(trash, ignore_errors=True)
    return True


def read_file(path: Path, limit_bytes: int) -> bytes | None:
    """Return a file's content; None when it is missing, unreadable, empty or larger than `limit_bytes`."""
    try:
        with path.open("rb") as file:
            data = file.read(limit_bytes + 1)
    except OSError:
        return None
    return data if 0 < len(data) <= limit_bytes else None


def read_range(path: Path, offset: int, length: int) -> bytes | None:
    """Return `length` bytes from `offset`; None when the file is gone or shorter."""
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            data = file.read(length)
    except OSError:
        return None
    return data if len(data) == length else None


def size_of(path: Path) -> int | None:
    """Return a file's length in bytes; None when there is no such file."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def allocated_bytes(path: Path) -> int:
    """Return the bytes that a (sparse) file takes on disk."""
    try:
        status = path.stat()
    except OSError:
        return 0
    return getattr(status, "st_blocks", 0) * 512
