"""Memory that all peers of a server share. Who needs some waits for it in turn, the small before the large. No IO.

    claim.take(size) ──► fits and nobody waits: granted
                    └──► heap by tag ──► granted in this order as others give back

The order is self-clocked fair queueing (Golestani, "A Self-Clocked Fair Queueing Scheme for Broadband Applications",
1994): a request's tag is where its peer's last one ended, or the tag served last if that is later, plus its size. Who
asks for little is served before those that ask for much or often, and nobody is passed over for ever.
"""

import heapq
import itertools
import math

import anyio


class Flow:
    """Where one peer's last request for a room ended, in bytes of the room's own clock."""

    __slots__ = ("tag",)

    def __init__(self) -> None:
        self.tag = 0


class _Ticket:
    """One request that waits."""

    __slots__ = ("claim", "first_since", "given_up", "granted", "size")

    def __init__(self, claim: "Claim", size: int) -> None:
        self.claim = claim
        self.size = size
        self.granted = anyio.Event()
        self.given_up = False
        self.first_since: float | None = None
        """When it became the first in turn. Smaller ones that overtake it later do not change that."""


class Room:
    """A number of bytes. Holders must give back without waiting for more of the same room: nothing else can lock it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held = 0
        """Bytes taken now. Above `max_bytes` only by a single request larger than all, and by `Claim.change`."""
        self.peak = 0
        """The most it ever was."""
        self.looked_at = -math.inf
        """When somebody last did something about it being full."""
        self._clock = 0
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, _Ticket]] = []
        self._given_up = 0

    @property
    def blocked_since(self) -> float | None:
        """Since when the first in turn waits and nobody did anything about it; None while nobody waits."""
        since = self._waiting[0][2].first_since if self._waiting else None
        return None if since is None else max(since, self.looked_at)

    @property
    def missing(self) -> int:
        """What the first in turn lacks; 0 while nobody waits."""
        return max(0, self.held + self._waiting[0][2].size - self.max_bytes) if self._waiting else 0

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting) - self._given_up

    def has(self, size: int) -> bool:
        """Whether so much fits. Anything fits into an empty room, so that nothing waits for ever."""
        return self.held + size <= self.max_bytes or self.held == 0

    def change(self, difference: int) -> None:
        """Count bytes as taken or given back, and serve who waits."""
        self.held += difference
        self.peak = max(self.peak, self.held)
        if difference < 0:
            self._serve()

    async def wait(self, claim: "Claim", size: int) -> None:
        """Return when `size` bytes are the claim's."""
        if not self._waiting and self.has(size):
            claim.change(size)
            return
        ticket = _Ticket(claim, size)
        claim.flow.tag = max(self._clock, claim.flow.tag) + size
        heapq.heappush(self._waiting, (claim.flow.tag, next(self._numbers), ticket))
        self._serve()  # It may be the first, and small enough.
        try:
            await ticket.granted.wait()
        finally:
            # One that was granted as its task was cancelled is the claim's all the same, which gives it back.
            if not ticket.granted.is_set():
                ticket.given_up = True
                self._given_up += 1
                self._serve()

    def _serve(self) -> None:
        self._look_at_first()
        while self._waiting and self.has(self._waiting[0][2].size):
            tag, _, ticket = heapq.heappop(self._waiting)
            self._clock = max(self._clock, tag)
            ticket.claim.change(ticket.size)
            ticket.granted.set()
            self._look_at_first()

    def _look_at_first(self) -> None:
        while self._waiting and self._waiting[0][2].given_up:
            heapq.heappop(self._waiting)
            self._given_up -= 1
        if self._given_up > len(self._waiting) // 2 + 64:
            # Peers that ask and vanish, again and again, must not fill memory with what they asked for.
            self._waiting = [entry for entry in self._waiting if not entry[2].given_up]
            heapq.heapify(self._waiting)
            self._given_up = 0
        if self._waiting and self._waiting[0][2].first_since is None:
            self._waiting[0][2].first_since = anyio.current_time()


class Claim:
    """What one stream holds of a room."""

    __slots__ = ("flow", "held", "room")

    def __init__(self, room: Room, flow: Flow) -> None:
        self.room = room
        self.flow = flow
        self.held = 0

    async def take(self, size: int) -> None:
        """Wait for the turn of this peer, and take `size` bytes."""
        await self.room.wait(self, size)

    def change(self, difference: int) -> None:
        """Take without waiting, or give back."""
        self.held += difference
        self.room.change(difference)

    def end(self) -> None:
        """Give back all."""
        self.change(-self.held)
