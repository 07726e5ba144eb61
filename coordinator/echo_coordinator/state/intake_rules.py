"""What makes a completion acceptable: one pure function, its checks in a written order.

For a whole submission (one reason, no verdicts): size and form, signature, run. See `intake`.
For each trajectory:

1. `no_lease`: its lease is unknown, was granted to another peer, or does not cover this member or group;
2. the verdict of an identical push again, `duplicate` for a different one of the same member;
3. `late`: the slot has been given to somebody else, or its group is closed;
4. `future_version`, `unknown_policy`: the versions exist and the artifact is one of those published for the newest;
5. `stale`: older than `max_staleness` (training only); `unknown_policy`: more versions than an audit recomputes, or one
   among them that was never published;
6. `wrong_sampling`: not a version, temperature or seed that the lease asked for; `wrong_prompt`;
7. `bad_length`: ids and log-probabilities in equal number, 1 to `max_tokens`;
8. `out_of_vocabulary`;
9. `bad_logprob`: each finite and at most 0, all 0 when greedy;
10. `bad_finish`: `stop` has one end token, as its last; `length` has none and is `max_tokens` long;
11. `unknown_policy`: a backend that this run does not take; training only, see `followed_seeds`;
12. `copied`: its tokens were delivered before, and that is no chance; training only, see `plausibility`.

1 to 3 depend on the book of leases (`intake.Intake`), 4 to 10 are `judge`. A claimed reward has no field to stand in:
the message would be malformed.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from echo_coordinator.state.staleness import is_fresh
from echo_swarm.trajectory import FinishReason, Reason, Trajectory

LOGPROB_TOLERANCE = 1e-4
"""float32 rounding may leave the log of a probability of 1 a little above 0."""
MOST_VERSIONS = 8
"""That a completion may name. Each costs a forward pass more in an audit, and what cannot be audited is not taken."""
_LOWEST_LOGPROB = -3.0e38
"""Below it is only minus infinity, that is a token that could not have been sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What was asked for, as the lease and the run have it; the same for all members of a lease."""

    trains: bool
    """False for evaluation, which has no staleness."""
    trained_version: int
    """Version of the policy being updated."""
    published_version: int
    artifacts: Mapping[int, frozenset[bytes]]
    """Digests of the artifact files, by published version."""
    max_staleness: int
    min_version: int
    max_version: int | None
    temperature: float
    max_tokens: int
    prompt_digest: bytes
    vocabulary_size: int
    end_token_ids: tuple[int, ...]
    """Distinct."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A reason, and words for people."""

    reason: Reason
    detail: str = ""


ACCEPTED = Judgement(reason=Reason.ACCEPTED)


def judge(trajectory: Trajectory, demand: Demand, seed: int) -> Judgement:
    """Return the first rule (4 to 10 above) that a completion breaks, or ACCEPTED. `seed` is its member's."""
    return (
        _versions(trajectory, demand) or _sampling(trajectory, demand, seed) or _tokens(trajectory, demand) or ACCEPTED
    )


def work_digest(trajectory: Trajectory) -> bytes:
    """Return 16 bytes that name the content of a completion, whatever message carried it."""
    policy = trajectory.policy
    facts = (
        f"{policy.oldest_version} {policy.newest_version} {policy.artifact_digest.hex()} {policy.backend!r} "
        f"{policy.build!r} {policy.precision!r} {trajectory.temperature!r} {trajectory.seed} "
        f"{trajectory.finish_reason} {trajectory.prompt_digest.hex()} {len(trajectory.token_ids)} "
    )
    # In two parts, of which most stay below the 2 KiB from which on hashing hands the interpreter to another thread.
    digest = hashlib.sha256(facts.encode() + trajectory.token_ids)
    digest.update(trajectory.logprobs)
    return digest.digest()[:16]


def _no(reason: Reason, detail: str) -> Judgement:
    return Judgement(reason=reason, detail=detail)


def _versions(trajectory: Trajectory, demand: Demand) -> Judgement | None:
    oldest, newest = trajectory.policy.oldest_version, trajectory.policy.newest_version
    if newest > demand.published_version:
        return _no(Reason.FUTURE_VERSION, f"version {newest}, newest is {demand.published_version}")
    if oldest > newest:
        return _no(Reason.UNKNOWN_POLICY, f"oldest version {oldest} is above the newest, {newest}")
    if trajectory.policy.artifact_digest not in demand.artifacts.get(newest, ()):
        return _no(Reason.UNKNOWN_POLICY, f"no artifact of version {newest} has this digest")
    if demand.trains and not is_fresh(demand.trained_version, oldest, demand.max_staleness):
        return _no(Reason.STALE, f"version {oldest} at {demand.trained_version}, max_staleness {demand.max_staleness}")
    if newest - oldest >= MOST_VERSIONS:
        return _no(Reason.UNKNOWN_POLICY, f"versions {oldest} to {newest}: more than {MOST_VERSIONS} nobody recomputes")
    for version in range(oldest, newest):
        if version not in demand.artifacts:
            return _no(Reason.UNKNOWN_POLICY, f"versions {oldest} to {newest}: {version} was never published")
    return None


def _sampling(trajectory: Trajectory, demand: Demand, seed: int) -> Judgement | None:
    oldest, newest = trajectory.policy.oldest_version, trajectory.policy.newest_version
    if oldest < demand.min_version or (demand.max_version is not None and newest > demand.max_version):
        top = "any" if demand.max_version is None else demand.max_version
        return _no(Reason.WRONG_SAMPLING, f"versions {oldest} to {newest}, asked for {demand.min_version} to {top}")
    if trajectory.temperature != demand.temperature:
        return _no(Reason.WRONG_SAMPLING, f"temperature {trajectory.temperature}, asked for {demand.temperature}")
    if trajectory.seed != seed:
        return _no(Reason.WRONG_SAMPLING, "seed is not the one of the lease")
    if trajectory.prompt_digest != demand.prompt_digest:
        return _no(Reason.WRONG_PROMPT, "digest of the prompt differs")
    return None


def _tokens(trajectory: Trajectory, demand: Demand) -> Judgement | None:
    size = len(trajectory.token_ids)
    count = size // 4
    if size != len(trajectory.logprobs) or size % 4:
        return _no(Reason.BAD_LENGTH, f"{size} bytes of ids, {len(trajectory.logprobs)} of log-probabilities")
    if not 1 <= count <= demand.max_tokens:
        return _no(Reason.BAD_LENGTH, f"{count} tokens, allowed 1 to {demand.max_tokens}")
    ids = np.frombuffer(trajectory.token_ids, dtype="<u4")
    if (highest := int(ids.max())) >= demand.vocabulary_size:
        return _no(Reason.OUT_OF_VOCABULARY, f"token {highest}, vocabulary {demand.vocabulary_size}")
    logprobs = np.frombuffer(trajectory.logprobs, dtype="<f4")
    # NaN passes through min and max and fails both comparisons.
    lowest = 0.0 if trajectory.temperature == 0 else _LOWEST_LOGPROB
    if not (lowest <= float(logprobs.min()) and float(logprobs.max()) <= (LOGPROB_TOLERANCE if lowest else 0.0)):
        asked = "all 0 when greedy" if not lowest else "finite and at most 0"
        return _no(Reason.BAD_LOGPROB, f"from {logprobs.min()} to {logprobs.max()}, must be {asked}")
    return _finish(trajectory, ids, demand)


def _finish(trajectory: Trajectory, ids: "np.ndarray[Any, Any]", demand: Demand) -> Judgement | None:
    ends = 0
    for token in demand.end_token_ids:
        ends += int(np.count_nonzero(ids == token))
    if trajectory.finish_reason is FinishReason.STOP:
        if int(ids[-1]) not in demand.end_token_ids or ends != 1:
            return _no(Reason.BAD_FINISH, f"'stop' with {ends} end tokens and token {ids[-1]} last")
    elif ends or len(ids) != demand.max_tokens:
        return _no(Reason.BAD_FINISH, f"'length' with {ends} end tokens and {len(ids)} of {demand.max_tokens} tokens")
    return None
