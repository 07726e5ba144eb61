"""Where a node stands in a simulation, and what is on its disk."""

import random
from collections import deque
from dataclasses import dataclass, field

from echo_coordinator.simulate.liars import Behaviour
from echo_coordinator.simulate.network import Network
from echo_coordinator.simulate.scenario import Swarm
from echo_coordinator.simulate.virtual_time import LoopClock
from echo_swarm.trajectory import Submission


@dataclass(slots=True, kw_only=True)
class Entry:
    """A submission in the outbox."""

    envelope: bytes
    submission: Submission
    goes_stale: bool
    version: int
    sent: bool = False


@dataclass(slots=True)
class Disk:
    """What outlives a node's processes. An entry leaves the outbox and is counted in one step, as in the real one."""

    outbox: deque[Entry] = field(default_factory=deque[Entry])
    accepted: int = 0
    """Completions that the coordinator said it accepted."""

    def settle(self, entry: Entry, accepted: int) -> None:
        """Take in the verdicts of the oldest entry."""
        assert self.outbox[0] is entry, "only its pusher takes entries out"
        self.outbox.popleft()
        self.accepted += accepted

    @property
    def unsettled(self) -> int:
        """Completions that were sent and of which it does not know what became of them."""
        return sum(len(entry.submission.trajectories) for entry in self.outbox if entry.sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a node stands in the simulation."""

    index: int
    run_id: str
    swarm: Swarm
    speed: float
    """Tokens a second."""
    max_staleness: int
    clock: LoopClock
    delay_s: float
    network: Network
    draws: random.Random
    behaviour: Behaviour
