"""Where a node stands in a simulation, and what is on its disk."""

import random
from dataclasses import dataclass

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
