"""Talking to the coordinator that runs on this machine: status, pause, resume, stop.

A unix socket in a private temporary folder (run folders can have paths too long for one), named in RUN/control.json.
One JSON line in, one JSON line out. Only the user who started the coordinator can open it.
"""

import contextlib
import json
import os
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream

from echo_coordinator.ending import how_it_ended
from echo_coordinator.run_folder import RunFolder, remove_quietly, write_json
from echo_swarm.errors import EchoError, Unavailable, UsageError

MAX_LINE_BYTES = 1 << 20
MAX_REPLY_BYTES = 64 << 20
_PREFIX = "echo-control-"
_SOCKET = "socket"

Answer = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Handles one request: its `op` and the whole request."""


class NotRunning(Unavailable):
    """No coordinator runs on this folder."""


@asynccontextmanager
async def control_server(folder: RunFolder, answer: Answer) -> AsyncGenerator[None]:
    """Serve control requests for the length of the block. The folder's lock must be held."""
    _remove_leftovers(folder)
    with tempfile.TemporaryDirectory(prefix=_PREFIX, dir=_short_temporary_folder()) as private:
        path = Path(private) / _SOCKET
        listener = await anyio.create_unix_listener(path, mode=0o600)
        write_json(folder.control, {"socket": str(path), "pid": os.getpid(), "root": _root(folder)})
        try:
            async with listener, anyio.create_task_group() as tasks:
                tasks.start_soon(listener.serve, lambda stream: _serve(stream, answer))
                yield
                tasks.cancel_scope.cancel()
        finally:
            remove_quietly(folder.control)


def _remove_leftovers(folder: RunFolder) -> None:
    """Remove the socket of a coordinator on this folder that was killed."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        private = Path(_address(folder)).parent
        if private.name.startswith(_PREFIX):
            (private / _SOCKET).unlink()
            private.rmdir()


def _address(folder: RunFolder) -> str:
    """Return the socket in RUN/control.json. Raises OSError, ValueError, KeyError, TypeError."""
    control: dict[str, Any] = json.loads(folder.control.read_text())
    if control.get("root", _root(folder)) != _root(folder):
        raise ValueError("the folder was copied from a running coordinator's, whose socket this is")
    return str(control["socket"])


def _root(folder: RunFolder) -> str:
    return str(folder.root.resolve())


async def _serve(stream: ByteStream, answer: Answer) -> None:
    async with stream:
        try:
            with anyio.fail_after(60):
                line = await BufferedByteReceiveStream(stream).receive_until(b"\n", MAX_LINE_BYTES)
            request = json.loads(line)
            # Without a deadline of ours: `stop` waits for the update under way. The asker has one.
            reply = await answer(str(request["op"]), request)
        except EchoError as e:
            reply = {"error": str(e), "usage": isinstance(e, UsageError)}
        except (ValueError, KeyError, TypeError, TimeoutError, anyio.DelimiterNotFound, anyio.IncompleteRead) as e:
            reply = {"error": f"bad control request: {e or type(e).__name__}"}
        try:
            await stream.send(json.dumps(reply).encode() + b"\n")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return  # the asker went away; nothing depends on the answer


async def ask(folder: RunFolder, op: str, *, timeout_s: float = 30.0, **arguments: Any) -> dict[str, Any]:
    """Send one request to the coordinator running on `folder`.

    Raises:
        NotRunning: there is none.
        EchoError: it answered with an error.
    """
    try:
        socket = _address(folder)
        with anyio.fail_after(timeout_s):
            async with await anyio.connect_unix(socket) as stream:
                await stream.send(json.dumps({"op": op, **arguments}).encode() + b"\n")
                line = await BufferedByteReceiveStream(stream).receive_until(b"\n", MAX_REPLY_BYTES)
    except TimeoutError as e:
        raise Unavailable(f"the coordinator of {folder.root} did not answer for {timeout_s:.0f} s") from e
    except (OSError, ValueError, KeyError, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.EndOfStream) as e:
        if not folder.wait_free(0.0):
            raise NotRunning(f"the coordinator of {folder.root} is starting or ending; try again in a moment") from e
        ended = how_it_ended(folder)
        raise NotRunning(
            f"no coordinator runs on {folder.root}{f' ({ended})' if ended else ''}; "
            f"start it with: echo-coordinator start {folder.root}"
        ) from e
    reply: dict[str, Any] = json.loads(line)
    if "error" in reply:
        raise (UsageError if reply.get("usage") else EchoError)(str(reply["error"]))
    return reply


def _short_temporary_folder() -> str:
    # Socket paths are limited to about 100 bytes; a user's TMPDIR may be longer than that.
    folder = tempfile.gettempdir()
    return folder if len(folder) < 60 else "/tmp"
