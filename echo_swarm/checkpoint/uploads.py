"""Who is served next: a turn for each peer that waits, so that none gains by asking more often. No IO.

request ──► queue of its peer ─┐
request ──► queue of its peer ─┼─ round robin ──► one of `places` ──► released ──► the next peer's
request ──► queue of its peer ─┘
"""

from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio

from echo_swarm.identity import PeerId


class Turns:
    """A number of places that peers take turns at.

    Args:
        places: how many may be taken at a time.

    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._queues: OrderedDict[PeerId, deque[anyio.Event]] = OrderedDict()
        """Requests that wait, by peer; the peer whose turn is next comes first."""

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return sum(len(queue) for queue in self._queues.values())

    @asynccontextmanager
    async def turn(self, peer: PeerId, *, max_wait_s: float) -> AsyncGenerator[None]:
        """Hold a place for the block. Raises TimeoutError when none came within `max_wait_s`."""
        await self._take(peer, max_wait_s)
        try:
            yield
        finally:
            self._release()

    async def _take(self, peer: PeerId, max_wait_s: float) -> None:
        if self._free > 0:
            self._free -= 1  # Then nobody waits.
            return
        mine = anyio.Event()
        self._queues.setdefault(peer, deque()).append(mine)
        try:
            with anyio.fail_after(max_wait_s):
                await mine.wait()
        except BaseException:
            if mine.is_set():
                self._release()  # It came at the last moment.
            else:
                self._leave(peer, mine)
            raise

    def _leave(self, peer: PeerId, mine: anyio.Event) -> None:
        queue = self._queues[peer]
        queue.remove(mine)
        if not queue:
            del self._queues[peer]

    def _release(self) -> None:
        if not self._queues:
            self._free += 1
            return
        peer, queue = next(iter(self._queues.items()))
        queue.popleft().set()
        if queue:
            self._queues.move_to_end(peer)
        else:
            del self._queues[peer]
