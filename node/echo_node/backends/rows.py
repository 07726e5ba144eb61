"""A running sequence: what was drawn so far, and when it ends. Shared by the engines that draw tokens themselves."""

import math
from array import array
from dataclasses import dataclass, field
from random import Random
from typing import Self

from echo_node.backends.base import Completion, FailedRequest, FailureCode, GenerationRequest, Outcome, PolicyFiles
from echo_swarm.trajectory import FinishReason


@dataclass(slots=True, kw_only=True)
class Row:
    """One sequence of the batch."""

    request: GenerationRequest
    call: int
    """Number of the submit call that brought it."""
    uniforms: Random
    """The sequence's own randomness: its n-th token uses the n-th `random()`, whoever shares its batch."""
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))

    @classmethod
    def start(cls, request: GenerationRequest, call: int) -> Self:
        """Return a row at its prompt's end."""
        return cls(request=request, call=call, uniforms=Random(request.seed))

    @property
    def last_id(self) -> int:
        """What the model reads next."""
        return self.token_ids[-1]

    def append(self, token_id: int, logprob: float, policy: PolicyFiles) -> Outcome | None:
        """Add a token. Returns the outcome when it was the last one: end token (kept, with its logprob) or limit."""
        if not math.isfinite(logprob):
            return FailedRequest(
                request_id=self.request.request_id,
                code=FailureCode.NON_FINITE,
                reason=f"version {policy.policy_version} gives a log-probability of {logprob} "
                f"at completion token {len(self.token_ids)}",
            )
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        if token_id in policy.end_token_ids:
            return self._complete(FinishReason.STOP, policy)
        if len(self.token_ids) >= self.request.max_tokens:
            return self._complete(FinishReason.LENGTH, policy)
        return None

    def _complete(self, reason: FinishReason, policy: PolicyFiles) -> Completion:
        return Completion(
            request_id=self.request.request_id,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=reason,
            oldest_version=policy.policy_version,
            newest_version=policy.policy_version,
            artifact_digest=policy.artifact_digest,
        )
