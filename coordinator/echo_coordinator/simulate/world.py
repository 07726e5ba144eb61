"""One simulation, from its scenario to what came out.

Weather: deaths, partitions, crashes ──► nodes, network, site
                                         nodes ◄─► network ◄─► site ──► watch
"""

import asyncio
import logging
import math
import random
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from echo_coordinator.simulate.crew import Crew
from echo_coordinator.simulate.figures import Figures, figures_of
from echo_coordinator.simulate.journal import Journal
from echo_coordinator.simulate.liars import Behaviour
from echo_coordinator.simulate.network import Network
from echo_coordinator.simulate.node import SimNode
from echo_coordinator.simulate.place import Place
from echo_coordinator.simulate.progress import Progress
from echo_coordinator.simulate.sampler import speed_of
from echo_coordinator.simulate.scenario import LiarKind, Scenario
from echo_coordinator.simulate.site import RUN_ID, Site
from echo_coordinator.simulate.truth import Truth
from echo_coordinator.simulate.virtual_time import LoopClock, run_virtually
from echo_coordinator.simulate.watch import Broken, Watch
from echo_swarm.identity import PeerId
from echo_swarm.work import Lease

BACK_AT_ONCE = 0.1
"""Share of nodes that come back before anybody could have missed them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An invariant that broke."""

    invariant: str
    detail: str
    at_s: float
    led_up: tuple[str, ...]
    """The journal's last lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a scenario."""

    scenario: Scenario
    figures: Figures | None
    """None if the coordinator was away at the end."""
    failure: Failure | None
    digest: str
    """Of all that happened; the same for the same scenario and program."""
    simulated_s: float
    wall_s: float
    steps: int
    """How often all invariants were looked at."""
    events: int
    """Lines of the journal."""
    updated_at_s: tuple[float, ...]
    """When each update was in the ledger."""


def simulate(scenario: Scenario, *, every_step: bool = True) -> Outcome:
    """Run a scenario to its end, or to the first invariant that breaks.

    Args:
        scenario: what to simulate.
        every_step: look at all invariants after each answer, not only every few simulated seconds.

    """
    folder = Path(tempfile.mkdtemp(prefix="echo-simulation-"))
    began, said = time.monotonic(), logging.getLogger("echo_coordinator.loops")
    level = said.level
    # What its loops would tell the owner of a run is in the figures.
    said.setLevel(logging.CRITICAL)
    try:
        world: list[World] = []

        async def main() -> Failure | None:
            world.append(World(scenario, folder, every_step=every_step))
            return await world[0].run()

        failure = run_virtually(main)
        return world[0].outcome(failure, time.monotonic() - began)
    finally:
        said.setLevel(level)
        shutil.rmtree(folder, ignore_errors=True)


class World:
    """Everything in one simulation."""

    def __init__(self, scenario: Scenario, folder: Path, *, every_step: bool) -> None:
        self.scenario = scenario
        self.journal = Journal()
        self._truth = Truth()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._crew = Crew(self.fail)
        self.watch = Watch(
            scenario=scenario,
            journal=self.journal,
            truth=self._truth,
            dead_since=self._dead_since,
            name_of=lambda peer: self._names.get(peer, peer),
            told=self._told,
            every_step=every_step,
        )
        self.site = Site(
            folder=folder,
            scenario=scenario,
            truth=self._truth,
            watch=self.watch,
            draws=self._draws("site"),
            failed=self.fail,
        )
        self.network = Network(scenario.faults, self._draws("network"), self.site, self._crew)
        overheard: deque[Lease] = deque(maxlen=64)
        kinds = self._kinds()
        self.nodes = [self._node(index, kinds.get(index), overheard) for index in range(scenario.swarm.nodes)]
        self._names = {node.peer: f"n{node.place.index}" for node in self.nodes}
        self._by_peer = {node.peer: node for node in self.nodes}
        self.progress = Progress(scenario, self.nodes, self.site, self.network)
        self.watch.on_progress = self.progress.made
        self._repairs = asyncio.Lock()
        """Held by whoever ends and starts the coordinator's process."""
        self._now_s = 0.0
        self._figures: Figures | None = None

    async def run(self) -> Failure | None:
        """Run to the end or to the first failure."""
        self.site.begin()
        self._begin_weather()
        failure: Failure | None = None
        try:
            await asyncio.wait_for(asyncio.shield(self._failed), self.scenario.duration_s)
        except TimeoutError:
            pass
        except Broken as e:
            failure = Failure(invariant=e.invariant, detail=e.detail, at_s=_now(), led_up=tuple(self.journal.tail))
        finally:
            await self._close(failed=failure is not None)
        return failure

    async def _close(self, *, failed: bool) -> None:
        self._now_s = _now()
        for node in self.nodes:
            node.account()
        self._figures = None if failed else figures_of(self.scenario, self.site, self.nodes, self._now_s)
        self._crew.stop()
        for node in self.nodes:
            node.die()
        await self.site.end()
        if not self._failed.done():
            self._failed.cancel()

    def outcome(self, failure: Failure | None, wall_s: float) -> Outcome:
        """Return what came out."""
        return Outcome(
            scenario=self.scenario,
            figures=self._figures,
            failure=failure,
            digest=self.journal.digest,
            simulated_s=self._now_s,
            wall_s=wall_s,
            steps=self.watch.steps,
            events=self.journal.lines,
            updated_at_s=tuple(self.watch.updated_at),
        )

    def fail(self, error: BaseException) -> None:
        """End the simulation: something raised."""
        if not self._failed.done():
            self._failed.set_exception(error)

    def _draws(self, name: str) -> random.Random:
        return random.Random(f"{self.scenario.seed} {name}")

    def _dead_since(self, peer: PeerId) -> float | None:
        node = self._by_peer.get(peer)
        return None if node is None else node.dead_since

    def _told(self) -> Iterator[tuple[PeerId, int, int]]:
        for node in self.nodes:
            if node.place.behaviour.kind is None:
                yield node.peer, node.disk.accepted, node.disk.unsettled

    def _kinds(self) -> dict[int, LiarKind]:
        liars: list[LiarKind] = [kind for kind, count in self.scenario.faults.liars.items() for _ in range(count)]
        indices = list(range(self.scenario.swarm.nodes))
        self._draws("liars").shuffle(indices)
        return dict(zip(indices, liars, strict=False))

    def _node(self, index: int, kind: LiarKind | None, overheard: deque[Lease]) -> SimNode:
        scenario, draws = self.scenario, self._draws(f"node {index}")
        faults = scenario.faults
        place = Place(
            index=index,
            run_id=RUN_ID,
            swarm=scenario.swarm,
            speed=speed_of(scenario.swarm, index),
            max_staleness=scenario.work.max_staleness,
            clock=LoopClock(skew_s=draws.gauss(0.0, faults.skew_s), drift=draws.gauss(0.0, faults.drift)),
            delay_s=faults.delay_s * (0.5 + draws.random()),
            network=self.network,
            draws=draws,
            behaviour=Behaviour(
                kind=kind,
                max_staleness=scenario.work.max_staleness,
                truth=self._truth,
                draws=draws,
                overheard=overheard,
            ),
        )
        return SimNode(place, Crew(self.fail))

    # What goes wrong.

    def _begin_weather(self) -> None:
        faults = self.scenario.faults
        self._crew.start(self._look_at_progress())
        if faults.deaths:
            for node in self.nodes:
                self._crew.start(self._mortal(node, self._draws(f"death {node.place.index}")))
        if faults.partitions:
            self._crew.start(self._partitions(self._draws("partitions")))
        if faults.pauses:
            self._crew.start(self._pauses(self._draws("pauses")))
        if faults.full_disks:
            self._crew.start(self._full_disks(self._draws("disk")))
        if faults.crashes:
            self._crew.start(self._crashes(self._draws("crashes")))

    async def _look_at_progress(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.progress.look()

    async def _mortal(self, node: SimNode, draws: random.Random) -> None:
        faults = self.scenario.faults
        while True:
            await asyncio.sleep(draws.expovariate(faults.deaths / 3600))
            node.die()
            self.journal.note(_now(), f"n{node.place.index} dies")
            at_once = draws.random() < BACK_AT_ONCE
            await asyncio.sleep(draws.uniform(0.5, 5.0) if at_once else draws.expovariate(1 / faults.absent_s))
            node.begin(Crew(self.fail))

    async def _partitions(self, draws: random.Random) -> None:
        faults = self.scenario.faults
        while True:
            await asyncio.sleep(draws.expovariate(faults.partitions / 3600))
            count = math.ceil(draws.random() * len(self.nodes) / 2)
            self.network.cut_off = set(draws.sample(range(len(self.nodes)), count))
            self.journal.note(_now(), f"{count} nodes are cut off")
            await asyncio.sleep(draws.expovariate(1 / faults.partition_s))
            self.network.cut_off = set()

    async def _pauses(self, draws: random.Random) -> None:
        faults, site = self.scenario.faults, self.site
        while True:
            await asyncio.sleep(draws.expovariate(faults.pauses / 3600))
            for paused in (True, False):
                while True:
                    if await site.set_paused(paused):
                        break
                    await asyncio.sleep(1.0)
                self.journal.note(_now(), f"paused: {paused}")
                if paused:
                    await asyncio.sleep(draws.expovariate(1 / faults.down_s))

    async def _full_disks(self, draws: random.Random) -> None:
        faults, site = self.scenario.faults, self.site
        while True:
            await asyncio.sleep(draws.expovariate(faults.full_disks / 3600))
            await self._repairs.acquire()
            site.disk_is_full = True
            self.journal.note(_now(), "disk full")
            until = _now() + draws.expovariate(1 / faults.down_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(site.ended_by_disk.wait(), until - _now())
                await site.kill()
            await asyncio.sleep(until - _now())
            site.disk_is_full = False
            site.ended_by_disk.clear()
            if site.life is None:
                site.begin()
            self._repairs.release()

    async def _crashes(self, draws: random.Random) -> None:
        faults = self.scenario.faults
        while True:
            await asyncio.sleep(draws.expovariate(faults.crashes / 3600))
            await self._repairs.acquire()
            await self.site.kill()
            await asyncio.sleep(draws.expovariate(1 / faults.down_s))
            self.site.begin()
            self._repairs.release()


def _now() -> float:
    return asyncio.get_running_loop().time()
