"""The node's one connection to its coordinator: dial, say hello, notice the loss, dial again.

    run:  ──dial──► hello ──Welcome checked──► up ──a call fails──► down ──back-off──► dial …
                                               │
    worker · pusher · heartbeat ──call─────────┘      (they wait in `ready` while the link is down)

Whoever calls and gets no answer takes the link down; the heartbeat makes sure that somebody does. Only five things
end the node from here: the run is not there, the key is live elsewhere or banned, the run takes no work of its backend
(see `refusals`), or the coordinator never answered.
Anything else that it says instead of a Welcome (it is full, its disk is) is told, and a later hello tries again.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import anyio

from echo_node.activity import Activity, Part
from echo_node.backoff import Backoff
from echo_node.following import Following
from echo_node.peers import Peers
from echo_node.refusals import refusal
from echo_node.skew import Skew
from echo_node.waits import without_name
from echo_swarm.checkpoint.trust import check_run_manifest
from echo_swarm.clock import Clock
from echo_swarm.epoch import NO_EPOCH, HighestEpoch, rank_of
from echo_swarm.errors import (
    HeldBack,
    MalformedMessage,
    PeerUnreachable,
    RemoteError,
    StorageFull,
)
from echo_swarm.identity import PeerId
from echo_swarm.invite import Invite
from echo_swarm.manifest import MANIFEST_LIMITS, RunManifest
from echo_swarm.transport.base import Host
from echo_swarm.transport.rpc import RpcClient, call_message
from echo_swarm.wire import Message
from echo_swarm.work import BACKEND_REFUSED, BANNED, WORK_PROTOCOL, Hello, Welcome

R = TypeVar("R", bound=Message)

CALL_TIMEOUT_S = 20.0
HELLO_TIMEOUT_S = 60.0
"""A process that takes over from an earlier one of the same key is kept waiting for a beat or two."""
MAX_REPLY_BYTES = 2 * MANIFEST_LIMITS.max_bytes + (1 << 20)
"""A Welcome carries two manifests; no other reply comes near."""

STABLE_S = 10.0
"""A connection that held for this long was a good one: the next loss starts with the shortest wait again."""

HELLO_FIRST_CODE = "hello_first"
"""The coordinator was restarted, or counted us as gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What a hello brought."""

    run: RunManifest
    run_envelope: bytes
    head_manifest: bytes | None
    """Envelope, not yet trusted."""
    epoch: bytes | None = None
    """The coordinator's, checked; None from one that knows of none."""
    beat_s: float
    skew_s: float
    """Our clock minus the coordinator's."""


class Link:
    """The connection. One task runs `run`; any task calls."""

    def __init__(
        self,
        *,
        host: Host,
        peers: Peers,
        invite: Invite,
        clock: Clock,
        activity: Activity,
        hello: Callable[[], Hello],
        on_join: Callable[[Joined], Awaitable[None]],
        patience_s: float,
        epochs: HighestEpoch,
        following: Following | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        self._host = host
        self._peers = peers
        self._invite = invite
        self._clock = clock
        self._activity = activity
        self._hello = hello
        self._on_join = on_join
        self._patience_s = patience_s
        self._epochs = epochs
        self._keys = epochs.keys
        self._following = following
        self._coordinator = self._keys.coordinator
        """Whom the session is with."""
        self._rank = NO_EPOCH
        self._backoff = backoff or Backoff(first_s=0.5, limit_s=15.0)
        self._client: RpcClient | None = None
        self._changed = anyio.Event()
        self._loss = self._why_not = ""
        self._skew = Skew()
        self._bytes_before = (0, 0)
        self.joins = 0
        """How often a hello was answered."""
        self.refused = ""
        """Set when the owner of the run wants nothing of this node."""

    @property
    def is_up(self) -> bool:
        """Whether calls can be made now."""
        return self._client is not None

    @property
    def bytes_in(self) -> int:
        """Received from the coordinator over this protocol."""
        return self._bytes_before[0] + (self._client.bytes_in if self._client else 0)

    @property
    def bytes_out(self) -> int:
        """Sent to the coordinator over this protocol."""
        return self._bytes_before[1] + (self._client.bytes_out if self._client else 0)

    def check_epoch(self) -> None:
        """Leave a coordinator of which it is known by now that another one has taken over."""
        if self._client is not None and self._rank < self._epochs.rank:
            self._take_down(self._client, self._outdated())

    def woken(self, what: str) -> None:
        """Say hello anew at once, for the connection may be dead without our knowing: see `slumber`."""
        self._activity.say(f"{what}; connecting to the coordinator anew")
        self._backoff.reset()
        if self._client is not None:
            self._take_down(self._client, what)

    def check_key(self) -> None:
        """Leave a coordinator whose key was succeeded."""
        if self._client is not None and self._coordinator != self._keys.coordinator:
            self._take_down(self._client, f"the run's key was replaced; looking for {self._keys.coordinator}")

    async def ready(self) -> None:
        """Wait until the link is up. The caller's wait is told by the link itself."""
        while self._client is None:
            await self._changed.wait()

    async def call(self, method: str, message: Message, reply: type[R], *, timeout_s: float = CALL_TIMEOUT_S) -> R:
        """Call the coordinator.

        Raises:
            PeerUnreachable: the link is down, or went down because of this call.
            RemoteError: the coordinator answered with an error.
            MalformedMessage: the reply is none.

        """
        client = self._client
        if client is None:
            raise PeerUnreachable("not connected to the coordinator")
        if not client.connected:
            # The client would open a new stream by itself, perhaps to a coordinator that was restarted: hello first.
            self._take_down(client, "the stream to the coordinator was lost")
            raise PeerUnreachable("lost the stream to the coordinator")
        try:
            return await call_message(client, method, message, reply, timeout_s=timeout_s)
        except PeerUnreachable as e:
            self._take_down(client, str(e))
            raise
        except RemoteError as e:
            if e.code in (HELLO_FIRST_CODE, BANNED):  # The next hello says whether that is final.
                self._take_down(client, str(e))
                raise PeerUnreachable(f"the coordinator wants a new hello ({e})") from e
            raise

    async def run(self) -> None:
        """Keep the link up for ever.

        Raises:
            RunNotFound: the coordinator does not serve this run.
            IdentityInUse: another process with this key is live.
            Banned: the run's owner wants no work from this key.
            UsageError: the run takes no work of this node's backend.
            PeerUnreachable: no first answer within `patience_s`.
            MalformedMessage: the first answer cannot be read; later ones are tried again.
            BadSignature, Untrusted: what it says about the run does not fit the invite.
            StorageFull: no room for what the first answer brought.

        """
        started_s = self._clock.monotonic_s()
        while True:
            try:
                await self._session()
            except PeerUnreachable as e:
                waited_s = self._clock.monotonic_s() - started_s
                if not self.joins and waited_s >= self._patience_s:
                    raise PeerUnreachable(
                        f"the coordinator did not answer within {waited_s:.0f} s ({e}); "
                        "check that the run is started and the invite is current"
                    ) from e
                self._activity.waits(Part.LINK, "the coordinator", self._why(e))
            except RemoteError as e:
                self._activity.waits(Part.LINK, "the coordinator to take this node in", str(e))
            except (MalformedMessage, StorageFull) as e:
                if not self.joins:
                    raise
                self._activity.waits(Part.LINK, "a hello to the coordinator to go well", str(e))
            await anyio.sleep(self._backoff.next_s())
            await self._dial()

    async def _session(self) -> None:
        """One connection from hello to loss. Raises PeerUnreachable at its end, and what `run` says."""
        coordinator = self._coordinator = self._keys.coordinator
        if self._following is not None:
            await self._following.ask(coordinator)
        if self._keys.coordinator != coordinator:
            raise PeerUnreachable(f"the run's key was replaced; looking for {self._keys.coordinator}")
        async with RpcClient(self._host, coordinator, WORK_PROTOCOL, max_reply_bytes=MAX_REPLY_BYTES) as client:
            joined = await self._say_hello(client)
            self._rank = rank_of(joined.epoch, run_id=self._invite.run, run_key=self._keys.key)
            if self._rank < self._epochs.rank:
                raise PeerUnreachable(self._outdated())
            await self._on_join(joined)
            if self._keys.coordinator != coordinator:
                raise PeerUnreachable(f"the run's key was replaced; looking for {self._keys.coordinator}")
            self.joins += 1
            self._client = client
            self._signal()
            up_since_s = self._clock.monotonic_s()
            self._activity.done(Part.LINK, "connected to the coordinator again")
            while self._client is client:
                await self._changed.wait()
            if self._clock.monotonic_s() - up_since_s >= STABLE_S:
                self._backoff.reset()
        raise PeerUnreachable(self._loss)

    async def _say_hello(self, client: RpcClient) -> Joined:
        known = self._epochs.signed
        hello = self._hello().model_copy(update={"epoch": None if known is None else known.raw})
        sent_s = self._clock.wall_s()
        try:
            welcome = await call_message(client, "hello", hello, Welcome, timeout_s=HELLO_TIMEOUT_S)
        except RemoteError as e:
            self.refused = {BANNED: "banned", BACKEND_REFUSED: "its backend is not taken"}.get(e.code, "")
            raise refusal(e, self._invite.run) from e
        signed = check_run_manifest(
            welcome.run_manifest, run_id=self._invite.run, publisher_key=self._invite.key, keys=self._keys
        )
        heard_s = self._clock.wall_s()
        skew_s = (sent_s + heard_s) / 2 - welcome.wall_s
        if line := self._skew.news(skew_s, doubt_s=abs(heard_s - sent_s) / 2):
            self._activity.say(line)
        return Joined(
            run=signed.message,
            run_envelope=signed.raw,
            head_manifest=welcome.head_manifest,
            epoch=welcome.epoch,
            beat_s=welcome.beat_s,
            skew_s=skew_s,
        )

    def _outdated(self) -> str:
        """Return why a coordinator is left."""
        known = self._epochs.signed
        assert known is not None
        return (
            f"the one that answers was replaced: its epoch is {self._rank[0]}, and one of epoch {known.message.number} "
            "is known; looking for that one"
        )

    async def _dial(self) -> None:
        """Try the coordinator's addresses: those of the invite, then what the directory has, then ask others."""
        boot = [self._keys.address(address) for address in self._invite.boot]
        if await self._dial_any([a for a in boot if a.endswith(f"/p2p/{self._keys.coordinator}")]):
            return
        if await self._dial_any(await self._peers.coordinator_addresses()):
            return
        if self._following is not None and await self._following.look(lost=True):
            await self._dial_any(await self._peers.coordinator_addresses())

    async def _dial_any(self, addresses: Sequence[str]) -> bool:
        for address in addresses:
            try:
                if await self._connect(address) == self._keys.coordinator:
                    return True
            except PeerUnreachable as e:
                if not isinstance(e, HeldBack):
                    self._why_not = str(e)
        return False

    def _why(self, error: PeerUnreachable) -> str:
        """Return why it does not answer, without its long name, and from when it was last tried."""
        text = self._why_not if isinstance(error, HeldBack) and self._why_not else str(error)
        return without_name(text, self._keys.coordinator)

    async def _connect(self, address: str) -> PeerId:
        if self._following is not None:
            return await self._following.at(address)
        return await self._host.connect(address, timeout_s=5)

    def _take_down(self, client: RpcClient, reason: str) -> None:
        if self._client is client:
            self._bytes_before = (self.bytes_in, self.bytes_out)
            self._client = None
            self._loss = reason
            self._signal()

    def _signal(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
