"""Before a coordinator begins: is another one live with this run's key, on this machine or elsewhere?

    RUN/epoch.json: addresses of the last start ─┐
                                                 ├─► TCP answers? ─► handshake with the run's key? ─► hello ─► its epoch
    directory: records signed by the run's key ──┘

    the folder was copied, and it cannot be dialled from here ──► are its records renewed while we look?

Asked under a passing identity: a host cannot dial its own peer id. Not found is one that is not reachable from here,
and announced nothing where we look; that one is met later (`epochs.Fence`).
"""

import logging
import os
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

import anyio

from echo_coordinator.commands.network import answers
from echo_coordinator.epochs import Noted, note, place_of, read_noted
from echo_coordinator.loops.publishing import ANNOUNCE_EVERY_S
from echo_coordinator.run_folder import RunFolder
from echo_swarm import __version__
from echo_swarm.clock import Clock
from echo_swarm.directory.base import Directory, head_topic, peers_topic
from echo_swarm.directory.reading import epochs_in, newest_head, newest_peers
from echo_swarm.epoch import HighestEpoch
from echo_swarm.errors import PeerFault, PeerUnreachable, RemoteError, TakenOver
from echo_swarm.identity import Identity
from echo_swarm.manifest import MANIFEST_LIMITS
from echo_swarm.transport.base import Host
from echo_swarm.transport.rpc import RpcClient, call_message
from echo_swarm.work import WORK_PROTOCOL, Hello, Release, Released, Role, Welcome

log = logging.getLogger(__name__)

MAX_ADDRESSES = 16
CONNECT_S = 5.0
HELLO_S = 10.0
LIFE_S = ANNOUNCE_EVERY_S + 15.0
"""A live coordinator renews its records within this."""
LOOK_EVERY_S = 3.0
CLOCKS_S = 30.0
"""How far a live coordinator's clock may be behind. The directory takes records of no clock that is seconds off."""
MAX_REPLY_BYTES = 2 * MANIFEST_LIMITS.max_bytes + (1 << 20)

OpenHost = Callable[[], AbstractAsyncContextManager[Host]]
"""Opens a host under a passing identity, which only dials."""
IsAnswered = Callable[[str], Awaitable[bool]]
"""Whether anybody answers at an address, so that no host need be opened in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """A live coordinator with this run's key."""

    address: str
    epoch: bytes | None
    """Envelope; None when it did not say."""


def passing_host() -> AbstractAsyncContextManager[Host]:
    """Open a hivemind host under an identity of its own."""
    from echo_swarm.transport.hivemind import open_hivemind_host

    return open_hivemind_host(Identity.generate(), listen=())


async def tcp_answers(address: str) -> bool:
    """Return whether something listens at a TCP multiaddress; True for other kinds, which only a host can dial."""
    found = re.match(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d+)", address)
    return found is None or await answers(found[1], int(found[2]))


class Look:
    """The search for another coordinator of a run.

    Args:
        folder: held by its lock.
        run_id: the run.
        identity: the run's key.
        clock: for the hello.
        open_host: see OpenHost.
        is_answered: see IsAnswered.
        say: told what is waited for.

    """

    def __init__(
        self,
        folder: RunFolder,
        run_id: str,
        identity: Identity,
        clock: Clock,
        *,
        open_host: OpenHost = passing_host,
        is_answered: IsAnswered = tcp_answers,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self._folder = folder
        self._run_id = run_id
        self._identity = identity
        self._clock = clock
        self._open_host = open_host
        self._is_answered = is_answered
        self._say = say

    async def before_start(self, host: Host, directory: Directory, *, take_over: bool) -> Other | None:
        """Look around. What is found out about epochs is noted in the folder, for `take_epoch`.

        Args:
            host: our own, for what is not to be dialled.
            directory: where records of others may be.
            take_over: begin whatever is found.

        Returns:
            The live one that is to be replaced, if there is one.

        Raises:
            TakenOver: there is one, and `take_over` is not given.

        """
        noted = read_noted(self._folder)
        found = await self._find(directory)
        own_record = newest_peers(found, run_id=self._run_id).get(self._identity.peer_id)
        addresses = dict.fromkeys([*(own_record.addresses if own_record else ()), *noted.addresses])
        others = [address for address in addresses if address not in host.addresses]
        other = await self._find_live(others[:MAX_ADDRESSES])
        told = epochs_in(found, run_id=self._run_id, run_key=self._identity.public_key)
        self._note(noted, [*told, *([other.epoch] if other is not None and other.epoch is not None else [])])
        if other is not None and not take_over:
            raise TakenOver(
                f"another coordinator with this run's key is live at {other.address}; end that one first, or start "
                "this one with --take-over to replace it: what that one publishes and takes in from then on is lost"
            )
        if other is None and not take_over and noted.place not in ("", place_of(self._folder)):
            await self._watch_for_life(directory, self._issued_at(found))
        return other

    async def _find(self, directory: Directory) -> list[bytes]:
        return [e for topic in (head_topic, peers_topic) for e in await directory.find(topic(self._run_id))]

    async def _watch_for_life(self, directory: Directory, issued_at: float | None) -> None:
        """Raise TakenOver when newer records under the run's key turn up, as a live coordinator renews them.

        They must have been signed since this began: somebody who shows two old ones in turn makes nobody live.
        """
        if issued_at is None:
            return
        began_at = self._clock.wall_s() - CLOCKS_S
        self._say(
            "this folder was copied, and the coordinator that it was copied from was here lately; watching for "
            f"{LIFE_S:.0f} s whether it still announces itself (--take-over begins at once)"
        )
        with anyio.move_on_after(LIFE_S):
            while True:
                newest = self._issued_at(await self._find(directory))
                if newest is None:
                    return  # They have run out.
                if newest > max(issued_at, began_at):
                    break
                await anyio.sleep(LOOK_EVERY_S)
            raise TakenOver(
                "another coordinator with this run's key is live: it cannot be dialled from here, but announces itself "
                "in the directory; end that one first, or start this one with --take-over to replace it: what that one "
                "publishes and takes in from then on is lost"
            )

    def _issued_at(self, envelopes: Sequence[bytes]) -> float | None:
        """Return when the newest record under the run's key was signed, by its signer's clock."""
        key, run_id = self._identity.public_key, self._run_id
        head = newest_head(envelopes, run_id=run_id, run_key=key)
        own = newest_peers(envelopes, run_id=run_id).get(self._identity.peer_id)
        return max((record.issued_at for record in (head, own) if record is not None), default=None)

    async def tell(self, other: Other, epoch: bytes) -> None:
        """Tell a live one that it has been replaced, so that it ends now rather than when it meets that elsewhere."""
        await self._ask(other.address, epoch)

    def _note(self, noted: Noted, epochs: Sequence[bytes]) -> None:
        persisted = [raw for raw in (noted.own, noted.other) if raw is not None]
        highest = HighestEpoch(run_id=self._run_id, run_key=self._identity.public_key, persisted=persisted)
        before = highest.rank
        for raw in epochs:
            try:
                highest.hear(raw)
            except PeerFault:
                continue  # Whoever announced it does not count.
        if highest.rank > before and highest.signed is not None:
            note(self._folder, replace(noted, other=highest.signed.raw))

    async def _find_live(self, addresses: Sequence[str]) -> Other | None:
        answered: list[str] = []

        async def try_one(address: str) -> None:
            if await self._is_answered(address):
                answered.append(address)

        async with anyio.create_task_group() as tasks:
            for address in addresses:
                tasks.start_soon(try_one, address)
        for address in answered:
            other = await self._ask(address, None)
            if other is not None:
                return other
        return None

    async def _ask(self, address: str, epoch: bytes | None) -> Other | None:
        """Say hello to the run's key at an address; None unless it answers there, for this run."""
        hello = Hello(
            run_id=self._run_id,
            software=f"echo-coordinator {__version__}",
            role=Role.COORDINATOR,
            instance=os.urandom(16),
            wall_s=self._clock.wall_s(),
            backend=None,
            addresses=(),
            epoch=epoch,
        )
        leave = Release(lease_ids=(), cause="only looked", leaving=True, failed=False)
        try:
            async with self._open_host() as host:
                if await host.connect(address, timeout_s=CONNECT_S) != self._identity.peer_id:
                    return None
                async with RpcClient(
                    host, self._identity.peer_id, WORK_PROTOCOL, max_reply_bytes=MAX_REPLY_BYTES
                ) as client:
                    welcome = await call_message(client, "hello", hello, Welcome, timeout_s=HELLO_S)
                    await call_message(client, "release", leave, Released, timeout_s=HELLO_S)
                    return Other(address=address, epoch=welcome.epoch)
        except RemoteError:
            return Other(address=address, epoch=None)  # It is live, and has no place for us.
        except (PeerUnreachable, PeerFault):
            return None
