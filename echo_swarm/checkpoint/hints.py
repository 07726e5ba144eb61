"""Dialling the peers that others name during a download: a few at a time, not without end, not wherever anybody says.

A name that one peer gave must not stand in the way of what others say: each teller has a share of its own, an address
that did not answer is forgotten after a while, and what is remembered is peer and address together. Private and
loopback addresses are dialled only in a run that is itself so near, and only at the word of one who was itself reached
at such an address: else anybody could make this peer knock at doors inside its own network. Names (`/dns4/...`) are
never dialled at the word of a peer: where they lead is decided by whoever answers the question, at the moment of
dialling, and peers know their own addresses.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import anyio
from anyio.abc import TaskGroup

from echo_swarm.checkpoint.reach import Reach, near_enough, nearest
from echo_swarm.errors import PeerUnreachable
from echo_swarm.identity import PeerId
from echo_swarm.transport.base import Host

DIAL_TIMEOUT_S = 3.0
MAX_DIALS = 8
"""At a time."""
MAX_PER_TELLER = 32
"""Addresses dialled at the word of one peer, in one download."""
MAX_HINTED = 512
"""Addresses dialled in one download."""
REST_S = 30.0
"""An address that did not answer is not dialled again for so long."""


class Hints:
    """The hints of one download.

    Args:
        host: dials.
        near: how near an address may be, whoever names it.
        reached: told of each peer that answers under the name by which it was named.

    """

    def __init__(self, host: Host, near: Reach, reached: Callable[[PeerId], None]) -> None:
        self._host = host
        self._near = near
        self._reached = reached
        self._met: set[PeerId] = {host.peer_id}
        self._not_before_s: dict[tuple[PeerId, str], float] = {}
        self._by_teller: Counter[PeerId] = Counter()
        self._dials = anyio.Semaphore(MAX_DIALS)

    def follow(self, teller: PeerId, peer: PeerId, addresses: Sequence[str], tasks: TaskGroup) -> None:
        """Dial somebody whom `teller` named, where that was not tried just now."""
        if peer in self._met:
            return
        near = min(self._near, nearest([self._host.dialled(teller)]))
        chosen: list[str] = []
        for address in near_enough(addresses, near):
            known = (peer, address) in self._not_before_s
            full = self._by_teller[teller] >= MAX_PER_TELLER or (not known and len(self._not_before_s) >= MAX_HINTED)
            resting = anyio.current_time() < self._not_before_s.get((peer, address), 0.0)
            if full or resting:
                continue
            self._by_teller[teller] += 1
            self._not_before_s[peer, address] = float("inf")
            chosen.append(address)
        if chosen:
            tasks.start_soon(self._dial, peer, chosen)

    async def _dial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        async with self._dials:
            for address in addresses:
                try:
                    if peer not in self._met and await self._host.connect(address, timeout_s=DIAL_TIMEOUT_S) == peer:
                        self._met.add(peer)
                        self._reached(peer)
                except PeerUnreachable:
                    pass
                self._not_before_s[peer, address] = anyio.current_time() + REST_S
