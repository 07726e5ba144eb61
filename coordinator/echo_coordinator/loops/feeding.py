"""Keeps the swarm supplied: prompts become groups as capacity allows, completions become rewards."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import anyio

from echo_coordinator.scoring.pool import Prompt as ScorerPrompt
from echo_coordinator.scoring.pool import Scored, ScoreRequest
from echo_coordinator.state.batch import Prompt, Score, ScoreItem
from echo_coordinator.state.run_state import RunState
from echo_swarm.errors import SettingsError

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
PROMPTS_AT_ONCE = 256
SCORES_AT_ONCE = 64
EMPTY_TRIES = 16
"""Stretches of the training set without one usable prompt after which the settings must be wrong."""


class Scorers(Protocol):
    """Where prompts and rewards come from: `scoring.pool.ScorerPool`, or anything that keeps its promises."""

    async def prompts(self, split: str, start: int, count: int) -> list[ScorerPrompt]:
        """Return the usable prompts among `count` indices from `start`."""
        ...

    def why_skipped(self) -> str:
        """Return the most common reason for leaving prompts out, empty if none was."""
        ...

    def held_up(self) -> str:
        """Return what takes unusually long to make, for the status; empty if nothing does."""
        ...

    async def score(self, items: Sequence[ScoreRequest]) -> list[Scored]:
        """Return one result for each item, in order."""
        ...


async def feed_prompts(state: RunState, pool: Scorers, groups_left: Callable[[], int | None]) -> None:
    """Add training groups whenever capacity allows, until cancelled.

    Args:
        state: the run.
        pool: where prompts come from.
        groups_left: groups that all remaining updates need together; None without an end. No more are started.

    Raises:
        SettingsError: the environment has no prompt that fits `max_prompt_tokens`.

    """
    stock = _Stock(pool, state.admission.next_prompt_index)
    while True:
        wanted = state.admission.wanted
        left = groups_left()
        if left is not None:
            wanted = min(wanted, left - state.admission.in_flight)
        if wanted > 0:
            # In one go, so that a sequential step is one reply to a node that can take it whole.
            await state.admission.add(await stock.take(min(wanted, PROMPTS_AT_ONCE)))
            continue
        # Fetched ahead while the swarm works, so that nobody waits for prompts when the next version is out.
        ahead = min(state.core.settings.groups_per_update, PROMPTS_AT_ONCE, PROMPTS_AT_ONCE if left is None else left)
        if not await stock.fill(ahead):
            await state.wait_changed(LOOK_AGAIN_S)


class _Stock:
    """Prompts fetched ahead. Nothing is lost with it: positions count from what was added as a group."""

    def __init__(self, pool: Scorers, start: int) -> None:
        self._pool = pool
        self._next = start
        self._ready: deque[Prompt] = deque()

    async def fill(self, count: int) -> bool:
        """Have at least `count` prompts ready. Returns whether any had to be fetched."""
        empty, had = 0, len(self._ready)
        while len(self._ready) < count:
            missing = count - len(self._ready)
            found = await self._pool.prompts("train", self._next, missing)
            self._next += missing
            self._ready.extend(Prompt(index=prompt.index, prompt_ids=prompt.prompt_ids) for prompt in found)
            empty = 0 if found else empty + 1
            if empty >= EMPTY_TRIES:
                raise SettingsError(
                    "the environment gave no usable prompt; most were left out because of: "
                    f"{self._pool.why_skipped() or 'nothing was said'} (see environment.max_prompt_tokens and, for the "
                    "prompt's text, environment.settings in docs/settings.md)"
                )
        return len(self._ready) > had

    async def take(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts, in order."""
        await self.fill(count)
        return [self._ready.popleft() for _ in range(count)]


async def score_completions(state: RunState, pool: Scorers) -> None:
    """Score accepted completions as they come, until cancelled. Run one task for each scorer process."""
    while True:
        items = await state.rewards.take(SCORES_AT_ONCE)
        if not items:
            await state.wait_changed(LOOK_AGAIN_S)
            continue
        try:
            scores = await _score(pool, items)
        except BaseException:
            state.rewards.requeue(items)
            raise
        await state.rewards.record(scores)


async def _score(pool: Scorers, items: list[ScoreItem]) -> list[Score]:
    requests = [ScoreRequest(split=item.kind, index=item.prompt_index, token_ids=item.token_ids) for item in items]
    scored = await pool.score(requests)
    failures = [result.failure for result in scored if result.failure]
    if failures:
        log.warning("%d of %d completions could not be scored: %s", len(failures), len(items), failures[0])
    return [
        Score(group_id=item.group_id, member=item.member, reward=result.reward)
        for item, result in zip(items, scored, strict=True)
    ]


async def tick(state: RunState) -> None:
    """Let leases and silent peers expire, until cancelled."""
    while True:
        await anyio.sleep(1.0)
        await state.tick()
