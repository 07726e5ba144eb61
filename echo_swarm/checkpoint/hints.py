"""Dialling the peers that others name during a download: each once, a few at a time, and not without end."""

from collections.abc import Callable, Sequence

import anyio
from anyio.abc import TaskGroup

from echo_swarm.errors import PeerUnreachable
from echo_swarm.identity import PeerId
from echo_swarm.transport.base import Host

DIAL_TIMEOUT_S = 3.0
MAX_DIALS = 8
"""At a time."""
MAX_HINTED = 256
"""In one download."""


class Hints:
    """The hints of one download.

    Args:
        host: dials.
        reached: told of each peer that answers under the name by which it was named.

    """

    def __init__(self, host: Host, reached: Callable[[PeerId], None]) -> None:
        self._host = host
        self._reached = reached
        self._seen: set[PeerId] = {host.peer_id}
        self._dials = anyio.Semaphore(MAX_DIALS)

    def follow(self, peer: PeerId, addresses: Sequence[str], tasks: TaskGroup) -> None:
        """Dial somebody who was named, unless that was done before."""
        if peer not in self._seen and len(self._seen) < MAX_HINTED:
            self._seen.add(peer)
            tasks.start_soon(self._dial, peer, addresses)

    async def _dial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        async with self._dials:
            for address in addresses:
                try:
                    if await self._host.connect(address, timeout_s=DIAL_TIMEOUT_S) == peer:
                        self._reached(peer)
                        return
                except PeerUnreachable:
                    continue
