"""The modelled backend: places that each sample one completion, a batch that runs empty before weights are swapped.

Which lease comes next is decided by the node's real `LeaseBook`.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, log

from echo_coordinator.simulate.crew import Crew
from echo_coordinator.simulate.held import Held
from echo_coordinator.simulate.scenario import Swarm
from echo_node.lease_book import LeaseBook
from echo_swarm.clock import Clock
from echo_swarm.work import Lease, LeaseMember

AHEAD = 0.25
"""Requests that wait in the backend, as a share of its places; as in the node's sampler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A completion, before it is written down."""

    lease: Lease
    member: LeaseMember
    version: int
    tokens: int


class SimSampler:
    """One backend's life."""

    def __init__(
        self,
        *,
        swarm: Swarm,
        speed: float,
        draws: random.Random,
        clock: Clock,
        crew: Crew,
        book: LeaseBook,
        held: Held,
        finished: Callable[[Made], None],
        changed: Callable[[], None],
    ) -> None:
        """Describe it; `speed` in tokens a second, all places together."""
        self._swarm = swarm
        self._token_s = swarm.places / speed
        self._draws = draws
        self._clock = clock
        self._crew = crew
        self._book = book
        self._held = held
        self._finished = finished
        self._changed = changed
        self._waiting: deque[Made] = deque()
        self._active = 0
        self._loading: int | None = None
        self._load_begun = False
        self.loaded: int | None = None
        self.busy_s = 0.0
        """Summed over places."""

    @property
    def places(self) -> int:
        """Requests that the backend should have."""
        head, places = self._held.head, self._swarm.places
        is_newest = self.loaded is not None and (head is None or head <= self.loaded)
        return places + (int(AHEAD * places) if is_newest else 0)

    @property
    def under_way(self) -> int:
        """Requests that it has."""
        return self._active + len(self._waiting)

    def advance(self) -> None:
        """Do all that can be done now."""
        while self._loading is None:
            newest = self._held.newest
            if self.loaded is None:
                if newest is None:
                    return
                self._load(newest)
                return
            turn = self._book.turn(
                loaded=self.loaded, newest=newest, held=self._held.versions, now_s=self._clock.monotonic_s()
            )
            free = self.places - self.under_way
            if turn is None or free <= 0:
                return
            if turn.version != self.loaded:
                self._load(turn.version)
                return
            for member in self._book.begin(turn.lease.lease_id, free):
                self._waiting.append(
                    Made(lease=turn.lease, member=member, version=self.loaded, tokens=self._length(turn.lease))
                )
            self._fill()

    def _length(self, lease: Lease) -> int:
        sigma = self._swarm.spread
        length = self._swarm.tokens * exp(self._draws.gauss(0.0, sigma) - sigma * sigma / 2)
        return max(1, min(lease.sampling.max_tokens, round(length)))

    def _fill(self) -> None:
        while self._waiting and self._active < self._swarm.places:
            made = self._waiting.popleft()
            self._active += 1
            took_s = made.tokens * self._token_s
            self._crew.later(took_s, lambda made=made, took_s=took_s: self._done(made, took_s))

    def _done(self, made: Made, took_s: float) -> None:
        self._active -= 1
        self.busy_s += took_s
        if self._book.finish(made.lease.lease_id, made.member.member):
            self._finished(made)
        self._fill()
        self._begin_load()
        self.advance()
        self._changed()

    def _load(self, version: int) -> None:
        self._loading, self._load_begun = version, False
        self._begin_load()

    def _begin_load(self) -> None:
        # What runs is finished with the weights that it was begun with.
        if self._loading is not None and not self.under_way and not self._load_begun:
            self._load_begun = True
            self._crew.later(self._swarm.load_s, self._has_loaded)

    def _has_loaded(self) -> None:
        self.loaded, self._loading = self._loading, None
        self.advance()
        self._changed()


def speed_of(swarm: Swarm, index: int) -> float:
    """Return the tokens a second of a node: evenly spread between the bounds on a logarithmic scale."""
    if swarm.speeds:
        return swarm.speeds[index % len(swarm.speeds)]
    low, high = map(log, swarm.speed)
    share = index / (swarm.nodes - 1) if swarm.nodes > 1 else 0.5
    return exp(low + share * (high - low))
