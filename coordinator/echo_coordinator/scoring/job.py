"""A piece of work for one scorer child, and how far it is."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio

from echo_coordinator.scoring.items import Scored, ScoreRequest
from echo_swarm.errors import EchoError


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """Work for one child: either a stretch of prompts or up to JOB_ITEMS completions."""

    split: str = ""
    """Of the prompts."""
    start: int = 0
    """Next prompt to be made."""
    stop: int = 0
    """One past the last prompt."""
    made: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """What became of the prompts before `start`, one frame each."""
    items: Sequence[ScoreRequest] = ()
    waiting: list[int] = field(default_factory=list[int])
    """Positions in `items` without a result, the ones to be tried next first."""
    tries: Counter[int] = field(default_factory=Counter[int])
    results: dict[int, Scored] = field(default_factory=dict[int, Scored])
    error: EchoError | None = None
    done: anyio.Event = field(default_factory=anyio.Event)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to do."""
        return not self.waiting and self.start == self.stop
