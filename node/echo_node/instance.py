"""The node's key, and that only one process on this machine uses it."""

import contextlib
import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from echo_node.config import identity_key
from echo_swarm.errors import IdentityInUse, UsageError
from echo_swarm.identity import Identity, load_or_create


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A key that is ours alone for now."""

    identity: Identity
    key_path: Path
    is_new: bool
    """The key was made just now: tell the person to back it up."""

    @property
    def backup_notice(self) -> str:
        """What a person is told at the first join."""
        return (
            f"This node is {self.identity.peer_id}.\n"
            f"Its key was created at {self.key_path}. Back this file up: whoever loses it loses the node's name and "
            "credit, and nobody can restore it."
        )


@contextlib.contextmanager
def claim_identity(state_dir: Path) -> Generator[Instance]:
    """Load or create the node's key and hold its lock for the length of the block.

    The lock is the operating system's, so that it goes with the process however that ends.

    Raises:
        IdentityInUse: another process on this machine runs with this key.
        UsageError: the key is damaged or open to others, or the folder cannot be written.

    """
    key_path = identity_key(state_dir)
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = key_path.with_suffix(".lock").open("a+")
    except OSError as e:
        raise UsageError(
            f"the state folder {state_dir} cannot be used ({e.strerror}); choose one with --state-dir"
        ) from e
    with lock:
        if not _try_lock(lock):
            raise IdentityInUse(
                f"a node with the key {key_path} already runs on this machine (process {_owner(lock)}); "
                "stop it, or give this one its own --state-dir"
            )
        lock.seek(0)
        lock.truncate()
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        identity, is_new = load_or_create(key_path)
        yield Instance(identity=identity, key_path=key_path, is_new=is_new)


def _owner(lock: IO[str]) -> str:
    lock.seek(0)
    return lock.read(32).strip() or "unknown"


def _try_lock(lock: IO[str]) -> bool:
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True
    import msvcrt  # pragma: no cover - Windows

    try:  # pragma: no cover - Windows
        lock.seek(1 << 20)  # far behind the owner's number, which others must be able to read
        msvcrt.locking(lock.fileno(), msvcrt.LK_NBLCK, 1)  # pyright: ignore[reportAttributeAccessIssue]
    except OSError:
        return False
    return True
