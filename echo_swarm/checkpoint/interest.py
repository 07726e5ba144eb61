"""Who else is after the same artifact: what peers tell each other while they download. Pure; times are monotonic.

Whoever asks a peer which pieces it has is after them, and soon has some to give. Each peer remembers who asked it, and
names some of them to the next one who asks; the coordinator, whom all ask, brings all together. A peer without
addresses that others could dial can still be asked by those it is connected to.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from echo_swarm.identity import PeerId

HOLD_S = 45.0
"""Who has not asked for so long has it all, or is gone. Longer than a `have` call may wait."""
MAX_ARTIFACTS = 64
MAX_PEERS = 256
"""Of an artifact; identities are free."""


@dataclass(frozen=True, slots=True)
class Interested:
    """A peer that asked."""

    addresses: tuple[str, ...]
    """Where it says that it can be dialled, each ending in its own peer id."""
    at_s: float


class InterestBook:
    """Remembers the peers that asked last."""

    def __init__(self, random: Random | None = None) -> None:
        self._random = random or Random()
        self._artifacts: OrderedDict[bytes, OrderedDict[PeerId, Interested]] = OrderedDict()
        self.grew: Callable[[bytes], None] = lambda _digest: None
        """Called with an artifact of which this peer has more than before; who serves it tells those who wait."""

    def note(self, digest: bytes, peer: PeerId, addresses: Sequence[str], now_s: float) -> None:
        """Note that a peer is after an artifact. Addresses that are not its own are left out."""
        own = tuple(address for address in addresses if address.endswith(f"/p2p/{peer}"))
        peers = self._artifacts.setdefault(digest, OrderedDict())
        self._artifacts.move_to_end(digest)
        if not own and peer in peers:
            own = peers[peer].addresses  # Said once is enough.
        peers[peer] = Interested(own, now_s)
        peers.move_to_end(peer)
        while len(peers) > MAX_PEERS:
            peers.popitem(last=False)
        while len(self._artifacts) > MAX_ARTIFACTS:
            self._artifacts.popitem(last=False)

    def others(self, digest: bytes, peer: PeerId, limit: int, now_s: float) -> dict[PeerId, tuple[str, ...]]:
        """Return some peers besides `peer` that are after an artifact and can be dialled."""
        found = {p: e.addresses for p, e in self._fresh(digest, now_s) if p != peer and e.addresses}
        chosen = self._random.sample(sorted(found), min(limit, len(found)))
        return {peer: found[peer] for peer in chosen}

    def connected(self, digest: bytes, now_s: float) -> list[PeerId]:
        """Return the peers that asked us: we are connected to them, whether or not they can be dialled."""
        return [peer for peer, _ in self._fresh(digest, now_s)]

    def _fresh(self, digest: bytes, now_s: float) -> list[tuple[PeerId, Interested]]:
        peers = self._artifacts.get(digest, OrderedDict())
        return [(peer, entry) for peer, entry in peers.items() if now_s - entry.at_s < HOLD_S]
