"""Which pieces the coordinator gives to whom, so that its uplink carries each piece about once. Pure.

All who begin together would otherwise ask it for the same pieces, each in its own random order. It sees all requests,
so it chooses: of the pieces that a peer wants, those that it has promised least often. Peers get the rest from each
other.
"""

from collections import OrderedDict
from random import Random

from echo_swarm.checkpoint.pieces import PieceMap

MAX_ARTIFACTS = 64
_SAMPLE = 512


class Allocation:
    """How often each piece of each artifact was promised."""

    def __init__(self, random: Random | None = None) -> None:
        self._random = random or Random()
        self._promised: OrderedDict[bytes, list[int]] = OrderedDict()

    def choose(self, digest: bytes, wanted: PieceMap, count: int) -> list[int]:
        """Return up to `count` of the wanted pieces, those promised least often, and count them as promised."""
        promised = self._promised.setdefault(digest, [0] * wanted.count)
        self._promised.move_to_end(digest)
        while len(self._promised) > MAX_ARTIFACTS:
            self._promised.popitem(last=False)
        candidates = list(wanted)
        # Enough to find one that was promised seldom, whatever the artifact's size.
        candidates = self._random.sample(candidates, min(len(candidates), max(count, _SAMPLE)))
        chosen = sorted(candidates, key=promised.__getitem__)[:count]
        for index in chosen:
            promised[index] += 1
        return chosen
