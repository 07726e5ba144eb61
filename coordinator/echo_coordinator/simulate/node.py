"""A modelled node through its deaths. What is on its disk survives them: key, outbox. All else is lost."""

import asyncio
import hashlib

from echo_coordinator.simulate.crew import Crew
from echo_coordinator.simulate.life import Life
from echo_coordinator.simulate.place import Disk, Place
from echo_swarm.identity import Identity


class SimNode:
    """One node, through all of its processes."""

    def __init__(self, place: Place, crew: Crew) -> None:
        """Describe it; `crew` is of its first process and tells failures."""
        self.place = place
        self.identity = Identity.from_seed(hashlib.sha256(b"simulated node %d" % place.index).digest())
        self.peer = self.identity.peer_id
        self.disk = Disk()
        self.dropped_stale = 0
        self.busy_s = 0.0
        """Of all places of all processes before this one."""
        self.alive_s = 0.0
        self.dead_since: float | None = None
        self._life: Life | None = None
        self.begin(crew)

    @property
    def alive(self) -> bool:
        """Whether a process of it runs."""
        return self._life is not None

    @property
    def is_connected(self) -> bool:
        """Whether it has said hello and its connection holds."""
        return self._life is not None and self._life.link.up.is_set()

    def begin(self, crew: Crew) -> None:
        """Start a process."""
        self.dead_since = None
        self._life = Life(self.place, self.identity, self.disk, crew)

    def die(self) -> None:
        """Lose everything that is not on disk."""
        life, self._life = self._life, None
        if life is not None:
            self.account(life)
            self.dead_since = _now()
            life.crew.stop()

    def account(self, life: Life | None = None) -> None:
        """Add up a process's time, at its end or at the end of the simulation."""
        life = life or self._life
        if life is not None:
            self.busy_s += life.sampler.busy_s / self.place.swarm.places
            self.dropped_stale += life.dropped_stale
            self.alive_s += _now() - life.began


def _now() -> float:
    return asyncio.get_running_loop().time()
