"""The two seams of sampling, and what passes through them.

    worker ──► Backend (async, in the node)  ──frames──►  Conductor ──► Engine (sync, in the child)
               load · submit · next_outcome               self-test,     load · submit · step
                                                          swap barrier

An `Engine` computes; a new one (llama.cpp, vLLM) is one class with the methods below. Everything around it is shared:
the process, the frames, the heartbeat, the start-up self-test, and the rule for new weights:

    A load is a barrier. What was submitted before it finishes on the old weights, what is submitted after it waits
    until the swap. So each completion comes from exactly one policy, and an audit can recompute it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol, runtime_checkable

from echo_swarm.errors import BackendFailed
from echo_swarm.trajectory import FinishReason
from echo_swarm.work import BackendReport

MAX_OUTSTANDING = 8192
"""Requests submitted and not yet answered, for one backend. Twice the largest batch that a node may report."""


class LoadRefused(BackendFailed):
    """This version cannot be used (wrong tensors, failed self-test, does not fit); the backend itself lives on.

    Weights may have been overwritten by then: requests fail with `no_policy` until a load succeeds.
    """


class CannotScore(BackendFailed):
    """This engine, or the version it holds, cannot score what was asked; with the reason. It lives on."""


class OutOfMemory(BackendFailed):
    """An allocation failed inside an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One completion to make."""

    request_id: int
    """Chosen by the caller, >= 0, unique among those not yet answered."""
    prompt_ids: tuple[int, ...]
    max_tokens: int
    """Completion only, the end token included."""
    temperature: float
    """0 means greedy."""
    seed: int
    """0 <= seed < 2**63. The only source of randomness: same seed, prompt, weights and batch, same tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished request."""

    request_id: int
    token_ids: "array[int]"
    """array('I'); at least one id; the end token is the last one exactly when `finish_reason` is STOP."""
    logprobs: "array[float]"
    """array('f'); one for each id, of the distribution that was sampled from. Zeros when greedy."""
    finish_reason: FinishReason
    oldest_version: int
    newest_version: int
    artifact_digest: bytes
    """sha256 of the artifact file that was loaded."""


class FailureCode(StrEnum):
    """Why a request has no completion."""

    TOO_LONG = "too_long"
    """Prompt and completion do not fit the run's limits or the model's context; never cut, never shifted."""
    BAD_REQUEST = "bad_request"
    OUT_OF_MEMORY = "out_of_memory"
    """Even alone in the batch it does not fit."""
    NON_FINITE = "non_finite"
    """The model gave NaN or infinite log-probabilities."""
    NO_POLICY = "no_policy"
    """No weights are loaded, because the last load was refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """A request that got no completion; the backend lives on."""

    request_id: int
    code: FailureCode
    reason: str
    """For people, with the figures."""


Outcome = Completion | FailedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFiles:
    """A version on disk, verified, ready to be loaded."""

    policy_version: int
    artifact: Path
    """`model.safetensors` (or another kind that the engine understands); an adapter when there is a `base`."""
    artifact_digest: bytes
    """sha256 of that file; repeated in every completion, not checked again here."""
    model_config_json: str
    """The model's `config.json`. No code is ever loaded from a model."""
    end_token_ids: tuple[int, ...]
    vocabulary_size: int
    """Ids at or above it are never sampled, though the model may have (padding) rows for them."""
    max_prompt_tokens: int
    max_completion_tokens: int
    base: Path | None = None
    """The model that the adapter applies to; None when `artifact` is a whole model."""
    base_digest: bytes = b""
    """sha256 of `base`: an engine that holds it need not read it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTimes:
    """How long a load took inside the child, what ran before it not counted. Seconds."""

    load_s: float = 0.0
    """From the file to an engine that can sample."""
    first_token_s: float = 0.0
    """From there to the first token, which the self-test samples; 0 without a self-test."""
    rest_s: float = 0.0
    """From there to the end of the self-test; from then on requests are served."""

    @property
    def total_s(self) -> float:
        """From the file to serving requests."""
        return self.load_s + self.first_token_s + self.rest_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Completions whose log-probabilities are asked for, made by whatever model."""

    items: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Prompt ids and completion ids, neither empty."""
    temperature: float
    """Above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """A ScoreRequest, answered."""

    logprobs: "tuple[array[float], ...]"
    """array('f') for each item, one for each completion id: what `Completion.logprobs` would hold had they been drawn
    at that temperature."""
    policy_version: int
    artifact_digest: bytes


class Engine(Protocol):
    """Samples. Synchronous, single-threaded, lives in the child process."""

    def load(self, policy: PolicyFiles) -> None:
        """Use these weights from now on. Called only while `pending` is 0.

        Raises:
            LoadRefused: it cannot use them, with the reason.

        """
        ...

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, which the conductor has checked. They are taken in the order of submission."""
        ...

    def step(self) -> list[Outcome]:
        """Advance the whole batch by one token (or, for engines that only wait, look at the clock).

        Returns:
            What finished in this step, in no particular order.

        """
        ...

    def wait_s(self) -> float:
        """Return for how long a step would be in vain; 0 for every engine that computes."""
        ...

    @property
    def pending(self) -> int:
        """Requests submitted and not yet returned by `step`."""
        ...

    def report(self) -> BackendReport:
        """Say what samples here. `batch` may shrink when memory runs out."""
        ...


@runtime_checkable
class ScoringEngine(Protocol):
    """What an engine has beside `Engine` if it can score completions that it did not make."""

    def score(self, request: ScoreRequest) -> "list[array[float]]":
        """Return the log-probabilities of each item's completion under the weights that are loaded.

        They are those that sampling at this temperature would record, from the same arithmetic. Called only while
        `pending` is 0 and after a load; the conductor has checked all ids and lengths.

        Raises:
            CannotScore: with the reason.

        """
        ...


class Backend(Protocol):
    """What the worker uses. One task awaits outcomes, others submit and load."""

    @property
    def report(self) -> BackendReport:
        """What samples here, as of the last frame."""
        ...

    async def load(self, policy: PolicyFiles) -> LoadTimes:
        """Swap to `policy`; returns once new requests are answered by it.

        Raises:
            LoadRefused: this version cannot be used; the backend lives on.
            BackendFailed: the backend is gone.

        """
        ...

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, at most MAX_OUTSTANDING unanswered ones. Raises BackendFailed when the backend is gone."""
        ...

    async def score(self, request: ScoreRequest) -> Scores:
        """Score completions as soon as nothing runs: at once when idle, else before the next load.

        Raises:
            CannotScore: with the reason; the backend lives on.
            BackendFailed: the backend is gone.

        """
        ...

    async def next_outcome(self) -> Outcome:
        """Return the next completion or failure, in order of finishing. Raises BackendFailed when it is gone."""
        ...


def fault_in_scoring(request: ScoreRequest, policy: PolicyFiles) -> str | None:
    """Return why `request` cannot be scored under `policy`, or None. Sizes before content."""
    for prompt, completion in request.items:
        longest = policy.max_prompt_tokens + policy.max_completion_tokens
        if not prompt or not completion or len(prompt) + len(completion) > longest:
            return f"a prompt of {len(prompt)} and a completion of {len(completion)} tokens; both at most {longest}"
        if not 0 <= min(*prompt, *completion) <= max(*prompt, *completion) < policy.vocabulary_size:
            return f"an id lies outside the vocabulary of {policy.vocabulary_size}"
    if not 0 < request.temperature <= 10:
        return f"temperature {request.temperature} is out of range"
    return None


def check_request(request: GenerationRequest, policy: PolicyFiles) -> FailedRequest | None:
    """Return why `request` cannot be served under `policy`, or None. Sizes before content."""
    prompt = len(request.prompt_ids)
    if prompt > policy.max_prompt_tokens or request.max_tokens > policy.max_completion_tokens:
        return FailedRequest(
            request_id=request.request_id,
            code=FailureCode.TOO_LONG,
            reason=f"prompt of {prompt} tokens and completion of up to {request.max_tokens}; "
            f"this run allows {policy.max_prompt_tokens} and {policy.max_completion_tokens}",
        )
    problem = None
    if prompt < 1 or request.max_tokens < 1:
        problem = "the prompt is empty, or no token is asked for"
    elif not (0 <= request.seed < 2**63 and 0 <= request.temperature <= 10):
        problem = f"seed {request.seed} or temperature {request.temperature} is out of range"
    elif not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < policy.vocabulary_size:
        problem = f"a prompt id lies outside the vocabulary of {policy.vocabulary_size}"
    if problem is None:
        return None
    return FailedRequest(request_id=request.request_id, code=FailureCode.BAD_REQUEST, reason=problem)
