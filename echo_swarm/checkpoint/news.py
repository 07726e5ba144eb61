"""Waiting for more pieces of a download: one look at it serves all who wait.

The first who waits for an artifact looks on behalf of the others; when it leaves, the next one does. It is told of each
piece from a peer (`grew`); what comes otherwise, from a version on this disk or by a delta, it finds by looking.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from echo_swarm.identity import PeerId

PAUSE_S = 0.04
"""Between news and the next: on a fast line, one answer then speaks of several pieces."""
LOOK_S = 0.25
"""How often it is looked for what nobody told."""
MAX_WAITING = 512
MAX_WAITING_PER_PEER = 6
"""A peer waits once for each artifact that it downloads: a model, an adapter, deltas."""


@dataclass(slots=True)
class _Topic:
    seen: int
    changed: anyio.Event = field(default_factory=anyio.Event)
    grown: anyio.Event = field(default_factory=anyio.Event)
    watched: bool = False
    waiting: int = 0

    def tell(self) -> None:
        """Wake all who wait."""
        self.changed.set()
        self.changed = anyio.Event()


class News:
    """Who waits for pieces of what.

    Args:
        held: pieces held of a download under way; -1 when there is none (any more). Must not block.

    """

    def __init__(self, held: Callable[[bytes], int]) -> None:
        self._held = held
        self._topics: dict[bytes, _Topic] = {}
        self._by_peer: Counter[PeerId] = Counter()

    @property
    def waiting(self) -> int:
        """How many wait now."""
        return self._by_peer.total()

    def grew(self, digest: bytes) -> None:
        """Look at this artifact now."""
        if topic := self._topics.get(digest):
            topic.grown.set()

    async def wait(self, peer: PeerId, digest: bytes, known: int, wait_s: float) -> None:
        """Return once more than `known` pieces are held, the download ended, or the time is over.

        At once for a peer that waits MAX_WAITING_PER_PEER times already, and when MAX_WAITING wait in all.
        """
        if self.waiting >= MAX_WAITING or self._by_peer[peer] >= MAX_WAITING_PER_PEER:
            return
        topic = self._topics.setdefault(digest, _Topic(self._held(digest)))
        topic.waiting += 1
        self._by_peer[peer] += 1
        try:
            with anyio.move_on_after(wait_s):
                while -1 < self._held(digest) <= known:
                    await self._look(topic, digest)
        finally:
            topic.waiting -= 1
            if topic.waiting == 0:
                del self._topics[digest]
            self._by_peer[peer] -= 1
            if self._by_peer[peer] == 0:
                del self._by_peer[peer]

    async def _look(self, topic: _Topic, digest: bytes) -> None:
        if topic.watched:
            return await topic.changed.wait()
        topic.watched = True
        try:
            await anyio.sleep(PAUSE_S)
            while (held := self._held(digest)) == topic.seen:
                topic.grown = anyio.Event()
                with anyio.move_on_after(LOOK_S):
                    await topic.grown.wait()
            topic.seen = held
        finally:
            # Also when it leaves without news: somebody else looks then.
            topic.watched = False
            topic.tell()
