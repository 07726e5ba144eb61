"""Whose failures use up the tries of a slot: those of one peer, or of peers behind one address, count once.

A slot is given up after `max_attempts` failures. Were each counted, one peer that fails at whatever it gets could have
any prompt given up, one after the other. So a second failure from the same source counts only

- when nobody else is here who could try: no live peer from a source that has not failed at it. A poisonous prompt must
  end, and a run with one node must go on;
- or when nobody else has taken the slot for `lease_s` four times over since the first failure.
"""

from collections.abc import Callable, Collection

from echo_coordinator.state.groups import Slot
from echo_swarm.identity import PeerId

PATIENCE = 4
"""Of `lease_s`. For so long, a peer that waits for work would have taken the slot."""


class Tries:
    """See the module.

    Args:
        lease_s: of the run.

    """

    def __init__(self, lease_s: float) -> None:
        self._patience_s = PATIENCE * lease_s
        self.source_of: Callable[[PeerId], str] = str
        """Tells what peers that may be one have in common: their address, or the peer where none is known."""
        self.others: Callable[[Collection[str]], bool] = lambda _sources: False
        """Tells whether a peer is here, and may be given work, that is from none of these sources."""

    def uses_up(self, slot: Slot, peer: PeerId, now: float) -> bool:
        """Whether a peer's failure at a slot counts against the slot. Notes it; call once a failure."""
        source = self.source_of(peer)
        if source not in slot.losers:
            slot.lost_since = now if slot.lost_since is None else slot.lost_since
            slot.losers += (source,)
            return True
        since = now if slot.lost_since is None else slot.lost_since
        return now - since > self._patience_s or not self.others(slot.losers)
