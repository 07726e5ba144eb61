"""Fair turns of peers that share a network address and its limit: who waits longest is served first.

Without turns, the fastest peer behind an address takes each place that it has just made free, and the others never get
one: its delivery wakes itself, and it asks again before anybody else does.
"""

from collections.abc import Callable

from echo_swarm.identity import PeerId

WAITS_S = 40.0
"""How long a peer that was turned away keeps its place in the queue: it asks again after 30 s at the latest."""


class AddressTurns:
    """Who waits for room, by address.

    Args:
        limit: completions that all of them behind one address may hold together.
        held: how many one of them holds.

    """

    def __init__(self, limit: int, held: Callable[[PeerId], int]) -> None:
        self._limit = limit
        self._held = held
        self._queues: dict[str, dict[PeerId, float]] = {}
        """Address → peers that were turned away, the longest waiting first, and when they asked last."""

    def room(self, network: str, peer: PeerId, sharing: list[PeerId], capacity: int, now: float) -> int:
        """Return how many of `capacity` a peer may have now. `sharing`: all who count behind this address.

        Nobody waits: what is left. Else an equal part for each who holds something or waits, and those who wait in
        front of this peer have one place each before it.
        """
        left = self._limit - sum(map(self._held, sharing))
        queue = self._waiting(network, now)
        others = [other for other in queue if other != peer]
        if others:
            in_front = list(queue).index(peer) if peer in queue else len(queue)
            taking = {peer, *others, *(other for other in sharing if self._held(other))}
            part = max(1, self._limit // len(taking)) - self._held(peer)
            left = min(left - in_front, part)
        return max(0, min(capacity, left))

    def asked(self, network: str, peer: PeerId, room: int, now: float) -> None:
        """Note that a peer asked and was given so much room: it waits from now on, or does not any more."""
        queue = self._queues.setdefault(network, {})
        if room:
            queue.pop(peer, None)
        else:
            queue[peer] = now
        if not queue:
            del self._queues[network]

    def next(self, network: str, count: int, now: float) -> list[PeerId]:
        """Return whom to wake when so many places have become free."""
        return list(self._waiting(network, now))[:count]

    def _waiting(self, network: str, now: float) -> dict[PeerId, float]:
        queue = self._queues.get(network, {})
        for peer in [peer for peer, asked_at in queue.items() if now - asked_at > WAITS_S]:
            del queue[peer]
        return queue
