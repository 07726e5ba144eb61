"""Prompts and rewards, made up: the same for the same prompt and tokens."""

import random
import zlib
from collections.abc import Sequence

from echo_coordinator.scoring.items import Prompt, Scored, ScoreRequest
from echo_swarm import codec

PROMPT_TOKENS = 32


class SimPool:
    """A `Scorers` whose verifier takes no time."""

    def __init__(self, reward: float, unscorable: float, draws: random.Random) -> None:
        """Describe it.

        Args:
            reward: chance that a completion is right.
            unscorable: share of completions for which the verifier fails.
            draws: for failures.

        """
        self._reward = reward
        self._unscorable = unscorable
        self._draws = draws

    async def prompts(self, split: str, start: int, count: int) -> list[Prompt]:
        """Return prompts that differ."""
        return [
            Prompt(index=i, prompt_ids=codec.pack_u32([5, 20 + i % 900] + [6] * (PROMPT_TOKENS - 2)), text="")
            for i in range(start, start + count)
        ]

    def why_skipped(self) -> str:
        """None is."""
        return ""

    def held_up(self) -> str:
        """Nothing is."""
        return ""

    async def score(self, items: Sequence[ScoreRequest]) -> list[Scored]:
        """Toss a coin for each, always the same for the same completion."""
        return [self._score(item) for item in items]

    def _score(self, item: ScoreRequest) -> Scored:
        if self._unscorable and self._draws.random() < self._unscorable:
            return Scored(reward=None, failure="the verifier failed", text="")
        tossed = zlib.crc32(item.token_ids, item.index) / 2**32
        return Scored(reward=float(tossed < self._reward), failure=None, text="")
