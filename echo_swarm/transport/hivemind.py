"""The default host: hivemind's libp2p helper p2pd, driven from our own asyncio loop.

    open_hivemind_host ──► Daemon (p2pd, its sockets, its death)
                      └──► HivemindHost: the transport seam
                      └──► dial_patiently: the bootstrap addresses, after p2pd runs

p2pd starts without bootstrap addresses and we dial them ourselves: so a dead bootstrap cannot keep it from starting,
and the two failures have different errors. hivemind is imported when a host is opened (1 to 5 s), never before.
"""

import asyncio
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import anyio
from anyio.abc import ByteStream, TaskGroup

from echo_swarm.errors import AnotherPeer, DaemonFailed, HeldBack, LocalFault, PeerUnreachable, UsageError
from echo_swarm.extras import install_command
from echo_swarm.identity import Identity, PeerId, public_key_of
from echo_swarm.transport.base import Handler
from echo_swarm.transport.bootstrap import OnRetry, OnStranger, dial_patiently, no_stranger
from echo_swarm.transport.tasks import background_tasks

if TYPE_CHECKING:
    from echo_swarm.transport.daemon import Daemon

logger = logging.getLogger(__name__)

LISTEN_EVERYWHERE = ("/ip4/0.0.0.0/tcp/0",)
_REFRESH_S = 60.0
"""How often own addresses are asked for; others tell p2pd how they see it."""
_MAX_REMEMBERED = 1024


class HivemindHost:
    """A running host. Obtained from `open_hivemind_host`. Lives on asyncio."""

    def __init__(self, daemon: "Daemon", peer: PeerId, *, dialable: bool) -> None:
        self.daemon = daemon
        """For `directory.dht`, which shares the helper process."""
        self._peer = peer
        self._dialable = dialable
        self._addresses: tuple[str, ...] = ()
        self._remembered: dict[PeerId, str] = {}
        self._strangers: dict[str, str] = {}
        """Address → who else answered there when it was dialled last."""

    @property
    def peer_id(self) -> PeerId:
        """Own peer id."""
        return self._peer

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others may dial us, as known a minute ago or less; empty for outbound only."""
        return self._addresses

    async def serve(self, protocol: str, handler: Handler) -> None:
        """Answer streams of `protocol` with `handler` from now on."""

        async def guarded(stream: ByteStream, peer: PeerId) -> None:
            try:
                await handler(stream, peer)
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                logger.debug("stream of %s was lost", peer)
            except Exception:
                # The seam's promise: one handler's bug ends one stream and nothing else.
                logger.exception("handler of %s failed for %s", protocol, peer)

        try:
            await self.daemon.handle_streams(protocol, guarded)
        except OSError as e:
            raise DaemonFailed("the libp2p helper is gone") from e

    async def open_stream(self, peer: PeerId, protocol: str, *, timeout_s: float) -> ByteStream:
        """Open a stream to a peer; see the seam.

        p2pd forgets the addresses of a peer that was away for a quarter of an hour; those that we dialled by hand are
        tried again then.
        """
        try:
            with anyio.fail_after(timeout_s):
                try:
                    return await self._open(peer, protocol, timeout_s)
                except _NoAddress:
                    address = self._remembered.get(peer)
                    if address is None:
                        raise
                await self.connect(address, timeout_s=timeout_s)
                return await self._open(peer, protocol, timeout_s)
        except TimeoutError as e:
            raise PeerUnreachable(f"{peer}: no stream within {timeout_s:g} s") from e

    def dialled(self, peer: PeerId) -> str | None:
        """Return the address at which `connect` last reached a peer."""
        return self._remembered.get(peer)

    def seen_at(self, peer: PeerId) -> str | None:
        """Return the multiaddress that a peer's newest stream to us came from; see the seam."""
        return self.daemon.seen_at(peer)

    async def connect(self, address: str, *, timeout_s: float) -> PeerId:
        """Dial a multiaddress that ends in /p2p/<peer id>; see the seam."""
        where, _, name = address.rpartition("/p2p/")
        try:
            public_key_of(name)
            with anyio.fail_after(timeout_s):
                await self.daemon.connect(PeerId(name), where, timeout_s)
        except TimeoutError as e:
            raise PeerUnreachable(f"{address}: no answer within {timeout_s:g} s") from e
        except PeerUnreachable as e:
            error = unreachable(address, str(e))
            if (stranger := self._stranger(address, str(e), held_back=isinstance(error, HeldBack))) is not None:
                raise AnotherPeer(address, stranger) from e
            raise error from e
        except OSError as e:
            raise PeerUnreachable(f"{address}: the libp2p helper is gone") from e
        except (UsageError, ValueError) as e:
            raise PeerUnreachable(f"{address[:200]}: not a multiaddress that ends in /p2p/<peer id>") from e
        if len(self._remembered) < _MAX_REMEMBERED or name in self._remembered:
            self._remembered[PeerId(name)] = address
        return PeerId(name)

    def _stranger(self, address: str, reason: str, *, held_back: bool) -> str | None:
        """Return who else answers at an address; p2pd tells it once, and then holds back for a while."""
        if (told := _MISMATCH.search(reason)) is not None and len(self._strangers) < _MAX_REMEMBERED:
            self._strangers[address] = told[1]
        elif not held_back:
            self._strangers.pop(address, None)
        return self._strangers.get(address)

    async def refresh_addresses(self) -> None:
        """Ask p2pd anew where others may dial us."""
        if self._dialable:
            found = await self.daemon.listen_addresses()
            self._addresses = tuple(f"{address}/p2p/{self._peer}" for address in found)

    async def keep_addresses_fresh(self) -> None:
        """Refresh now and then, until cancelled or p2pd is gone."""
        while True:
            await anyio.sleep(_REFRESH_S)
            try:
                await self.refresh_addresses()
            except OSError:
                return

    async def _open(self, peer: PeerId, protocol: str, timeout_s: float) -> ByteStream:
        try:
            return await self.daemon.open_stream(peer, protocol, timeout_s)
        except PeerUnreachable as e:
            raise unreachable(peer, str(e)) from e
        except OSError as e:
            raise PeerUnreachable(f"{peer}: the libp2p helper is gone") from e
        except ValueError as e:
            raise PeerUnreachable(f"{peer[:64]}: not a peer id") from e


@asynccontextmanager
async def open_hivemind_host(
    identity: Identity,
    *,
    listen: Sequence[str] = LISTEN_EVERYWHERE,
    announce: Sequence[str] = (),
    bootstrap: Sequence[str] = (),
    many_peers: bool = False,
    start_timeout_s: float = 30.0,
    dial_timeout_s: float = 10.0,
    patience_s: float = 0.0,
    on_retry: OnRetry | None = None,
    on_stranger: OnStranger = no_stranger,
    helper: Path | None = None,
) -> AsyncGenerator[HivemindHost]:
    """Run a host for the length of the block. If its helper process dies, the block is cancelled.

    Args:
        identity: whose peer id it has.
        listen: multiaddresses to listen on; none for outbound only.
        announce: where others can dial us, if p2pd cannot see that itself (a forwarded port); with explicit ports.
        bootstrap: addresses to dial once it runs; one that answers is enough.
        many_peers: for the coordinator. Else p2pd cuts connections beyond 512, busy ones included.
        start_timeout_s: for the helper process to start.
        dial_timeout_s: for a bootstrap address to answer, the first time.
        patience_s: how long to try again when none did.
        on_retry: told why none answered, and the seconds until the next try.
        on_stranger: see `bootstrap.OnStranger`.
        helper: another p2pd than hivemind's own.

    Raises:
        LocalFault: hivemind is not installed.
        UsageError: the event loop is not asyncio's.
        DaemonFailed: the helper did not start, or died and the block was cancelled.
        BootstrapFailed: it runs, but no bootstrap address answered.

    """
    module = _load_daemon_module()
    async with module.private_folder(identity) as folder, background_tasks() as tasks:
        daemon: Daemon = module.Daemon(tasks, folder)
        with anyio.CancelScope() as scope:
            try:
                program = helper or module.helper_path()
                await daemon.start(_command(program, folder, listen, announce, many_peers), start_timeout_s)
                tasks.start_soon(_cancel_on_death, daemon, scope)
                host = await _begun(daemon, identity, tasks, dialable=bool(listen))
                if bootstrap:
                    dial = partial(dial_patiently, host, bootstrap, on_retry=on_retry, on_stranger=on_stranger)
                    await dial(attempt_s=dial_timeout_s, patience_s=patience_s)
                yield host
            except PeerUnreachable as e:
                if daemon.died.is_set():
                    raise _death_of(daemon) from e
                raise
            finally:
                with anyio.CancelScope(shield=True):
                    await daemon.stop()
        if daemon.died.is_set():
            raise _death_of(daemon)


async def _begun(daemon: "Daemon", identity: Identity, tasks: TaskGroup, *, dialable: bool) -> HivemindHost:
    host = HivemindHost(daemon, identity.peer_id, dialable=dialable)
    await host.refresh_addresses()
    tasks.start_soon(host.keep_addresses_fresh)
    return host


async def _cancel_on_death(daemon: "Daemon", scope: anyio.CancelScope) -> None:
    await daemon.died.wait()
    scope.cancel()


def _death_of(daemon: "Daemon") -> DaemonFailed:
    return DaemonFailed(f"the libp2p helper died while in use (it said: {daemon.last_words}); start again")


def _load_daemon_module() -> ModuleType:
    if anyio.get_cancelled_exc_class() is not asyncio.CancelledError:
        raise UsageError("the hivemind host runs on asyncio only")
    try:
        with warnings.catch_warnings():
            # What hivemind's dependencies think of each other is no concern of our users.
            warnings.simplefilter("ignore")
            from echo_swarm.transport import daemon
    except ImportError as e:
        raise LocalFault(f"hivemind cannot be imported ({e}); run: {install_command('hivemind')}") from e
    return daemon


def _command(
    program: Path, folder: Path, listen: Sequence[str], announce: Sequence[str], many_peers: bool
) -> list[str]:
    """Return p2pd's command line. No relay, no hole punching, no port mapping: nothing that dials on its own."""
    if not program.is_file() or not os.access(program, os.X_OK):
        raise DaemonFailed(
            f"no libp2p helper for this platform ({sys.platform}): {program} is missing or not executable; "
            "install hivemind's wheel for this platform"
        )
    setpriv = shutil.which("setpriv") if sys.platform == "linux" else None
    command = [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []
    command += [
        str(program),
        f"-id={folder / 'key'}",
        "-idleTimeout=30s",
        "-connManager=1",
        "-autonat=0",
        "-natPortMap=0",
        "-relay=0",
        "-autoRelay=0",
        "-tls=1",
        "-persistentConnMaxMsgSize=4194304",
    ]
    if listen:
        command += ["-dhtServer=1", f"-hostAddrs={','.join(listen)}"]
    else:
        command += ["-dhtClient=1", "-noListenAddrs=1", "-forceReachabilityPrivate=1"]
    if announce:
        command.append(f"-announceAddrs={','.join(announce)}")
    if many_peers:
        command += ["-connHi=100000", "-connLo=90000"]
    return command


_MISMATCH = re.compile(r"peer id mismatch: .*remote key matches (12D3KooW[1-9A-HJ-NP-Za-km-z]{44})")


class _NoAddress(PeerUnreachable):
    """p2pd knows no address of the peer."""


_Reason = tuple[str, type[PeerUnreachable]]
_NO_ADDRESS: _Reason = ("no address known", _NoAddress)
_NO_PROTOCOL: _Reason = ("protocol not supported", PeerUnreachable)
_TIMED_OUT: _Reason = ("timed out", PeerUnreachable)
_REASONS: dict[str, _Reason] = {
    "connection refused": ("connection refused", PeerUnreachable),
    "peer id mismatch": ("another identity answers there", PeerUnreachable),
    "protocols not supported": _NO_PROTOCOL,
    "failed to negotiate": _NO_PROTOCOL,
    "dial backoff": ("tried a moment ago, and nobody answered", HeldBack),
    "dial to self": ("that is our own address", PeerUnreachable),
    "not found": _NO_ADDRESS,
    "failed to find any peer": _NO_ADDRESS,
    "no addresses": _NO_ADDRESS,
    "length greater than remaining": ("not a peer id", PeerUnreachable),
    "no route to host": ("no route to host", PeerUnreachable),
    "network is unreachable": ("network is unreachable", PeerUnreachable),
    "deadline exceeded": _TIMED_OUT,
    "i/o timeout": _TIMED_OUT,
}
"""What p2pd's error texts hold, the first that fits: the cause in a few words, and the error for it."""


def unreachable(whom: str, text: str) -> PeerUnreachable:
    """Return the error for p2pd's error text about a peer or an address."""
    lowered = text.lower()
    known = next((reason for marker, reason in _REASONS.items() if marker in lowered), None)
    words, kind = known or (text.strip()[:160], PeerUnreachable)
    return kind(f"{whom}: {words}")
