"""What the trainer is asked for probes and audits, and what it answers, as they go over its socket. No torch."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from echo_swarm.codec import pack_f32, unpack_f32
from echo_swarm.errors import BackendFailed, MalformedMessage


class ProbeRefused(BackendFailed):
    """The trainer cannot score these prompts. Nothing changed, and it waits for what comes next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeText:
    """A prompt and its completion, both `codec.pack_u32`."""

    prompt_ids: bytes
    completion_ids: bytes
    """Empty: the trainer samples one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeJob:
    """Score these, with the weights of now or of a version before."""

    texts: tuple[ProbeText, ...]
    tokens: int
    """Longest completion to sample."""
    seed: int
    end_token_ids: tuple[int, ...]
    vocabulary: int
    """Ids at or above it are not sampled."""
    weights: str = ""
    """A file of a published version to score with; empty: the weights of now."""
    spread: bool = False
    """Whether `ProbeValues.expected`, `variance` and `below` are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeValues:
    """One text, scored."""

    completion_ids: bytes
    logprobs: "array[float]"
    """array('f'), one for each id, at the run's training temperature."""
    expected: "array[float]" = field(default_factory=lambda: array("f"))
    """Mean of the log-probability of a token drawn at each place (minus the entropy there), nats; see `spread`."""
    variance: "array[float]" = field(default_factory=lambda: array("f"))
    """Its variance, nats squared."""
    below: "array[float]" = field(default_factory=lambda: array("f"))
    """Probability of all ids below that one, at each place."""


def pack_job(job: ProbeJob) -> dict[str, Any]:
    """Return the frame of a job."""
    return {
        "op": "probe",
        "texts": [[text.prompt_ids, text.completion_ids] for text in job.texts],
        "tokens": job.tokens,
        "seed": job.seed,
        "end_token_ids": list(job.end_token_ids),
        "vocabulary": job.vocabulary,
        "weights": job.weights,
        "spread": job.spread,
    }


def unpack_job(frame: Mapping[str, Any]) -> ProbeJob:
    """Inverse of `pack_job`. Raises MalformedMessage."""
    try:
        return ProbeJob(
            texts=tuple(ProbeText(prompt_ids=prompt, completion_ids=ids) for prompt, ids in frame["texts"]),
            tokens=frame["tokens"],
            seed=frame["seed"],
            end_token_ids=tuple(frame["end_token_ids"]),
            vocabulary=frame["vocabulary"],
            weights=frame["weights"],
            spread=frame["spread"],
        )
    except (KeyError, TypeError, ValueError) as e:
        raise MalformedMessage(f"no probe of this version: {e}") from e


def pack_values(values: tuple[ProbeValues, ...]) -> dict[str, Any]:
    """Return the frame of an answer."""
    return {
        "op": "probed",
        "values": [[v.completion_ids, *map(pack_f32, (v.logprobs, v.expected, v.variance, v.below))] for v in values],
    }


def unpack_values(frame: Mapping[str, Any]) -> tuple[ProbeValues, ...]:
    """Inverse of `pack_values`. Raises ProbeRefused with the trainer's words if it answered otherwise."""
    if frame.get("op") != "probed":
        raise ProbeRefused(f"the trainer gives no values to probes: {frame.get('reason')}")
    found: list[ProbeValues] = []
    for ids, *numbers in frame["values"]:
        logprobs, expected, variance, below = map(unpack_f32, numbers)
        found.append(
            ProbeValues(completion_ids=ids, logprobs=logprobs, expected=expected, variance=variance, below=below)
        )
    return tuple(found)
