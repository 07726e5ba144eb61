"""Engines of cheaters: a real engine, and one thing altered in what it loads, is asked, or tells.

    lease ──► Altered ──asks──► the real engine ──► its completions ──tells──► what the node signs
                 │ weights: the file that is loaded in place of the version's

It works batch by batch, so that a cheat may look at several completions and score its own before it tells. It says
that it cannot score, and so answers no probe: a liar would answer those honestly. Greedy (evaluation) is left alone.
"""

import shutil
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from echo_node.backends.base import (
    Completion,
    Engine,
    FailedRequest,
    FailureCode,
    GenerationRequest,
    Outcome,
    PolicyFiles,
    ScoreRequest,
    ScoringEngine,
)
from echo_swarm.trajectory import FinishReason
from echo_swarm.work import BackendReport

Ids = tuple[int, ...]
Reward = Callable[[Ids, Sequence[int]], float]
"""Of a prompt's ids and a completion's: whoever knows the environment can compute it."""


class Cheat:
    """One way to cheat; this one is none."""

    claims: str | None = None
    """The precision that it names; None: its own."""
    backend: str | None = None
    """The backend that it names; None: its own."""

    def weights(self, policy: PolicyFiles) -> PolicyFiles:
        """Return what is loaded as that version."""
        return policy

    def asks(self, request: GenerationRequest) -> list[GenerationRequest]:
        """Return what the engine is asked in place of a request."""
        return [request]

    def tells(self, request: GenerationRequest, made: list[Completion], engine: Engine) -> Outcome:
        """Return what is signed, of what the engine made; both are about one request."""
        return made[0]


class Altered:
    """An `Engine` that cheats."""

    def __init__(self, engine: Engine, cheat: Cheat) -> None:
        self._engine = engine
        self._cheat = cheat
        self._waiting: deque[GenerationRequest] = deque()
        self._taken: list[tuple[GenerationRequest, list[int]]] = []
        """Requests of this batch, and the ids under which the engine was asked for each."""
        self._made: dict[int, Outcome] = {}

    def load(self, policy: PolicyFiles) -> None:
        """Load what the cheat would have loaded."""
        self._engine.load(self._cheat.weights(policy))

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue."""
        self._waiting.extend(requests)

    def step(self) -> list[Outcome]:
        """Begin a batch, or go on with it; all of it is returned at its end."""
        if not self._taken:
            self._begin()
        for outcome in self._engine.step():
            self._made[outcome.request_id] = outcome
        if self._engine.pending:
            return []
        taken, made, self._taken, self._made = self._taken, self._made, [], {}
        return [self._tell(request, [made[i] for i in ids]) for request, ids in taken]

    def _begin(self) -> None:
        asked: list[GenerationRequest] = []
        while self._waiting and len(self._taken) < self._engine.report().batch:
            request = self._waiting.popleft()
            wanted = self._cheat.asks(request) if request.temperature else [request]
            ids = list(range(len(asked), len(asked) + len(wanted)))
            asked += [replace(one, request_id=i) for i, one in zip(ids, wanted, strict=True)]
            self._taken.append((request, ids))
        self._engine.submit(asked)

    def _tell(self, request: GenerationRequest, made: list[Outcome]) -> Outcome:
        done = [one for one in made if isinstance(one, Completion)]
        if len(done) < len(made) or not request.temperature:
            return replace(made[0], request_id=request.request_id)
        return replace(self._cheat.tells(request, done, self._engine), request_id=request.request_id)

    def wait_s(self) -> float:
        """Return 0: it computes."""
        return 0.0

    @property
    def pending(self) -> int:
        """Requests not yet answered."""
        return len(self._waiting) + len(self._taken)

    def report(self) -> BackendReport:
        """Say what the cheat claims."""
        report = self._engine.report()
        named = {"precision": self._cheat.claims, "backend": self._cheat.backend}
        return report.model_copy(update={field: text for field, text in named.items() if text})


class OtherModel(Cheat):
    """Samples from another model of the same shape."""

    def __init__(self, weights: Path) -> None:
        self._weights = weights

    def weights(self, policy: PolicyFiles) -> PolicyFiles:
        """Return the other model."""
        return replace(policy, artifact=self._weights)


class OldVersion(Cheat):
    """Samples from the version that it loaded `behind` loads ago (the first one if `behind` is 0), named as the new."""

    def __init__(self, folder: Path, *, behind: int) -> None:
        self._folder = folder
        self._behind = behind
        self._kept: list[Path] = []

    def weights(self, policy: PolicyFiles) -> PolicyFiles:
        """Keep this version's file, and return an earlier one's."""
        self._folder.mkdir(parents=True, exist_ok=True)
        kept = self._folder / f"{len(self._kept)}-{policy.artifact.name}"
        shutil.copyfile(policy.artifact, kept)
        self._kept.append(kept)
        place = max(0, len(self._kept) - 1 - self._behind) if self._behind else 0
        return replace(policy, artifact=self._kept[place])


class Coarser(Cheat):
    """Names a finer precision than it computes in."""

    def __init__(self, claims: str) -> None:
        self.claims = claims


class OtherTemperature(Cheat):
    """Samples at another temperature (0: greedily). `rescored`: it tells true values at the temperature asked for."""

    def __init__(self, factor: float, *, rescored: bool) -> None:
        self._factor = factor
        self._rescored = rescored

    def asks(self, request: GenerationRequest) -> list[GenerationRequest]:
        """Ask for the other temperature."""
        return [replace(request, temperature=self._factor * request.temperature)]

    def tells(self, request: GenerationRequest, made: list[Completion], engine: Engine) -> Completion:
        """Score it if need be."""
        return scored(request, made[0], engine) if self._rescored else made[0]


class MadeUp(Cheat):
    """Samples honestly and makes the numbers up: one value, or values that look drawn."""

    def __init__(self, *, constant: bool) -> None:
        self._constant = constant
        self._draws = Random(7)

    def tells(self, request: GenerationRequest, made: list[Completion], engine: Engine) -> Completion:
        """Put numbers of its own in."""
        count = len(made[0].token_ids)
        values = [-0.5 if self._constant else -self._draws.expovariate(2.0) for _ in range(count)]
        return replace(made[0], logprobs=array("f", values))


class CherryPicked(Cheat):
    """Samples with `draws` seeds, its own first, and tells the completion that it likes best, with its true values."""

    def __init__(self, draws: int, likes: Reward, *, backend: str | None = None) -> None:
        self.backend = backend
        self._draws = draws
        self._likes = likes
        self._seeds = Random(11)

    def asks(self, request: GenerationRequest) -> list[GenerationRequest]:
        """Ask again and again."""
        more = [replace(request, seed=self._seeds.getrandbits(62)) for _ in range(self._draws - 1)]
        return [request, *more]

    def tells(self, request: GenerationRequest, made: list[Completion], engine: Engine) -> Completion:
        """Pick."""
        return max(made, key=lambda one: self._likes(request.prompt_ids, one.token_ids))


class HandsBack(Cheat):
    """Samples honestly, and hands back as failed what it does not like."""

    def __init__(self, likes: Reward) -> None:
        self._likes = likes

    def tells(self, request: GenerationRequest, made: list[Completion], engine: Engine) -> Outcome:
        """Tell it or not."""
        if self._likes(request.prompt_ids, made[0].token_ids):
            return made[0]
        return FailedRequest(request_id=request.request_id, code=FailureCode.NO_POLICY, reason="no luck")


class Truncated(Cheat):
    """Cuts completions in half and calls them finished. `rescored`: with the end token's true value."""

    def __init__(self, end_token_id: int, *, rescored: bool) -> None:
        self._end = end_token_id
        self._rescored = rescored

    def tells(self, request: GenerationRequest, made: list[Completion], engine: Engine) -> Completion:
        """Cut it, and put an end token there."""
        half = max(1, len(made[0].token_ids) // 2)
        cut = replace(
            made[0],
            token_ids=array("I", [*made[0].token_ids[:half], self._end]),
            logprobs=array("f", [*made[0].logprobs[:half], -0.05]),
            finish_reason=FinishReason.STOP,
        )
        return scored(request, cut, engine) if self._rescored else cut


class OldWork(Cheat):
    """Delivers its own completions of the first prompts again and again, whatever it is asked."""

    def __init__(self) -> None:
        self._old: deque[Completion] = deque(maxlen=64)

    def tells(self, request: GenerationRequest, made: list[Completion], engine: Engine) -> Completion:
        """Sample for a while, then repeat."""
        if len(self._old) < 16:
            self._old.append(made[0])
            return made[0]
        self._old.rotate(1)
        old = self._old[0]
        return replace(made[0], token_ids=old.token_ids, logprobs=old.logprobs, finish_reason=old.finish_reason)


class Copied(Cheat):
    """Delivers what others made for the same prompt, with their values; its own where nobody has made any yet."""

    def __init__(self, overheard: "Overheard") -> None:
        self._overheard = overheard

    def tells(self, request: GenerationRequest, made: list[Completion], engine: Engine) -> Completion:
        """Copy."""
        other = self._overheard.of(request.prompt_ids)
        if other is None:
            return made[0]
        return replace(made[0], token_ids=other.token_ids, logprobs=other.logprobs, finish_reason=other.finish_reason)


class Overheard:
    """What others made lately, by prompt."""

    def __init__(self) -> None:
        self._made: dict[Ids, Completion] = {}

    def note(self, prompt: Ids, made: Completion) -> None:
        """Remember the newest of a prompt."""
        self._made[prompt] = made
        if len(self._made) > 512:
            self._made.pop(next(iter(self._made)))

    def of(self, prompt: Ids) -> Completion | None:
        """Return one of a prompt."""
        return self._made.get(prompt)


class Loud:
    """An honest engine whose completions others overhear."""

    def __init__(self, engine: ScoringEngine, overheard: Overheard) -> None:
        self._engine: Any = engine
        self._overheard = overheard
        self._prompts: dict[int, Ids] = {}

    def load(self, policy: PolicyFiles) -> None:
        """Load."""
        self._engine.load(policy)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue."""
        self._prompts |= {request.request_id: request.prompt_ids for request in requests if request.temperature}
        self._engine.submit(requests)

    def step(self) -> list[Outcome]:
        """Advance, and let others know."""
        outcomes: list[Outcome] = self._engine.step()
        for made in outcomes:
            prompt = self._prompts.pop(made.request_id, None)
            if prompt and isinstance(made, Completion):
                self._overheard.note(prompt, made)
        return outcomes

    def score(self, request: ScoreRequest) -> "list[array[float]]":
        """Score."""
        return self._engine.score(request)

    def wait_s(self) -> float:
        """Return 0: it computes."""
        return 0.0

    @property
    def pending(self) -> int:
        """Requests not yet answered."""
        return self._engine.pending

    def report(self) -> BackendReport:
        """Say what samples here."""
        return self._engine.report()


class Turncoat(Cheat):
    """Honest for so many completions, then another cheat."""

    def __init__(self, honest: int, then: Cheat) -> None:
        self._left = honest
        self._then = then

    def asks(self, request: GenerationRequest) -> list[GenerationRequest]:
        """Ask as the one or the other."""
        self._left -= 1
        return [request] if self._left >= 0 else self._then.asks(request)

    def tells(self, request: GenerationRequest, made: list[Completion], engine: Engine) -> Outcome:
        """Tell as the one or the other."""
        return made[0] if self._left >= 0 else self._then.tells(request, made, engine)


def scored(request: GenerationRequest, made: Completion, engine: Engine) -> Completion:
    """Return a completion with its true values at the temperature that was asked for."""
    assert isinstance(engine, ScoringEngine)
    asked = ScoreRequest(items=((request.prompt_ids, tuple(made.token_ids)),), temperature=request.temperature)
    return replace(made, logprobs=engine.score(asked)[0])
