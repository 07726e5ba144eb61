"""What the core hands to the wiring loop and takes from it: prompts, completions to score, batches, waits."""

from dataclasses import dataclass, field
from enum import StrEnum

from echo_coordinator.state.groups import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of the environment, tokenised."""

    index: int
    """Position in the environment's training or evaluation set."""
    prompt_ids: bytes
    """`codec.pack_u32`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreItem:
    """A completion that waits for its reward."""

    group_id: int
    member: int
    kind: Kind
    prompt_index: int
    token_ids: bytes
    """`codec.pack_u32`; completion only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What the verifier said of one ScoreItem."""

    group_id: int
    member: int
    reward: float | None
    """None (or not finite): the verifier failed for good. Never a reward of 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchMember:
    """A completion inside a batch."""

    member: int
    peer: str
    token_ids: bytes
    """`codec.pack_u32`, completion only."""
    logprobs: bytes
    """`codec.pack_f32`, of the behaviour policy, one a token."""
    reward: float
    oldest_version: int
    newest_version: int
    backend: str
    precision: str
    finish_reason: str
    """`stop` or `length`."""
    aged: bool
    """Too old: its reward counts in the baseline, its tokens in no loss term."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchGroup:
    """A complete group inside a batch. Void members are absent from every statistic."""

    group_id: int
    prompt_index: int
    prompt_ids: bytes
    """`codec.pack_u32`."""
    members: tuple[BatchMember, ...]
    no_signal: bool
    """All rewards equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one update trains on."""

    version: int
    """Of the policy being updated; staleness of a member is `version - oldest_version`."""
    groups: tuple[BatchGroup, ...]
    """Oldest first; fewer than `groups_per_update` only while hardly any group has signal."""


class Waiting(StrEnum):
    """What the trainer waits for."""

    PAUSED = "paused"
    STARTING = "starting"
    """Version 0 is not published yet."""
    PUBLISHING = "publishing"
    """The newest update is not published yet."""
    NO_NODES = "no_nodes"
    PROMPTS = "prompts"
    """Fewer groups are under way than an update needs: the loop has to add prompts."""
    SAMPLING = "sampling"
    SCORING = "scoring"
    NO_SIGNAL = "no_signal"
    """Group after group has equal rewards."""
    FAILING = "failing"
    """Group after group is dropped because its completions are refused or never come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitState:
    """Why there is no batch. Rebuilt at each look; `since` stays as long as the reason does."""

    reason: Waiting
    since: float
    """Monotonic seconds."""
    detail: str
    """One sentence for people, with its figures."""
    numbers: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def normal(self) -> bool:
        """False when a person should look."""
        return self.reason not in (Waiting.NO_SIGNAL, Waiting.FAILING, Waiting.NO_NODES)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalProgress:
    """How far the evaluation of one version is."""

    version: int
    total: int
    done: int
    """Scored, or given up after `max_attempts`."""
    scored: int
    accuracy: float | None
    """Mean reward of what was scored."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing more will come."""
        return self.total > 0 and self.done == self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A recorded evaluation."""

    version: int
    accuracy: float | None
    prompts: int
    scored: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecord:
    """A line of the ledger."""

    update_no: int
    """From 1."""
    new_version: int
    checkpoint: str
    """Name of the trainer's checkpoint that belongs to it."""
    committed_at: float
    metrics: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something worth telling a person."""

    at: float
    """Seconds since 1970."""
    kind: str
    text: str
