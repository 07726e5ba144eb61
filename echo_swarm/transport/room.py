"""Memory that all peers of a server share. Who needs some waits for it in turn. No IO.

    claim.take(size) ──► fits and nobody waits: granted
                    └──► waits ──► half of the bytes by size, the smallest first
                               └─► half of the bytes by turn

By size, because keys cost nothing: however many of them wait for much, a small message waits for one of theirs at most.
By turn, so that nobody is passed over for ever: self-clocked fair queueing (Golestani, "A Self-Clocked Fair Queueing
Scheme for Broadband Applications", 1994), where a request's tag is where its peer's last one ended, or the tag served
last if that is later, plus its size.
"""

import heapq
import itertools
import math
from collections.abc import Callable

import anyio


class Flow:
    """Where one peer's last request for a room ended, in bytes of the room's own clock."""

    __slots__ = ("tag",)

    def __init__(self) -> None:
        self.tag = 0


class _Ticket:
    """One request that waits."""

    __slots__ = ("claim", "first_since", "given_up", "granted", "number", "size", "tag")

    def __init__(self, claim: "Claim", size: int, tag: int, number: int) -> None:
        self.claim = claim
        self.size = size
        self.tag = tag
        self.number = number
        self.granted = anyio.Event()
        self.given_up = False
        self.first_since: float | None = None
        """When it became the next. Smaller ones that overtake it later do not change that."""

    @property
    def over(self) -> bool:
        """Whether it waits no more."""
        return self.given_up or self.granted.is_set()


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
        self._by_size = _Queue(lambda ticket: ticket.size)
        self._by_turn = _Queue(lambda ticket: ticket.tag)
        self._ahead = 0
        """Bytes granted by size less those by turn, since somebody began to wait."""
        self.waiting = 0
        """Requests that wait."""

    @property
    def blocked_since(self) -> float | None:
        """Since when the next waits and nobody did anything about it; None while nobody waits."""
        since = None if (ticket := self._next()) is None else ticket.first_since
        return None if since is None else max(since, self.looked_at)

    @property
    def missing(self) -> int:
        """What the next lacks; 0 while nobody waits."""
        return 0 if (ticket := self._next()) is None else max(0, self.held + ticket.size - self.max_bytes)

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
        if not self.waiting and self.has(size):
            claim.change(size)
            return
        claim.flow.tag = max(self._clock, claim.flow.tag) + size
        ticket = _Ticket(claim, size, claim.flow.tag, next(self._numbers))
        self.waiting += 1
        self._by_size.add(ticket)
        self._by_turn.add(ticket)
        self._serve()  # It may be the next, and small enough.
        try:
            await ticket.granted.wait()
        finally:
            # One that was granted as its task was cancelled is the claim's all the same, which gives it back.
            if not ticket.granted.is_set():
                ticket.given_up = True
                self.waiting -= 1
                self._serve()

    def _serve(self) -> None:
        while (ticket := self._next()) is not None and self.has(ticket.size):
            self._ahead += ticket.size if self._ahead <= 0 else -ticket.size
            self._clock = max(self._clock, ticket.tag)
            self.waiting -= 1
            ticket.granted.set()
            ticket.claim.change(ticket.size)
        if ticket is None:
            self._ahead = 0
        elif ticket.first_since is None:
            ticket.first_since = anyio.current_time()
        for queue in (self._by_size, self._by_turn):
            queue.tidy(self.waiting)

    def _next(self) -> _Ticket | None:
        return (self._by_size if self._ahead <= 0 else self._by_turn).first()


class _Queue:
    """Tickets by some number. Those that are over stay until they come first, or are too many."""

    def __init__(self, number_of: Callable[[_Ticket], int]) -> None:
        self._number_of = number_of
        self._heap: list[tuple[int, int, _Ticket]] = []

    def add(self, ticket: _Ticket) -> None:
        """Let one wait."""
        heapq.heappush(self._heap, (self._number_of(ticket), ticket.number, ticket))

    def first(self) -> _Ticket | None:
        """Return the one with the lowest number that still waits."""
        while self._heap and self._heap[0][2].over:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def tidy(self, waiting: int) -> None:
        """Let go of those that are over: peers that ask and vanish again and again must not fill memory with it."""
        if len(self._heap) > 2 * waiting + 64:
            self._heap = [entry for entry in self._heap if not entry[2].over]
            heapq.heapify(self._heap)


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
