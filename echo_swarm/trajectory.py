"""What a node pushes: completions, each naming the exact policy that sampled it; and the verdicts it gets back."""

import hashlib
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from echo_swarm.codec import Limits
from echo_swarm.wire import U32, U63, Digest, Label, LeaseId, Message, Name, RunId, Text, Word

MAX_TOKENS = 1 << 17
"""Longest completion the protocol can carry; a run sets its own, lower limit."""
MAX_TRAJECTORIES = 64
"""In one submission."""
DRAW_BY_SEED = frozenset({"torch", "llama_cpp"})
"""Names of backends that draw the n-th token with the n-th `Random(seed).random()`: the first id whose cumulative
probability, ids in order, is above it. Audits follow their draws; see docs/adr/0018-seeds.md."""
SUBMISSION_LIMITS = Limits(max_bytes=8 << 20, max_items=4096, max_depth=5)

PackedU32 = Annotated[bytes, Field(max_length=4 * MAX_TOKENS)]
PackedF32 = Annotated[bytes, Field(max_length=4 * MAX_TOKENS)]


class FinishReason(StrEnum):
    """Why a completion ended."""

    STOP = "stop"
    """An end token was sampled; it is the last id, with its log-probability."""
    LENGTH = "length"
    """The token limit was reached; no end token."""


class BehaviourPolicy(Message):
    """What sampled a completion. A version number alone does not identify it."""

    oldest_version: U63
    """Lowest policy version that contributed a token."""
    newest_version: U63
    artifact_digest: Digest
    """sha256 of the artifact file that was loaded (of the newest version)."""
    backend: Name
    """`torch`, `llama_cpp`, `vllm`, `scripted`."""
    build: Label
    """Library and version, such as `torch 2.13.0+cpu`."""
    precision: Name
    """Of the arithmetic, such as `float32`, `bfloat16`, `q8_0`."""


class Trajectory(Message):
    """One completion of one prompt, under one lease."""

    lease_id: LeaseId
    group_id: U63
    member: U32
    """Index inside the group, from 0."""
    prompt_digest: Digest
    """`prompt_digest(prompt_ids)` of the prompt that was completed."""
    policy: BehaviourPolicy
    temperature: Annotated[float, Field(ge=0, le=10)]
    """0 means greedy."""
    seed: U63
    """The one that the lease gave for this member, and that was used."""
    finish_reason: Annotated[FinishReason, *Word]
    token_ids: PackedU32
    """Completion only, `codec.pack_u32`; includes the end token if one was sampled."""
    logprobs: PackedF32
    """`codec.pack_f32`; of the distribution sampled from (after temperature), one for each id. Zeros when greedy."""


class Submission(Message):
    """A signed batch of trajectories of one node."""

    run_id: RunId
    trajectories: Annotated[tuple[Trajectory, ...], Field(strict=False, min_length=1, max_length=MAX_TRAJECTORIES)]


class Reason(StrEnum):
    """Outcome of one trajectory, counted under this code on both sides."""

    ACCEPTED = "accepted"
    MALFORMED = "malformed"
    BAD_SIGNATURE = "bad_signature"
    UNKNOWN_RUN = "unknown_run"
    NO_LEASE = "no_lease"
    """No such lease, or it was granted to another peer, or it does not cover this member."""
    LATE = "late"
    """The lease had expired and the member was given to somebody else."""
    DUPLICATE = "duplicate"
    """Another completion of this member has already been accepted under this lease."""
    STALE = "stale"
    FUTURE_VERSION = "future_version"
    UNKNOWN_POLICY = "unknown_policy"
    """The artifact digest is none of those published for that version."""
    WRONG_PROMPT = "wrong_prompt"
    WRONG_SAMPLING = "wrong_sampling"
    """Temperature, seed or version is not the one that the lease asked for."""
    BAD_LENGTH = "bad_length"
    """Empty, longer than allowed, or ids and log-probabilities differ in number."""
    BAD_FINISH = "bad_finish"
    """The finish reason contradicts the tokens."""
    OUT_OF_VOCABULARY = "out_of_vocabulary"
    BAD_LOGPROB = "bad_logprob"
    """Not finite, or above 0."""
    COPIED = "copied"
    """The same tokens were accepted before, and call themselves too improbable to be drawn twice."""
    OVER_QUOTA = "over_quota"
    """Too many refused completions of this peer lately; the push was not read."""
    UNSCORABLE = "unscorable"
    """Accepted, but the verifier failed repeatedly; the node's standing is not touched."""


class Verdict(Message):
    """The coordinator's answer for one trajectory. Durable before it is sent."""

    lease_id: LeaseId
    group_id: U63
    member: U32
    reason: Annotated[Reason, *Word]
    detail: Text = ""
    """For people."""


def prompt_digest(packed_prompt_ids: bytes) -> bytes:
    """Return the sha256 that binds a trajectory to its prompt. `packed_prompt_ids`: `codec.pack_u32`."""
    return hashlib.sha256(packed_prompt_ids).digest()
