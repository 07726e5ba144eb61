"""The order in which an engine loads and samples. No IO: commands in, events out.

Submit ─► engine ─► outcomes
Load   ─► waits until the engine is empty ─► load + self-test ─► Loaded | Refused
Submit after a waiting Load ─► held until that load is done

Score  ─► waits until the engine is empty, behind nothing else ─► Scored

Scoring comes when the engine is idle, or has run empty for a load, and so holds nothing up. Only where that does not
happen for SCORE_PATIENCE_STEPS, new requests are held until the engine has run empty for it.

A request that cannot be served is answered here, so that an engine sees only good ones.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from echo_node.backends.base import (
    CannotScore,
    Completion,
    Engine,
    FailedRequest,
    FailureCode,
    GenerationRequest,
    LoadRefused,
    LoadTimes,
    Outcome,
    PolicyFiles,
    ScoreRequest,
    Scores,
    ScoringEngine,
    check_request,
    fault_in_scoring,
)

SCORE_PATIENCE_STEPS = 256
SELF_TEST_TOKENS = 8
SELF_TEST_STEPS = 10_000
"""Bounds a broken engine that never finishes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """A load is done. `reason` is None when it succeeded."""

    load_id: int
    reason: str | None
    times: LoadTimes = field(default_factory=LoadTimes, compare=False)
    """Zeros when it was refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """A ScoreRequest is done: scores, or why there are none."""

    score_id: int
    scores: Scores | str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    load_id: int
    policy: PolicyFiles


Event = Outcome | LoadResult | ScoreResult


class Conductor:
    """Drives one engine (see the module's docstring). `now` is in seconds and never goes back."""

    def __init__(
        self, engine: Engine, *, with_self_test: bool = True, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.engine = engine
        self._with_self_test = with_self_test
        self._now = now
        self._policy: PolicyFiles | None = None
        self._held: deque[_Load | Sequence[GenerationRequest]] = deque()
        self._failed: list[FailedRequest] = []
        self._to_score: deque[tuple[int, ScoreRequest]] = deque()
        self._steps_waited = 0
        """For which the first of these has waited."""

    def load(self, load_id: int, policy: PolicyFiles) -> None:
        """Queue a swap; `advance` returns its LoadResult."""
        self._held.append(_Load(load_id=load_id, policy=policy))

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests behind any swap that waits. Those that cannot be served fail in the next `advance`."""
        if self._held or self._steps_waited >= SCORE_PATIENCE_STEPS:
            self._held.append(requests)
        else:
            self._feed(requests)

    def score(self, score_id: int, request: ScoreRequest) -> None:
        """Queue completions to score; `advance` returns their ScoreResult."""
        self._to_score.append((score_id, request))

    def advance(self) -> list[Event]:
        """Do the next thing: swap when the engine is empty and a load waits, else one step."""
        events: list[Event] = [*self._failed]
        self._failed.clear()
        if self.engine.pending:
            events += self.engine.step()
            self._steps_waited += bool(self._to_score)
        elif self._to_score:
            events.append(self._score(*self._to_score.popleft()))
            self._steps_waited = 0
            self._release()
        elif self._held:
            events.append(self._swap_and_release())
        return events

    @property
    def pending(self) -> int:
        """Requests and loads not yet answered."""
        held = sum(1 if isinstance(item, _Load) else len(item) for item in self._held)
        return self.engine.pending + len(self._failed) + len(self._to_score) + held

    def wait_s(self, idle_s: float) -> float:
        """Return for how long `advance` would be in vain: `idle_s` when there is nothing to do."""
        if self._failed:
            return 0.0
        if self.engine.pending:
            return min(idle_s, self.engine.wait_s())
        return 0.0 if self._held or self._to_score else idle_s

    def _feed(self, requests: Sequence[GenerationRequest]) -> None:
        good: list[GenerationRequest] = []
        for request in requests:
            refusal = self._refusal(request)
            if refusal is None:
                good.append(request)
            else:
                self._failed.append(refusal)
        if good:
            self.engine.submit(good)

    def _refusal(self, request: GenerationRequest) -> FailedRequest | None:
        if self._policy is not None:
            return check_request(request, self._policy)
        reason = "no weights are loaded, or the last load was refused"
        return FailedRequest(request_id=request.request_id, code=FailureCode.NO_POLICY, reason=reason)

    def _score(self, score_id: int, request: ScoreRequest) -> ScoreResult:
        policy, engine = self._policy, self.engine
        if policy is None:
            return ScoreResult(score_id=score_id, scores="no weights are loaded, or the last load was refused")
        if not isinstance(engine, ScoringEngine):
            return ScoreResult(score_id=score_id, scores=f"the backend {engine.report().backend} cannot score")
        if problem := fault_in_scoring(request, policy):
            return ScoreResult(score_id=score_id, scores=problem)
        try:
            logprobs = tuple(engine.score(request))
        except CannotScore as e:
            return ScoreResult(score_id=score_id, scores=str(e) or "the engine gave no reason")
        scores = Scores(logprobs=logprobs, policy_version=policy.policy_version, artifact_digest=policy.artifact_digest)
        return ScoreResult(score_id=score_id, scores=scores)

    def _swap_and_release(self) -> LoadResult:
        load = self._held.popleft()
        # Submissions are held only behind a load or scoring, and all of them up to the next load go on after it.
        assert isinstance(load, _Load)
        done = self._swap(load.policy)
        self._release()
        if isinstance(done, str):
            return LoadResult(load_id=load.load_id, reason=done)
        return LoadResult(load_id=load.load_id, reason=None, times=done)

    def _release(self) -> None:
        while self._held and not isinstance(requests := self._held[0], _Load):
            self._held.popleft()
            self._feed(requests)

    def _swap(self, policy: PolicyFiles) -> LoadTimes | str:
        """Load and test. Returns how long it took, or why the version cannot be used."""
        self._policy = None
        began_s = self._now()
        try:
            self.engine.load(policy)
            loaded_s = first_s = self._now()
            if self._with_self_test:
                first_s = self_test(self.engine, policy, self._now)
        except LoadRefused as e:
            return str(e)
        self._policy = policy
        return LoadTimes(load_s=loaded_s - began_s, first_token_s=first_s - loaded_s, rest_s=self._now() - first_s)


def self_test(engine: Engine, policy: PolicyFiles, now: Callable[[], float] = time.monotonic) -> float:
    """Sample two short completions and look at what comes back.

    A node whose log-probabilities are missing, misaligned or NaN would poison training, so it must not join.

    Returns:
        When the first token was there: after the first step, which is enough for prompts this short.

    Raises:
        LoadRefused: saying what was wrong.

    """
    prompt = tuple(i % policy.vocabulary_size for i in range(1, 1 + min(4, policy.max_prompt_tokens)))
    tokens = min(SELF_TEST_TOKENS, policy.max_completion_tokens)
    engine.submit(
        [
            GenerationRequest(request_id=i, prompt_ids=prompt, max_tokens=tokens, temperature=1.0, seed=i)
            for i in range(2)
        ]
    )
    outcomes = engine.step()
    first_s = now()
    for _ in range(SELF_TEST_STEPS):
        if not engine.pending:
            break
        outcomes += engine.step()
    if engine.pending or len(outcomes) != 2:
        raise LoadRefused(f"self-test: {len(outcomes)} of 2 completions came back")
    for outcome in outcomes:
        if problem := fault_in(outcome, policy):
            raise LoadRefused(f"self-test: {problem}")
    return first_s


def fault_in(outcome: Outcome, policy: PolicyFiles) -> str | None:
    """Return what is wrong with a completion, or None: lengths, range of ids, finite log-probabilities <= 0."""
    if not isinstance(outcome, Completion):
        return outcome.reason
    ids, logprobs = outcome.token_ids, outcome.logprobs
    if not len(ids):
        return "a completion without tokens"
    if logprobs is None or len(logprobs) != len(ids):  # pyright: ignore[reportUnnecessaryComparison]
        count = "no" if logprobs is None else str(len(logprobs))  # pyright: ignore[reportUnnecessaryComparison]
        return f"{count} log-probabilities for {len(ids)} tokens"
    if max(ids) >= policy.vocabulary_size:
        return f"token id {max(ids)} outside the vocabulary of {policy.vocabulary_size}"
    if bad := [value for value in logprobs if not (math.isfinite(value) and value <= 0)]:
        return f"a log-probability of {bad[0]}"
    return None
