"""Whom a node can ask for versions besides the coordinator: what the directory says, dialled on first use."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from random import Random

import anyio
from anyio import to_thread

from echo_node.config import NodeConfig
from echo_swarm.checkpoint.known_peers import remember
from echo_swarm.checkpoint.reach import Reach, near_enough, reach_of_run
from echo_swarm.clock import Clock
from echo_swarm.directory.base import Directory, peers_topic
from echo_swarm.directory.reading import newest_peers
from echo_swarm.errors import LocalFault, PeerUnreachable
from echo_swarm.identity import PeerId
from echo_swarm.invite import Invite
from echo_swarm.records import PeerRecord
from echo_swarm.transport.base import Host

MAX_PROVIDERS = 16
"""A random choice of these many; the next fetch chooses anew."""
DIAL_TIMEOUT_S = 3.0
REDIAL_S = 60.0
"""A peer that could not be dialled is left alone for this long."""
CONNECTED_S = 60.0
"""A peer that could be dialled is taken to be connected for this long; dialling again is cheap if it is."""
MAX_ADDRESSES = 4
KNOWN_EVERY_S = 15.0
FRESH_S = 2.0
"""How long what the directory said is used again: a download asks every half second."""


def near_of(config: NodeConfig, invite: Invite) -> Reach:
    """Return how near addresses may be that peers give: as the run, or as this node's owner says."""
    near = reach_of_run(invite.boot)
    return max(near, Reach.PRIVATE) if config.private_peers else near


class Peers:
    """The other peers of the run.

    Args:
        host: dials.
        directory: has their records.
        run_id: the run.
        coordinator: its peer id now.
        near: how near an address may be that is dialled because a record has it.
        clock: for how long what was learnt counts.
        random_source: of the choice among many.

    """

    def __init__(
        self,
        *,
        host: Host,
        directory: Directory,
        run_id: str,
        coordinator: PeerId,
        near: Reach,
        clock: Clock,
        random_source: Random | None = None,
    ) -> None:
        self._host = host
        self._directory = directory
        self._run_id = run_id
        self.coordinator = coordinator
        """It changes when the run's key does."""
        self._near = near
        self._clock = clock
        self._random = random_source or Random()
        self._dialled: dict[PeerId, tuple[bool, float]] = {}
        self._found: dict[PeerId, PeerRecord] = {}
        self._found_at_s = float("-inf")

    async def providers(self, artifact_digest: bytes) -> Sequence[PeerId]:
        """Return the coordinator and reachable peers that announced a whole artifact."""
        records = await self._records()
        found = [peer for peer, record in records.items() if artifact_digest in record.artifact_digests]
        return [self.coordinator, *await self._reachable(found)]

    async def holders(self, version: int) -> Sequence[PeerId]:
        """Return reachable peers that hold `version` or a newer one, for its manifest."""
        return await self._reachable(
            [peer for peer, record in (await self._records()).items() if (record.held_version or 0) >= version]
        )

    def _met(self) -> list[tuple[str, ...]]:
        """Return the addresses of the coordinator and of peers that could be dialled, as they said them last."""
        reached = [peer for peer, (good, _) in self._dialled.items() if good]
        records = [self._found.get(peer) for peer in (self.coordinator, *reached)]
        return [record.addresses for record in records if record is not None and record.addresses]

    async def keep_known(self, path: Path) -> None:
        """Keep those addresses on disk, until cancelled. They are a help for later: no fault of the disk ends it."""
        while True:
            await anyio.sleep(KNOWN_EVERY_S)
            with contextlib.suppress(LocalFault):
                await to_thread.run_sync(remember, path, self._met(), self._host.addresses, self._near)

    async def coordinator_addresses(self) -> tuple[str, ...]:
        """Return where the coordinator says that it can be dialled now; names too, which the run's key signed."""
        record = (await self._records()).get(self.coordinator)
        return tuple(near_enough(record.addresses, self._near, names=True)) if record else ()

    async def _records(self) -> dict[PeerId, PeerRecord]:
        now_s = self._clock.monotonic_s()
        if now_s - self._found_at_s >= FRESH_S:
            self._found = newest_peers(await self._directory.find(peers_topic(self._run_id)), run_id=self._run_id)
            self._found_at_s = now_s
        return self._found

    async def _reachable(self, candidates: list[PeerId]) -> list[PeerId]:
        others = [peer for peer in candidates if peer not in (self.coordinator, self._host.peer_id)]
        self._random.shuffle(others)
        chosen = others[:MAX_PROVIDERS]
        # All at once and for a bounded time, so that the dead ones among them cost nothing but that.
        with anyio.move_on_after(DIAL_TIMEOUT_S):
            async with anyio.create_task_group() as tasks:
                for peer in chosen:
                    tasks.start_soon(self._dial, peer, self._found[peer].addresses)
        return [peer for peer in chosen if self._dialled.get(peer, (False, 0.0))[0]]

    async def _dial(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        now_s = self._clock.monotonic_s()
        reached, at_s = self._dialled.get(peer, (False, float("-inf")))
        if now_s - at_s < (CONNECTED_S if reached else REDIAL_S):
            return
        self._dialled[peer] = (False, now_s)
        for address in near_enough(addresses, self._near)[:MAX_ADDRESSES]:
            with contextlib.suppress(PeerUnreachable):
                if await self._host.connect(address, timeout_s=DIAL_TIMEOUT_S) == peer:
                    self._dialled[peer] = (True, now_s)
                    return
