"""The health of this machine as a node: a short list of checks, each with what it found and, if it failed, what to do.

Every check answers in bounded time and changes nothing that stays.
"""

import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import anyio

from echo_node.config import identity_key
from echo_node.machine import gib
from echo_swarm.errors import DaemonFailed, EchoError, LocalFault, StorageFull, UsageError
from echo_swarm.extras import install_command
from echo_swarm.identity import Identity, load

MIN_FREE_BYTES = 2 << 30
"""Room for a few versions of a small model; with an invite, of the run's model."""
VERSIONS_HELD = 3
"""A node keeps about that many beside the one it fetches."""
CLOCK_SLACK_S = 86_400.0
"""A clock may be this far behind the time at which this package was installed."""

SKEW_S = 60.0
"""And this far behind a run's. How far it is off to either side, `join` measures and tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at."""

    name: str
    text: str
    """What was found; of a failed check, what is wrong and what to do."""
    error: EchoError | None = None
    """None when all is well. Its class gives the exit code."""

    @property
    def ok(self) -> bool:
        """Whether all is well."""
        return self.error is None


def check(name: str, look: Callable[[], str]) -> Check:
    """Run `look`, which returns what it found or raises an EchoError."""
    try:
        return Check(name=name, text=look())
    except EchoError as e:
        return Check(name=name, text=str(e), error=e)


def local_checks(state_dir: Path, *, needed_bytes: int = MIN_FREE_BYTES, issued_at: float = 0.0) -> list[Check]:
    """Look at the state folder, the key, the disk and the clock. `issued_at`: when the run's newest version was."""
    return [
        check("state folder", lambda: _state_folder(state_dir)),
        check("key", lambda: _key(identity_key(state_dir))),
        check("disk", lambda: _disk(state_dir, needed_bytes)),
        check("clock", lambda: _clock(time.time(), issued_at)),
    ]


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that is there."""
    return next((path for path in (folder, *folder.absolute().parents) if path.exists()), folder)


def _state_folder(state_dir: Path) -> str:
    existing = _existing(state_dir)
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"x")
    except OSError as e:
        raise UsageError(
            f"{existing} cannot be written ({e.strerror}); choose another folder with --state-dir, or mend its "
            "owner and permissions"
        ) from e
    return f"{state_dir} can be written" if existing == state_dir else f"{state_dir} will be made by the first join"


def _key(path: Path) -> str:
    if not path.exists():
        return "none yet; the first join makes one"
    return f"{load(path).peer_id}, only its owner can read {path}"


def _disk(state_dir: Path, needed_bytes: int) -> str:
    existing = _existing(state_dir)
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise StorageFull(
            f"{gib(free)} free where {existing} lies, {gib(needed_bytes)} are needed for model versions; "
            "make room, or choose another disk with --state-dir"
        )
    return f"{gib(free)} free, {gib(needed_bytes)} needed"


def _clock(now_s: float, issued_at: float = 0.0) -> str:
    if now_s < issued_at - SKEW_S:
        raise UsageError(
            f"the clock is {issued_at - now_s:.0f} s behind the run's newest version; set the machine's clock, or tell "
            "the coordinator's owner if it is right"
        )
    installed_s = Path(__file__).stat().st_mtime
    if now_s < installed_s - CLOCK_SLACK_S:
        raise UsageError("the clock is behind the time at which this package was installed; set the machine's clock")
    return time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now_s))


async def check_helper() -> Check:
    """Start the libp2p helper process on loopback, and end it."""
    name = "libp2p helper"
    if importlib.util.find_spec("hivemind") is None:
        e: LocalFault = DaemonFailed(f"hivemind is not installed; run: {install_command('hivemind')}")
        return Check(name=name, text=str(e), error=e)
    from echo_swarm.transport.hivemind import open_hivemind_host

    started_s = anyio.current_time()
    try:
        async with open_hivemind_host(Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",)):
            return Check(name=name, text=f"starts in {anyio.current_time() - started_s:.1f} s")
    except LocalFault as e:
        return Check(name=name, text=str(e), error=e)
