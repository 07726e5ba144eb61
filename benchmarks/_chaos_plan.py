"""Who is killed in a round, and when: drawn, with a preference for phases that were hit seldom so far."""

from collections import Counter
from collections.abc import Callable
from random import Random

from benchmarks._chaos_processes import Aim

NODE_PHASES = ("fetching", "verifying", "loading", "pruning", "applying")
AGAIN_PHASES = ("starting", "resuming", "fetching", "verifying")
"""For a node that was killed in this round already."""
COORDINATOR_PHASES = ("writing a checkpoint", "publishing", "making a delta")
ONLY_DELTA = ("applying", "making a delta")
TIMED_S = {"idle": 3.0, "starting": 5.0}
"""Moments that are counted from the round's or the process' start, not said by the process; the longest."""
COORDINATOR_SHARE = 0.35
AGAIN_SHARE = 0.3


class Planner:
    """Draws.

    Args:
        nodes: names.
        seed: of the draws. What is drawn also follows from what was hit, and so from the machine.
        hits: what was hit so far; the coordinator's phases begin with its name.
        usual_s: how long a phase lasts, as a rule.

    """

    def __init__(self, nodes: list[str], seed: int, hits: Counter[str], usual_s: Callable[[str], float]) -> None:
        self._nodes = nodes
        self._random = Random(seed)
        self._hits = hits
        self._usual_s = usual_s

    def round(self, *, delta: bool) -> dict[str, Aim]:
        """Return who is killed in a round, and when."""
        count = min(len(self._nodes), self._random.choices((1, 2, 3), (5, 4, 1))[0])
        victims = self._random.sample(self._nodes, count)
        plan = {victim: self._aim((*NODE_PHASES, "idle"), delta=delta) for victim in victims}
        if self._random.random() < COORDINATOR_SHARE:
            plan["coordinator"] = self._aim((*COORDINATOR_PHASES, "idle"), delta=delta, who="coordinator ")
        return plan

    def again(self) -> Aim | None:
        """Return whether and when a node that starts again is killed once more."""
        return self._aim(AGAIN_PHASES, delta=True) if self._random.random() < AGAIN_SHARE else None

    def _aim(self, phases: tuple[str, ...], *, delta: bool, who: str = "") -> Aim:
        names = [phase for phase in phases if delta or phase not in ONLY_DELTA]
        weights = [1 / (1 + self._hits[who + name]) for name in names]
        phase = self._random.choices(names, weights)[0]
        longest_s = TIMED_S.get(phase) or self._usual_s(phase)
        return Aim(phase=phase, delay_s=self._random.uniform(0.0, longest_s))
