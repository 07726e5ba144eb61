"""Which pieces the coordinator gives to whom, so that its uplink carries each piece about once. Pure; times monotonic.

All who begin together would otherwise ask it for the same pieces, each in its own random order. It sees all requests,
so it chooses: of the pieces that a peer wants, some of those that it has given or promised least often, anywhere in the
file (in order, eight peers took 1.35 copies' time, and 1.2 so). Peers get the rest from each other. One that is alone
gets them in order: it then reads the file back while its end is still coming. A promise that is not called in is taken
back after a while, and a peer has a few at a time: one that dies, or asks for more than it fetches, keeps no piece from
others for long.

Pieces are bits of an integer, one integer for those given once or more, one for twice or more, and so on: choosing
costs the same few operations whatever the artifact's size.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from random import Random

from echo_swarm.checkpoint.pieces import PieceMap, any_of
from echo_swarm.identity import PeerId

MAX_ARTIFACTS = 64
PROMISE_S = 20.0
"""A piece that was not fetched for so long after it was promised counts as not promised."""
MAX_PROMISES_PER_PEER = 64
"""Those before are taken back."""
MAX_PROMISES = 8192
"""Of an artifact; identities are free."""
_MAX_LEVELS = 16
"""Pieces given more often than this are alike."""


@dataclass(slots=True)
class _Artifact:
    levels: list[int] = field(default_factory=list[int])
    """Bit set number k: the pieces that were given or promised more than k times."""
    promises: "OrderedDict[tuple[PeerId, int], float]" = field(default_factory=OrderedDict[tuple[PeerId, int], float])
    """Not called in yet, oldest first."""
    by_peer: dict[PeerId, deque[int]] = field(default_factory=dict[PeerId, deque[int]])

    def raise_level(self, index: int) -> None:
        """Count a piece once more."""
        bit = 1 << index
        for number, level in enumerate(self.levels):
            if not level & bit:
                self.levels[number] |= bit
                return
        if len(self.levels) < _MAX_LEVELS:
            self.levels.append(bit)

    def lower_level(self, index: int) -> None:
        """Count a piece once less."""
        bit = 1 << index
        for number in reversed(range(len(self.levels))):
            if self.levels[number] & bit:
                self.levels[number] ^= bit
                return

    def promise(self, peer: PeerId, index: int, now_s: float) -> None:
        """Note a promise; make room for it first."""
        self.settle(peer, index, kept=False)
        mine = self.by_peer.setdefault(peer, deque())
        if len(mine) >= MAX_PROMISES_PER_PEER:
            self.settle(peer, mine[0], kept=False)
            mine = self.by_peer.setdefault(peer, mine)
        if len(self.promises) >= MAX_PROMISES:
            self.settle(*next(iter(self.promises)), kept=False)
            mine = self.by_peer.setdefault(peer, mine)
        mine.append(index)
        self.promises[peer, index] = now_s
        self.raise_level(index)

    def settle(self, peer: PeerId, index: int, *, kept: bool) -> None:
        """End a promise, if there is one: kept, or taken back."""
        if self.promises.pop((peer, index), None) is None:
            return
        mine = self.by_peer[peer]
        mine.remove(index)
        if not mine:
            del self.by_peer[peer]
        if not kept:
            self.lower_level(index)

    def expire(self, now_s: float) -> None:
        """Take back what was promised too long ago."""
        while self.promises:
            (peer, index), at_s = next(iter(self.promises.items()))
            if now_s - at_s < PROMISE_S:
                return
            self.settle(peer, index, kept=False)


class Allocation:
    """How often each piece of each artifact was given or is promised."""

    def __init__(self, random: Random | None = None) -> None:
        self._random = random or Random()
        self._artifacts: OrderedDict[bytes, _Artifact] = OrderedDict()

    def choose(self, digest: bytes, peer: PeerId, wanted: PieceMap, count: int, now_s: float) -> list[int]:
        """Return up to `count` of the wanted pieces, those given or promised least often; promise them."""
        artifact = self._artifacts.setdefault(digest, _Artifact())
        self._artifacts.move_to_end(digest)
        while len(self._artifacts) > MAX_ARTIFACTS:
            self._artifacts.popitem(last=False)
        artifact.expire(now_s)
        alone = not artifact.by_peer.keys() - {peer}
        left, chosen = wanted.bits, list[int]()
        for level in (*artifact.levels, -1):
            best = left if level == -1 else left & ~level
            while best and len(chosen) < count:
                index = any_of(best, 0 if alone else self._random.randrange(wanted.count))
                best ^= 1 << index
                left ^= 1 << index
                chosen.append(index)
            if len(chosen) == count:
                break
        for index in chosen:
            artifact.promise(peer, index, now_s)
        return chosen

    def gave(self, digest: bytes, peer: PeerId, index: int) -> None:
        """Say that a piece went out: if it was promised to that peer, the promise is kept."""
        artifact = self._artifacts.get(digest)
        if artifact is not None:
            artifact.settle(peer, index, kept=True)
