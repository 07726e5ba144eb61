"""What node and backend child say to each other over the child's pipes.

node → child   load    {load_id, policy}         child → node   ready    {report}           once, first
               submit  {requests}                               events   {items, report}    items may be empty
               score   {score_id, items, temperature}
                                                                beat     {pending}          every BEAT_S, idle too

Ids and log-probabilities are packed as in trajectories. Both ends are the same release, so no field is optional.
"""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from echo_node.backends.base import (
    Completion,
    FailedRequest,
    FailureCode,
    GenerationRequest,
    LoadTimes,
    Outcome,
    PolicyFiles,
    ScoreRequest,
    Scores,
)
from echo_node.backends.conductor import Event, LoadResult, ScoreResult
from echo_swarm.codec import pack_f32, pack_u32, unpack_f32, unpack_u32
from echo_swarm.trajectory import FinishReason

BEAT_S = 1.0
"""A child's main loop writes at least this often, unless one step takes longer."""


def pack_policy(policy: PolicyFiles) -> dict[str, Any]:
    """Return plain values."""
    return {
        "policy_version": policy.policy_version,
        "artifact": str(policy.artifact),
        "artifact_digest": policy.artifact_digest,
        "model_config_json": policy.model_config_json,
        "end_token_ids": list(policy.end_token_ids),
        "vocabulary_size": policy.vocabulary_size,
        "max_prompt_tokens": policy.max_prompt_tokens,
        "max_completion_tokens": policy.max_completion_tokens,
        "base": str(policy.base) if policy.base else "",
        "base_digest": policy.base_digest,
    }


def unpack_policy(frame: dict[str, Any]) -> PolicyFiles:
    """Inverse of `pack_policy`."""
    base = Path(frame["base"]) if frame["base"] else None
    artifact, end_token_ids = Path(frame["artifact"]), tuple(frame["end_token_ids"])
    return PolicyFiles(**{**frame, "artifact": artifact, "base": base, "end_token_ids": end_token_ids})


def pack_requests(requests: Sequence[GenerationRequest]) -> list[dict[str, Any]]:
    """Return plain values. Raises OverflowError for a prompt id that is no unsigned 32-bit integer."""
    return [
        {
            "request_id": request.request_id,
            "prompt_ids": pack_u32(request.prompt_ids),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
        }
        for request in requests
    ]


def unpack_requests(frames: list[dict[str, Any]]) -> list[GenerationRequest]:
    """Inverse of `pack_requests`."""
    return [GenerationRequest(**{**frame, "prompt_ids": tuple(unpack_u32(frame["prompt_ids"]))}) for frame in frames]


def pack_score(score_id: int, request: ScoreRequest) -> dict[str, Any]:
    """Return a whole frame."""
    items = [[pack_u32(prompt), pack_u32(completion)] for prompt, completion in request.items]
    return {"kind": "score", "score_id": score_id, "items": items, "temperature": request.temperature}


def unpack_score(frame: dict[str, Any]) -> tuple[int, ScoreRequest]:
    """Inverse of `pack_score`."""
    items = tuple((tuple(unpack_u32(prompt)), tuple(unpack_u32(completion))) for prompt, completion in frame["items"])
    return frame["score_id"], ScoreRequest(items=items, temperature=frame["temperature"])


def pack_event(event: Event) -> dict[str, Any]:
    """Return plain values."""
    if isinstance(event, ScoreResult):
        return _pack_scores(event)
    if isinstance(event, LoadResult):
        return {"kind": "load", "load_id": event.load_id, "reason": event.reason, "times": asdict(event.times)}
    if isinstance(event, FailedRequest):
        return {
            "kind": "failed",
            "request_id": event.request_id,
            "code": event.code.value,
            "reason": event.reason,
        }
    return {
        "kind": "done",
        "request_id": event.request_id,
        "token_ids": pack_u32(event.token_ids),
        "logprobs": pack_f32(event.logprobs),
        "finish_reason": event.finish_reason.value,
        "oldest_version": event.oldest_version,
        "newest_version": event.newest_version,
        "artifact_digest": event.artifact_digest,
    }


def _pack_scores(result: ScoreResult) -> dict[str, Any]:
    scores = result.scores
    if isinstance(scores, str):
        return {"kind": "scored", "score_id": result.score_id, "reason": scores}
    return {
        "kind": "scored",
        "score_id": result.score_id,
        "reason": None,
        "logprobs": [pack_f32(values) for values in scores.logprobs],
        "policy_version": scores.policy_version,
        "artifact_digest": scores.artifact_digest,
    }


def _unpack_scores(frame: dict[str, Any]) -> ScoreResult:
    if frame["reason"] is not None:
        return ScoreResult(score_id=frame["score_id"], scores=frame["reason"])
    scores = Scores(
        logprobs=tuple(unpack_f32(values) for values in frame["logprobs"]),
        policy_version=frame["policy_version"],
        artifact_digest=frame["artifact_digest"],
    )
    return ScoreResult(score_id=frame["score_id"], scores=scores)


def unpack_event(frame: dict[str, Any]) -> Event:
    """Inverse of `pack_event`. Raises KeyError, TypeError, ValueError or MalformedMessage for what is no event."""
    kind = frame["kind"]
    if kind == "load":
        return LoadResult(load_id=frame["load_id"], reason=frame["reason"], times=LoadTimes(**frame["times"]))
    if kind == "scored":
        return _unpack_scores(frame)
    return _unpack_outcome(kind, frame)


def _unpack_outcome(kind: str, frame: dict[str, Any]) -> Outcome:
    if kind == "failed":
        return FailedRequest(request_id=frame["request_id"], code=FailureCode(frame["code"]), reason=frame["reason"])
    return Completion(
        request_id=frame["request_id"],
        token_ids=unpack_u32(frame["token_ids"]),
        logprobs=unpack_f32(frame["logprobs"]),
        finish_reason=FinishReason(frame["finish_reason"]),
        oldest_version=frame["oldest_version"],
        newest_version=frame["newest_version"],
        artifact_digest=frame["artifact_digest"],
    )
