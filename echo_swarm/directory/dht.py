# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
"""The directory in hivemind's DHT, which shares the host's helper process and our own asyncio loop.

    announce ──► sign (validator) ──► the peers nearest to the topic, and our own storage unless a client
    find     ──► the nearest peers ──► validator ──► envelope, owner and expiry checked here again
    attach loop: keeps the bootstrap peers in the routing table, which forgets a peer for good after one failure

Records are bounded in size, lifetime and number by `validator`. hivemind's caches are off: a stale head is worse than
a slow one.
"""

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

from echo_swarm.directory.rules import check_own, clamp_ttl, read_record
from echo_swarm.errors import PeerFault, PeerUnreachable
from echo_swarm.identity import Identity, PeerId
from echo_swarm.transport.hivemind import HivemindHost
from echo_swarm.transport.tasks import background_tasks

if TYPE_CHECKING:
    from hivemind.dht.node import DHTNode

logger = logging.getLogger(__name__)

CALL_S = 3.0
"""For one peer to answer."""
DEADLINE_S = 12.0
"""For one announcement or search."""
ATTACH_EVERY_S = 5.0
"""How often bootstrap peers that are missing from the routing table are dialled again."""
MAX_BOOTSTRAP = 32
KNOWN_AT_ONCE = 8
"""Peers remembered from earlier that are tried in one go."""
_SMALLEST_STEP_S = 0.001
"""hivemind keeps the record with the later expiry, so that each of ours must expire after the one before it."""


class DhtDirectory:
    """Implements `directory.base.Directory`. Obtained from `open_dht_directory`."""

    def __init__(
        self,
        host: HivemindHost,
        identity: Identity,
        node: "DHTNode",
        bootstrap: Sequence[str],
        known: Sequence[str] = (),
    ) -> None:
        self._host = host
        self._identity = identity
        self._node: Any = node
        self._bootstrap = {PeerId(address.rpartition("/p2p/")[2]): address for address in bootstrap}
        self._bootstrap.pop(host.peer_id, None)
        self._known = [address for address in known if not address.endswith(f"/p2p/{host.peer_id}")]
        """Dialled while nobody is in the routing table, a few at a time."""
        self._introduced: set[PeerId] = set()
        """Bootstrap peers that were asked who is near us."""
        self._expires_at: dict[str, float] = {}

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Who is in the routing table now."""
        table: dict[Any, Any] = self._node.protocol.routing_table.uid_to_peer_id
        return tuple(PeerId(peer.to_base58()) for peer in table.values())

    async def announce(self, topic: str, envelope: bytes, *, ttl_s: float) -> bool:
        """Publish our own record; see the seam. Raises MalformedMessage."""
        check_own(self._identity, envelope)
        granted_s = clamp_ttl(ttl_s)
        if granted_s == 0:
            return False
        earliest = self._expires_at.get(topic, 0.0) + _SMALLEST_STEP_S
        expires_at = max(time.time() + granted_s, earliest)
        if await self._store(topic, envelope, expires_at):
            return True
        # A record that we announced before a restart may expire later than this one, and would win.
        held = (await self._search(topic)).get(self._identity.public_key)
        if held is None or held[1] <= expires_at:
            return False
        return await self._store(topic, envelope, held[1] + _SMALLEST_STEP_S)

    def meet(self, address: str) -> None:
        """Keep this peer in the routing table, too, in place of one that was to be at the same place."""
        where, _, peer = address.rpartition("/p2p/")
        if peer == self._host.peer_id:
            return
        gone = [p for p, known in self._bootstrap.items() if known.rpartition("/p2p/")[0] == where]
        if len(self._bootstrap) - len(gone) < MAX_BOOTSTRAP:
            self._bootstrap = {p: known for p, known in self._bootstrap.items() if p not in gone}
            self._bootstrap[PeerId(peer)] = address

    async def find(self, topic: str) -> list[bytes]:
        """Return the live records of a topic; see the seam."""
        now = time.time()
        found: list[bytes] = []
        for owner, (envelope, expires_at) in (await self._search(topic)).items():
            if expires_at <= now:
                continue
            try:
                signed = read_record(envelope)
            except PeerFault:
                continue  # Its owner stored something else under its own name.
            if signed.signer == owner:
                found.append(envelope)
        return found

    async def attach(self) -> bool:
        """Put the bootstrap peers that are missing into the routing table. Returns whether anybody is in it."""
        missing = [address for peer, address in self._bootstrap.items() if peer not in self.peers]
        if missing:
            self._node.blacklist.clear()
            async with anyio.create_task_group() as tasks:
                for address in missing:
                    tasks.start_soon(self._attach_to, address)
        if not self.peers and self._known:
            turn, self._known = self._known[:KNOWN_AT_ONCE], self._known[KNOWN_AT_ONCE:] + self._known[:KNOWN_AT_ONCE]
            self._node.blacklist.clear()
            async with anyio.create_task_group() as tasks:
                for address in turn:
                    tasks.start_soon(self._attach_to, address)
        return bool(self.peers)

    async def keep_attached(self) -> None:
        """Attach again whenever needed, until cancelled."""
        while True:
            await anyio.sleep(ATTACH_EVERY_S)
            await self.attach()

    async def _attach_to(self, address: str) -> None:
        from hivemind.p2p import PeerID

        try:
            peer = await self._host.connect(address, timeout_s=CALL_S)
        except PeerUnreachable as e:
            logger.debug("the directory's bootstrap %s", e)
            return
        with anyio.move_on_after(2 * CALL_S):
            # Not validated: hivemind would refuse peers whose clock differs by 3 s; skew is named elsewhere.
            others = self.peers
            if await self._node.protocol.call_ping(PeerID.from_base58(peer)) is None:
                return
            # One whose line is full drops out of the table again and again: whoever is near us is known by then.
            if peer not in self._introduced or not others:
                await self._node.find_nearest_nodes([self._node.node_id])
                self._introduced.add(peer)

    async def _store(self, topic: str, envelope: bytes, expires_at: float) -> bool:
        taken = False
        own = self._identity.public_key
        if not self._node.protocol.client_mode:
            self._store_here(topic, envelope, expires_at)
        with anyio.move_on_after(DEADLINE_S):
            # Without us: hivemind would say True when only our own copy was written.
            taken = bool(await self._node.store(topic, envelope, expires_at, subkey=own, exclude_self=True))
        if taken:
            self._expires_at[topic] = expires_at
        return taken

    def _store_here(self, topic: str, envelope: bytes, expires_at: float) -> None:
        from hivemind.dht.routing import DHTID
        from hivemind.dht.validation import DHTRecord

        protocol = self._node.protocol
        key = DHTID.generate(source=topic)
        own = self._identity.public_key
        dumps = protocol.serializer.dumps
        record = DHTRecord(key.to_bytes(), dumps(own), dumps(envelope), expires_at)
        protocol.storage.store(key, protocol.record_validator.sign_value(record), expires_at, subkey=own)

    async def _search(self, topic: str) -> dict[bytes, tuple[bytes, float]]:
        """Return {owner: (envelope, expiry)} as the network has it; values still to be checked."""
        found: Any = None
        with anyio.move_on_after(DEADLINE_S):
            found = await self._node.get(topic, latest=True)
        if found is None or not isinstance(found.value, dict):
            return {}
        entries: dict[Any, Any] = found.value  # pyright: ignore[reportUnknownVariableType]
        return {
            owner: (entry.value, entry.expiration_time)
            for owner, entry in entries.items()
            if isinstance(owner, bytes) and isinstance(entry.value, bytes)
        }


@asynccontextmanager
async def open_dht_directory(
    host: HivemindHost,
    identity: Identity,
    *,
    client_mode: bool,
    bootstrap: Sequence[str] = (),
    known: Sequence[str] = (),
) -> AsyncGenerator[DhtDirectory]:
    """Run a DHT node on `host` for the length of the block; one a host.

    Args:
        host: whose helper process carries the DHT's calls.
        identity: signs our records.
        client_mode: keep nothing for others; for peers that nobody can dial.
        bootstrap: addresses of DHT peers. None of them need be up: they are tried again every few seconds.
        known: further addresses, of peers met earlier, for as long as no other peer is there.

    """
    from hivemind.dht.node import DHTNode

    from echo_swarm.directory.validator import BoundedStorage, SignedRecordValidator

    node: Any = await DHTNode.create(
        p2p=host.daemon,
        client_mode=client_mode,
        record_validator=SignedRecordValidator(identity),
        wait_timeout=CALL_S,
        cache_locally=False,
        cache_nearest=0,
        cache_on_store=False,
    )
    node.protocol.storage = BoundedStorage()
    # Others may ask us to cache; that must have a bound as well.
    node.protocol.cache = BoundedStorage()
    directory = DhtDirectory(host, identity, node, bootstrap, known)
    try:
        async with background_tasks() as tasks:
            await directory.attach()
            tasks.start_soon(directory.keep_attached)
            yield directory
    finally:
        with anyio.move_on_after(CALL_S, shield=True):
            await node.shutdown()
