"""Whether the run gets on: an update at least as often as its honest nodes, at their speed, must bring one about.

The bound is generous: a liveness invariant is to find what never comes, not what is a little slow.

    bound = 4 x (batch / honest tokens a second) + attempts x hold + 2 x (step + publish + fetch + load) + 60 s

where `hold` is how long a slot may be in the hands of somebody who never delivers.
"""

import asyncio
from collections.abc import Sequence

from echo_coordinator.simulate.network import Network
from echo_coordinator.simulate.node import SimNode
from echo_coordinator.simulate.scenario import Scenario
from echo_coordinator.simulate.site import Site
from echo_coordinator.simulate.watch import Broken
from echo_coordinator.state.pace import PATIENCE
from echo_coordinator.state.roster import BEATS_TO_LIVE

ENOUGH = 0.5
"""Share of the honest nodes that must be there for anything to be promised."""


class Progress:
    """Since when there should have been an update."""

    def __init__(self, scenario: Scenario, nodes: Sequence[SimNode], site: Site, network: Network) -> None:
        self._scenario = scenario
        self._site = site
        self._network = network
        self._honest = [node for node in nodes if node.place.behaviour.kind is None]
        self._waited_s = 0.0
        """Summed while there was enough to go on with."""
        self._looked_at = 0.0
        self.bound_s = self._bound_s()

    def made(self) -> None:
        """An update is in the ledger."""
        self._waited_s = 0.0

    def look(self) -> None:
        """Call about once a second. Raises Broken."""
        now = asyncio.get_running_loop().time()
        passed_s, self._looked_at = now - self._looked_at, now
        if self._site.state is None or self._site.state.core.paused or not self._honest:
            return
        there = sum(n.is_connected and n.place.index not in self._network.cut_off for n in self._honest)
        if there < ENOUGH * len(self._honest):
            return
        self._waited_s += passed_s
        if self._waited_s > self.bound_s:
            raise Broken(
                "progress",
                f"no update for {self._waited_s:.0f} s with {there} honest nodes there, bound {self.bound_s:.0f} s",
            )

    def _bound_s(self) -> float:
        swarm, work, trainer = self._scenario.swarm, self._scenario.work, self._scenario.trainer
        speed = ENOUGH * sum(node.place.speed for node in self._honest)
        tokens = min(swarm.tokens, work.max_tokens)
        slowest_s = min(4 * swarm.tokens, work.max_tokens) * swarm.places / min(swarm.speeds or swarm.speed)
        batch_s = work.groups_per_update * work.group_size * tokens / max(speed, 1e-9) + slowest_s
        hold_s = 2 * PATIENCE * max(work.lease_target_s, slowest_s) + work.lease_s + 2 * BEATS_TO_LIVE * work.beat_s
        steps_s = trainer.step_s + trainer.publish_s + swarm.fetch_s + swarm.load_s
        flat = trainer.reward**work.group_size + (1 - trainer.reward) ** work.group_size
        again = 1 / max(0.05, 1 - flat) if work.no_signal == "replace" else 1.0
        return 4 * again * batch_s + work.max_attempts * hold_s + 2 * steps_s + 60.0
