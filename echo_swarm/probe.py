"""Probes: the same few prompts with fixed completions for everybody, and the log-probabilities that a node gives them.

The coordinator knows what its trainer gives them at each version. The difference is what a node's arithmetic does to
the policy, and it tells which version a node really computes with. Method of WORK_PROTOCOL, a call from the node:

    probe   ProbeRequest → ProbeReply    when a beat's reply says so; once for the probe, once with its answer

An answer is at most `MAX_PROBES` x `MAX_PROBE_TOKENS` numbers, whatever the model.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from echo_swarm.codec import Limits
from echo_swarm.envelope import OVERHEAD_BYTES
from echo_swarm.trajectory import BehaviourPolicy, PackedU32
from echo_swarm.wire import LeaseId, Message, RunId, Text, Word

MAX_PROBES = 16
"""Prompts of one probe."""
MAX_PROBE_TOKENS = 256
"""Longest completion of one of them."""
PROBE_LIMITS = Limits(max_bytes=1 << 16, max_items=64, max_depth=3)
"""Of a ProbeAnswer."""


class ProbeItem(Message):
    """A prompt and what is to be scored after it."""

    prompt_ids: PackedU32
    completion_ids: Annotated[bytes, Field(min_length=4, max_length=4 * MAX_PROBE_TOKENS)]
    """`codec.pack_u32`; of whatever model, in the vocabulary."""


class Probe(Message):
    """What a node is asked to score, all of it with one version."""

    probe_id: LeaseId
    items: Annotated[tuple[ProbeItem, ...], Field(strict=False, min_length=1, max_length=MAX_PROBES)]
    temperature: Annotated[float, Field(gt=0, le=10)]
    """Log-probabilities are those of the distribution sampled from at this temperature."""
    expires_in_s: Annotated[float, Field(gt=0, le=86_400)]
    """From the moment the reply was sent."""


class ProbeAnswer(Message):
    """What a node computed; travels in an envelope that it signed."""

    run_id: RunId
    probe_id: LeaseId
    policy: BehaviourPolicy
    """What scored; oldest and newest version are the same."""
    logprobs: Annotated[bytes, Field(max_length=4 * MAX_PROBES * MAX_PROBE_TOKENS)]
    """`codec.pack_f32`; one for each completion id, item after item. Empty with a refusal."""
    refusal: Text
    """Why this backend cannot score; empty if it did."""


class ProbeVerdict(StrEnum):
    """What an answer showed."""

    MATCHES = "matches"
    OTHER_VERSION = "other_version"
    """It says one version and computes with another."""
    FAR = "far"
    """Further from the trainer than a backend of its class and precision should be."""
    OUTDATED = "outdated"
    """Scored with a version that no work is sampled with any more."""
    MALFORMED = "malformed"
    NOT_MEASURED = "not_measured"
    """The backend cannot score."""
    UNKNOWN_PROBE = "unknown_probe"
    """No such probe is out with this peer: it ran out, or was answered before."""
    NO_ANSWER = "no_answer"
    """Never sent; how a status names a peer that let several probes run out."""


class ProbeRequest(Message):
    """A node asks for a probe, or answers one."""

    answer: Annotated[bytes, Field(max_length=PROBE_LIMITS.max_bytes + OVERHEAD_BYTES)] | None
    """Envelope of ProbeAnswer."""


class ProbeReply(Message):
    """A probe, or the verdict on an answer. Both None: nothing is due."""

    probe: Probe | None
    verdict: Annotated[ProbeVerdict, *Word] | None
    detail: Text
    """For people."""
