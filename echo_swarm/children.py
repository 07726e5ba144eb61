"""Child processes that can crash, hang or hold a device without hurting their parent.

A child is `python -m <module>`; parent and child exchange frames over the child's stdin and stdout: a 4-byte
little-endian length and a msgpack map. The child's stderr goes to a log file (`child_log`). A child ends when its stdin
does, and dies with its parent even when it is busy: it asks the kernel for that (Linux under asyncio) or watches its
parent.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any, BinaryIO, cast

import anyio
import psutil
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from echo_swarm import codec
from echo_swarm.child_log import bound_log, log_variables, open_log
from echo_swarm.codec import Limits
from echo_swarm.errors import BackendFailed, MalformedMessage

FRAME_LIMITS = Limits(max_bytes=256 << 20, max_items=1 << 20, max_depth=16)
"""Our own children are trusted not to be hostile; the limit catches a stray print into the pipe."""

_PR_SET_PDEATHSIG = 1
_PARENT_PID = "ECHO_PARENT_PID"
_PARENT_WATCH = "ECHO_PARENT_WATCH"
_WATCH_EVERY_S = 0.5
_LENGTH = struct.Struct("<I")


class Child:
    """The parent's end. One task sends, one task receives."""

    def __init__(self, process: Process, name: str, log_path: Path) -> None:
        assert process.stdin is not None and process.stdout is not None
        self.name = name
        self.log_path = log_path
        self._process = process
        self._stdin = process.stdin
        self._stdout = BufferedByteReceiveStream(process.stdout)
        self._send_lock = anyio.Lock()
        self._length: int | None = None
        """Of the frame whose header has been read; kept so that a cancelled `receive` can be repeated."""

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def send(self, message: dict[str, Any]) -> None:
        """Send one frame. Raises BackendFailed with the child's last words when it is gone."""
        body = codec.encode(message, canonical=False)
        try:
            async with self._send_lock:
                await self._stdin.send(_LENGTH.pack(len(body)) + body)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as e:
            raise await self._failure() from e

    async def receive(self, *, timeout_s: float) -> dict[str, Any]:
        """Return the next frame. Cancelling it loses nothing.

        Raises:
            BackendFailed: the child ended, wrote something that is no frame, or stayed silent for `timeout_s`.

        """
        try:
            with anyio.fail_after(timeout_s):
                return await self._receive_frame()
        except TimeoutError as e:
            raise BackendFailed(f"{self.name} gave no answer for {timeout_s:.0f} s; see {self.log_path}") from e
        except MalformedMessage as e:
            raise BackendFailed(f"{self.name} wrote a frame that cannot be read ({e}); see {self.log_path}") from e
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, OSError) as e:
            raise await self._failure() from e

    async def _receive_frame(self) -> dict[str, Any]:
        if self._length is None:
            (self._length,) = _LENGTH.unpack(await self._stdout.receive_exactly(_LENGTH.size))
        assert self._length is not None
        if self._length > FRAME_LIMITS.max_bytes:
            raise MalformedMessage(f"announced as {self._length} bytes")
        body = await self._stdout.receive_exactly(self._length)
        self._length = None
        message = codec.decode(body, FRAME_LIMITS, canonical=False)
        if not isinstance(message, dict):
            raise MalformedMessage(f"{type(message).__name__} instead of a map")
        return cast("dict[str, Any]", message)

    async def _failure(self) -> BackendFailed:
        code: int | None = None
        with anyio.move_on_after(2):
            code = await self._process.wait()
        how = "closed its pipe" if code is None else f"ended with {describe_exit(code)}"
        last = last_line(self.log_path)
        return BackendFailed(f"{self.name} {how}{f': {last}' if last else ''} (log: {self.log_path})")


@asynccontextmanager
async def start_child(
    module: str,
    arguments: Sequence[str] = (),
    *,
    name: str,
    log_path: Path,
    grace_s: float = 5.0,
    python: str = sys.executable,
    environment: dict[str, str] | None = None,
) -> AsyncGenerator[Child]:
    """Run `python -m module *arguments` for the length of the block.

    On leaving, its stdin is closed and it has `grace_s` seconds to end before it is killed. Its whole process group
    goes with it, so that grandchildren do not stay behind.

    Raises:
        BackendFailed: it cannot be started.

    """
    with open_log(log_path) as log:
        process: Process | None = None
        try:
            # A cancellation in the middle would leave behind a process that nobody owns.
            with anyio.CancelScope(shield=True):
                process = await anyio.open_process(
                    [python, "-m", module, *arguments],
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, **_parent_variables(), **log_variables(log_path), **(environment or {})},
                )
        except OSError as e:
            raise BackendFailed(f"cannot start {name}: {e}") from e
    assert process is not None
    try:
        yield Child(process, name, log_path)
    finally:
        with anyio.CancelScope(shield=True):
            await _end(process, grace_s)


def _parent_variables() -> dict[str, str]:
    """Return what tells a child about us.

    The kernel's parent of a process is the thread that started it. Under asyncio that is the event loop's thread;
    trio starts processes in a worker thread that ends when it has been idle for 10 s, and would take the child along.
    """
    try:
        asyncio.get_running_loop()
        watch = ""
    except RuntimeError:
        watch = "1"
    return {_PARENT_PID: str(os.getpid()), _PARENT_WATCH: watch}


async def _end(process: Process, grace_s: float) -> None:
    assert process.stdin is not None
    with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
        await process.stdin.aclose()
    with anyio.move_on_after(grace_s):
        await process.wait()
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.returncode is None:
        process.kill()
    with anyio.move_on_after(5):
        await process.wait()
    with anyio.move_on_after(1):
        await process.aclose()


def kill_tree(pid: int) -> None:
    """Kill a process at once, with all that it started, those in sessions of their own included.

    What lost its parent before (a daemon) is not found.
    """
    try:
        root = psutil.Process(pid)
        found = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.kill()


def describe_exit(code: int) -> str:
    """Return an exit status in words."""
    if code >= 0:
        return f"exit code {code}"
    if os.name == "posix" and code == -signal.SIGILL:
        return "signal SIGILL: a library in it was built for another processor; install a build for this one"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def last_line(path: Path, *, limit_bytes: int = 4096) -> str:
    """Return the last line of a log that is not empty, shortened to 300 characters."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - limit_bytes))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


# What a child calls.


def die_with_parent() -> None:
    """End this process when its parent does, however that ends, and bound its log. Call first thing in a child.

    A grandchild has to call it too: a child that is killed this way cannot end its own children first.
    """
    # Taken out, so that our own children do not take our parent for theirs.
    parent = int(os.environ.pop(_PARENT_PID, "") or os.getppid())
    watch = os.environ.pop(_PARENT_WATCH, "")
    if sys.platform == "linux" and not watch:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    elif os.name == "posix":
        threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()
    if os.name == "posix" and os.getppid() != parent:
        # The parent died before the request above took hold.
        os._exit(0)
    bound_log()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_EVERY_S)
    os._exit(1)


def claim_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return (reader, writer) for frames, and point stdin and stdout elsewhere so that no print can hurt them."""
    reader = os.fdopen(os.dup(0), "rb")
    writer = os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)
    return reader, writer


def read_frame(reader: BinaryIO) -> dict[str, Any] | None:
    """Return the next frame, or None when the parent closed the pipe."""
    header = reader.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    body = reader.read(length)
    if len(body) < length:
        return None
    return codec.decode(body, FRAME_LIMITS, canonical=False)


def write_frame(writer: BinaryIO, message: dict[str, Any]) -> None:
    """Send one frame to the parent."""
    body = codec.encode(message, canonical=False)
    writer.write(_LENGTH.pack(len(body)) + body)
    writer.flush()
