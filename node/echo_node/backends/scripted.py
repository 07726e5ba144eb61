"""An engine without a model: tokens, log-probabilities, lengths and times from a hash. For tests and load.

Everything about a completion but its time is a function of (seed, prompt, policy version); at temperature 0 of
(prompt, policy version). The log-probability of a token is one of (prompt, policy version, place, token), so that
given completions can be scored. Times are lognormal and also follow from the seed. The engine never sleeps: it looks at
a clock that is passed in, and `wait_s` tells its caller when the next completion is due.
"""

import hashlib
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from echo_node.backends.base import (
    CannotScore,
    Completion,
    GenerationRequest,
    LoadRefused,
    Outcome,
    PolicyFiles,
    ScoreRequest,
)
from echo_node.backends.options import ScriptedOptions
from echo_swarm import __version__
from echo_swarm.codec import pack_u32
from echo_swarm.trajectory import FinishReason
from echo_swarm.work import BackendReport

_MASK = 2**64 - 1
_STRIDE = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, odd: neighbours come out far apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slot:
    due_s: float
    completion: Completion


class ScriptedEngine:
    """A deterministic `Engine`. Importable and runnable without torch."""

    def __init__(self, options: ScriptedOptions | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        self.options = options or ScriptedOptions()
        self._now = now
        self._policy: PolicyFiles | None = None
        self._waiting: deque[GenerationRequest] = deque()
        self._running: list[_Slot] = []

    def load(self, policy: PolicyFiles) -> None:
        """Take the version's number and digest; the file must exist but is not read (see `Engine.load`)."""
        if not policy.artifact.is_file():
            raise LoadRefused(f"cannot read {policy.artifact}: no such file")
        self._policy = policy

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests (see `Engine.submit`)."""
        self._waiting.extend(requests)

    def step(self) -> list[Outcome]:
        """Return what is due by now, after seating newcomers in free slots (see `Engine.step`)."""
        self._seat()
        now_s = self._now()
        outcomes: list[Outcome] = [slot.completion for slot in self._running if slot.due_s <= now_s]
        self._running = [slot for slot in self._running if slot.due_s > now_s]
        return outcomes

    def score(self, request: ScoreRequest) -> "list[array[float]]":
        """Return what `script` gives to these tokens (see `ScoringEngine.score`), if the options say so."""
        if not self.options.scores:
            raise CannotScore("a scripted backend has no model that could be compared with the trainer's")
        assert self._policy is not None
        version = self._policy.policy_version
        return [script_logprobs(prompt, completion, version) for prompt, completion in request.items]

    def wait_s(self) -> float:
        """Return the time until the next completion is due."""
        self._seat()
        if not self._running:
            return 0.0
        return max(0.0, min(slot.due_s for slot in self._running) - self._now())

    @property
    def pending(self) -> int:
        """Requests submitted and not yet returned."""
        return len(self._waiting) + len(self._running)

    def report(self) -> BackendReport:
        """Say what this is."""
        return BackendReport(
            backend="scripted",
            build=f"scripted {__version__}",
            precision="float32",
            device="none",
            batch=self.options.batch,
        )

    def _seat(self) -> None:
        while self._waiting and len(self._running) < self.options.batch:
            assert self._policy is not None
            request = self._waiting.popleft()
            due_s = self._now() + _lognormal(Random(request.seed), self.options.mean_s, self.options.sigma)
            self._running.append(_Slot(due_s=due_s, completion=script(request, self._policy, self.options)))


def script(request: GenerationRequest, policy: PolicyFiles, options: ScriptedOptions) -> Completion:
    """Return the completion that a scripted node gives to `request` under `policy`; for tests that predict it."""
    greedy = request.temperature == 0
    hashed = hashlib.blake2b(pack_u32(request.prompt_ids), digest_size=16)
    hashed.update(f"{policy.policy_version}/{'greedy' if greedy else request.seed}".encode())
    stream = Random(hashed.digest())
    wanted = max(1, round(_lognormal(stream, options.length, options.length_sigma)))
    length = min(wanted, request.max_tokens)
    ends = frozenset(policy.end_token_ids)
    ids = array("I", (_plain_id(stream, policy.vocabulary_size, ends) for _ in range(length)))
    stopped = wanted <= request.max_tokens
    if stopped:
        ids[-1] = policy.end_token_ids[0]
    zeros = array("f", bytes(4 * length))
    logprobs = zeros if greedy else script_logprobs(request.prompt_ids, ids, policy.policy_version)
    return Completion(
        request_id=request.request_id,
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
        oldest_version=policy.policy_version,
        newest_version=policy.policy_version,
        artifact_digest=policy.artifact_digest,
    )


def script_logprobs(prompt_ids: Sequence[int], ids: Sequence[int], version: int) -> "array[float]":
    """Return the log-probabilities of `ids` after a prompt, exponentially distributed; one array('f')."""
    hashed = hashlib.blake2b(pack_u32(prompt_ids), digest_size=8)
    hashed.update(f"{version}/logprobs".encode())
    base = int.from_bytes(hashed.digest())
    return array("f", (_drawn(base + place * _STRIDE + token_id) for place, token_id in enumerate(ids)))


def _drawn(number: int) -> float:
    """Return minus an exponentially distributed draw, at least -50, for a number (the mixer of splitmix64)."""
    number = (number * _STRIDE) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return max(-50.0, math.log(((number ^ (number >> 31)) + 1) / 2**64))


def _plain_id(stream: Random, vocabulary_size: int, ends: frozenset[int]) -> int:
    """Return an id that does not end a completion. Bounded: a vocabulary of nothing but end tokens has none."""
    for _ in range(1000):
        token_id = stream.randrange(vocabulary_size)
        if token_id not in ends:
            return token_id
    raise LoadRefused("this vocabulary consists of end tokens")


def _lognormal(stream: Random, mean: float, sigma: float) -> float:
    """Draw from the lognormal distribution with that mean; always one draw, so that streams stay aligned."""
    z = stream.gauss(0.0, 1.0)
    return 0.0 if mean == 0 else mean * math.exp(sigma * z - sigma * sigma / 2)
