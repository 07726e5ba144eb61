"""The smallest `Backend`: an engine in this process, without a child. For tests, and for loops that need no isolation.

The event loop stands still during each step, so a node never uses it with an engine that computes.
"""

import math
from collections import deque
from collections.abc import Sequence

import anyio
import anyio.lowlevel

from echo_node.backends.base import (
    CannotScore,
    Engine,
    GenerationRequest,
    LoadRefused,
    LoadTimes,
    Outcome,
    PolicyFiles,
    ScoreRequest,
    Scores,
)
from echo_node.backends.conductor import Conductor, LoadResult, ScoreResult
from echo_swarm.work import BackendReport


class InlineBackend:
    """Steps its engine when the engine has something to do, and sleeps in between."""

    def __init__(self, engine: Engine, *, with_self_test: bool = False) -> None:
        self._conductor = Conductor(engine, with_self_test=with_self_test)
        self._outcomes: deque[Outcome] = deque()
        self._results: dict[int, LoadResult] = {}
        self._loads = 0
        self._scores: dict[int, Scores | str] = {}
        self._to_score = 0
        self._changed = anyio.Event()

    @property
    def report(self) -> BackendReport:
        """What samples here."""
        return self._conductor.engine.report()

    async def load(self, policy: PolicyFiles) -> LoadTimes:
        """Swap weights (see `Backend.load`)."""
        load_id = self._loads
        self._loads += 1
        self._conductor.load(load_id, policy)
        self._notify()
        while load_id not in self._results:
            await self._advance()
        result = self._results.pop(load_id)
        if result.reason is not None:
            raise LoadRefused(f"refused version {policy.policy_version}: {result.reason}")
        return result.times

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests (see `Backend.submit`)."""
        self._conductor.submit(requests)
        self._notify()
        await anyio.lowlevel.checkpoint()

    async def score(self, request: ScoreRequest) -> Scores:
        """Score completions (see `Backend.score`)."""
        score_id = self._to_score
        self._to_score += 1
        self._conductor.score(score_id, request)
        self._notify()
        while score_id not in self._scores:
            await self._advance()
        scores = self._scores.pop(score_id)
        if isinstance(scores, str):
            raise CannotScore(scores)
        return scores

    async def next_outcome(self) -> Outcome:
        """Return what finished next (see `Backend.next_outcome`)."""
        while not self._outcomes:
            await self._advance()
        return self._outcomes.popleft()

    async def _advance(self) -> None:
        """Wait until the engine is due or somebody submits, loads or advances; then do the next thing."""
        # At least a checkpoint, so that others run between two steps.
        with anyio.move_on_after(self._conductor.wait_s(idle_s=math.inf)):
            await self._changed.wait()
            return
        for event in self._conductor.advance():
            if isinstance(event, LoadResult):
                self._results[event.load_id] = event
            elif isinstance(event, ScoreResult):
                self._scores[event.score_id] = event.scores
            else:
                self._outcomes.append(event)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
