# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false, reportMissingTypeStubs=false
"""Runs hivemind's libp2p helper process p2pd: the one place that starts it. Imports hivemind, which takes seconds.

What differs from hivemind's own `P2P.create`:

- The control sockets and the key lie in a private folder that is removed, also for owners that were killed.
- p2pd dies with this process whatever happens to it: `setpriv --pdeathsig` where there is one; and p2pd itself ends
  when its control connection does.
- The socket on which p2pd hands us incoming streams has a backlog of 4096. With asyncio's 100, bursts are lost.
- Start and end are bounded in time; what p2pd printed last is in the error.
- Incoming streams are handled in the owner's task group.
"""

import asyncio
import asyncio.subprocess
import contextlib
import json
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import multiaddr
import psutil
from anyio.abc import TaskGroup
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings import p2pclient
from hivemind.proto import p2pd_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr

from echo_swarm.errors import DaemonFailed, PeerUnreachable
from echo_swarm.identity import Identity, PeerId
from echo_swarm.transport.daemon_messages import read_message, write_message
from echo_swarm.transport.hivemind_stream import HivemindStream

logger = logging.getLogger(__name__)

BACKLOG = 4096
_FOLDER_PREFIX = "echo-swarm-p2pd-"
_STOP_S = 3.0
"""p2pd ends at once when asked to; after this long it is killed."""
_HANDSHAKE_S = 10.0
"""For p2pd, on this machine, to say whose stream it hands us."""
_ACCEPT_PAUSE_S = 0.2
"""Until the next try when this process can open no more files."""

_MAX_SEEN = 8192
"""Peers whose addresses are remembered; identities cost nothing."""

use_hivemind_log_handler("nowhere")
logging.getLogger("hivemind").setLevel(logging.WARNING)


class Daemon(P2P):
    """A running p2pd and the connections to it. Obtained from `run_daemon`."""

    def __init__(self, tasks: TaskGroup, folder: Path) -> None:
        super().__init__()
        self.died = asyncio.Event()
        """Set when p2pd ended though nobody asked it to."""
        self._stopping = False
        self._tasks = tasks
        self._ready = asyncio.Event()
        self._last_words = ""
        self._handlers: dict[str, Callable[[HivemindStream, PeerId], Awaitable[None]]] = {}
        self._socket_path = str(folder / "d.sock")
        self._daemon_listen_maddr = Multiaddr(f"/unix{self._socket_path}")
        self._client_listen_maddr = Multiaddr(f"/unix{folder / 'c.sock'}")
        self._seen: dict[PeerId, bytes] = {}
        """Encoded addresses that peers' newest streams came from."""
        self._accepting = False
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Process id of p2pd."""
        return self._child.pid

    async def start(self, command: Sequence[str], timeout_s: float) -> None:
        """Start p2pd and connect to it. Raises DaemonFailed."""
        try:
            async with asyncio.timeout(timeout_s):
                self._process = self._child = await asyncio.create_subprocess_exec(
                    *command,
                    f"-listen={self._daemon_listen_maddr}",
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    # A terminal sends Ctrl+C to the whole group; p2pd must outlive our orderly end.
                    start_new_session=True,
                    env={**os.environ, "GOLOG_LOG_LEVEL": "ERROR", "GOLOG_LOG_FMT": "json"},
                )
                self._alive = True
                self._tasks.start_soon(self._watch, self._process)
                await self._ready.wait()
                if self.died.is_set():
                    raise DaemonFailed(f"the libp2p helper did not start: {self.last_words}{_advice(self.last_words)}")
                self._client = await p2pclient.Client.create(
                    control_maddr=self._daemon_listen_maddr, listen_maddr=self._client_listen_maddr
                )
                await self._ping_daemon()
        except TimeoutError as e:
            raise DaemonFailed(
                f"the libp2p helper did not start within {timeout_s:g} s (it said: {self.last_words}); "
                "if this machine is slow or busy, allow it more time"
            ) from e
        except OSError as e:
            raise DaemonFailed(f"the libp2p helper did not start: {e.strerror or e}{_advice(str(e))}") from e

    @property
    def last_words(self) -> str:
        """What p2pd printed last."""
        return self._last_words or "nothing"

    async def stop(self) -> None:
        """End p2pd within a few seconds."""
        self._stopping = True
        self._terminate()
        if self._process is None:
            return
        try:
            async with asyncio.timeout(_STOP_S):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def handle_streams(self, protocol: str, handler: Callable[[HivemindStream, PeerId], Awaitable[None]]) -> None:
        """Call `handler` in the owner's task group for each incoming stream of `protocol`."""
        if not self._accepting:
            self._accepting = True
            server = socket.socket(socket.AF_UNIX)
            server.setblocking(False)
            server.bind(self._client_listen_maddr["unix"])
            server.listen(BACKLOG)
            self._tasks.start_soon(self._accept, server)
        self._handlers[protocol] = handler
        request = p2pd_pb2.StreamHandlerRequest(
            addr=self._client_listen_maddr.to_bytes(), proto=[protocol], balanced=False
        )
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=request))

    async def open_stream(self, peer: PeerId, protocol: str, timeout_s: float) -> HivemindStream:
        """Open a stream. Raises PeerUnreachable with p2pd's own words, OSError when p2pd is gone."""
        request = p2pd_pb2.StreamOpenRequest(
            peer=PeerID.from_base58(peer).to_bytes(), proto=[protocol], timeout=max(1, round(timeout_s))
        )
        _response, stream = await self._exchange(
            p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request)
        )
        return stream

    async def connect(self, peer: PeerId, address: str, timeout_s: float) -> None:
        """Dial an address without its /p2p/ part. Raises like `open_stream`, ValueError for no address."""
        # Not hivemind's Multiaddr: it encodes a /p2p/ inside an address in a way that p2pd cannot read.
        encoded = multiaddr.Multiaddr(address).to_bytes()
        request = p2pd_pb2.ConnectRequest(
            peer=PeerID.from_base58(peer).to_bytes(), addrs=[encoded], timeout=max(1, round(timeout_s))
        )
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=request))

    async def listen_addresses(self) -> tuple[str, ...]:
        """Return the addresses that p2pd believes it can be dialled at, without /p2p/."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY))
        found = [str(multiaddr.Multiaddr(bytes(encoded))) for encoded in response.identify.addrs]
        return tuple(address for address in found if "p2p-circuit" not in address)

    async def _ask(self, request: Any) -> Any:
        """Send p2pd a request that needs only an answer."""
        response, stream = await self._exchange(request)
        stream.abort()
        return response

    async def _exchange(self, request: Any) -> tuple[Any, HivemindStream]:
        """Send p2pd a request over a connection of its own; return its answer and the connection."""
        stream = await HivemindStream.connect(self._socket_path)
        response = p2pd_pb2.Response()
        try:
            await write_message(stream, request)
            await read_message(stream, response)
            if response.type == p2pd_pb2.Response.ERROR:
                raise PeerUnreachable(str(response.error.msg))
        except BaseException as e:
            # Cancellation included: nobody else knows this connection.
            stream.abort()
            if isinstance(e, (anyio.EndOfStream, anyio.BrokenResourceError)):
                raise ConnectionResetError("the libp2p helper closed its connection") from e
            raise
        return response, stream

    def seen_at(self, peer: PeerId) -> str | None:
        """Return the address that a peer's newest stream came from."""
        encoded = self._seen.get(peer)
        try:
            return None if not encoded else str(multiaddr.Multiaddr(encoded))
        except ValueError:
            return None

    def _note_address(self, peer: PeerId, encoded: bytes) -> None:
        self._seen.pop(peer, None)
        self._seen[peer] = encoded
        if len(self._seen) > _MAX_SEEN:
            del self._seen[next(iter(self._seen))]

    async def _accept(self, server: socket.socket) -> None:
        """Take what p2pd hands us, for ever."""
        with server:
            while True:
                await asyncio.sleep(0)  # Others get their turn in a burst.
                try:
                    connection, _ = await asyncio.get_running_loop().sock_accept(server)
                except OSError as e:
                    logger.warning("an incoming stream cannot be taken (%s); it waits", e)
                    await asyncio.sleep(_ACCEPT_PAUSE_S)
                    continue
                self._tasks.start_soon(self._run_handler, HivemindStream(connection))

    async def _run_handler(self, stream: HivemindStream) -> None:
        try:
            if (asked := await self._asked_for(stream)) is not None:
                handler, peer = asked
                await handler(stream, peer)
        finally:
            stream.abort()

    async def _asked_for(
        self, stream: HivemindStream
    ) -> tuple[Callable[[HivemindStream, PeerId], Awaitable[None]], PeerId] | None:
        """Read from p2pd whose stream it is and what for; None if that does not come."""
        info = p2pd_pb2.StreamInfo()
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                await read_message(stream, info)
            handler, peer = self._handlers[info.proto], PeerId(PeerID(info.peer).to_base58())
        except (anyio.EndOfStream, anyio.BrokenResourceError, OSError, ValueError, KeyError) as e:
            logger.debug("an incoming stream was lost before it began: %r", e)
            return None
        self._note_address(peer, bytes(info.addr))
        return handler, peer

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Read what p2pd prints until it ends."""
        assert process.stdout is not None
        while True:
            try:
                line = await process.stdout.readline()
            except ValueError:
                continue  # A line longer than the buffer; asyncio has dropped it.
            if not line:
                break
            text = line.decode("utf-8", "replace").strip()
            if text.startswith("Peer ID:"):
                self._ready.set()
            elif text:
                self._last_words = _readable(text)
                logger.debug("p2pd: %s", self._last_words)
        await process.wait()
        self._alive = False
        if not self._stopping:
            self.died.set()
        self._ready.set()


@asynccontextmanager
async def private_folder(identity: Identity) -> AsyncGenerator[Path]:
    """Yield a folder that only we can open, with the key in p2pd's form; remove it and what dead processes left."""
    parent = Path(tempfile.gettempdir())
    if len(str(parent)) > 60:
        parent = Path("/tmp")  # A Unix socket's path has 107 characters at most.
    _sweep(parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{os.getpid()}-", dir=parent))
    try:
        descriptor = os.open(folder / "key", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            # Protobuf {1: Ed25519, 2: seed and public key}, as libp2p keeps private keys.
            file.write(b"\x08\x01\x12\x40" + identity.seed + identity.public_key)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: Path) -> None:
    """Remove the folders of owners that were killed."""
    for folder in parent.glob(f"{_FOLDER_PREFIX}*"):
        pid = folder.name.removeprefix(_FOLDER_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdigit() and not psutil.pid_exists(int(pid)) and folder.stat().st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)


def helper_path() -> Path:
    """Return where hivemind keeps p2pd."""
    import hivemind.hivemind_cli as folder

    return Path(next(iter(folder.__path__))) / "p2pd"


def _readable(line: str) -> str:
    """Return the message of a line that p2pd logged."""
    with contextlib.suppress(json.JSONDecodeError, AttributeError):
        record = json.loads(line)
        line = f"{record.get('msg', '')} {record.get('error', '')}".strip()
    return line[:300]


def _advice(reason: str) -> str:
    lowered = reason.lower()
    if "exec format" in lowered or "cannot execute" in lowered:
        return " (the helper that came with hivemind is for another platform; install hivemind's wheel for this one)"
    if "no such file" in lowered or "not found" in lowered:
        return " (hivemind's wheel for this platform has no helper; reinstall echo-swarm[hivemind])"
    return ""
