"""The batch file: what the coordinator writes for one update and every rank reads. No torch."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from echo_swarm import codec
from echo_swarm.checkpoint.files import write_atomically
from echo_swarm.codec import Limits
from echo_swarm.errors import MalformedMessage

BATCH_LIMITS = Limits(max_bytes=4 << 30, max_items=1 << 20, max_depth=12)
"""The file comes from our own coordinator; the limit catches a wrong or damaged file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One completion of a group's prompt."""

    prompt_ids: bytes
    """`codec.pack_u32`; at least one id."""
    token_ids: bytes
    """`codec.pack_u32`; completion only, end token included if sampled."""
    logprobs: bytes
    """`codec.pack_f32`; the worker's, one for each completion id, at the run's training temperature."""
    reward: float | None
    """None: the verifier failed; the member is in no statistic and no loss term."""
    trained: bool = True
    """False: it aged. Its reward counts in the group's baseline, its tokens in no loss term."""
    oldest_version: int
    newest_version: int
    """Lowest and highest policy version that contributed a token."""
    backend: str
    precision: str
    peer_id: str
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Siblings of one prompt."""

    group_id: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """Input of one update."""

    update: int
    """Number of this update; the first is 1. The trainer refuses any but its next."""
    policy_version: int
    """Version of the weights that this update starts from; lag is counted against it."""
    groups: tuple[Group, ...]
    data_position: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Passed through into the checkpoint: where the data stood when this batch was put together (JSON values)."""

    @property
    def members(self) -> tuple[Member, ...]:
        """All members, group by group."""
        return tuple(member for group in self.groups for member in group.members)


def write(batch: TrainingBatch, path: Path) -> None:
    """Write `batch` to `path` atomically and durably. What a killed write leaves is written over by the next one.

    Raises:
        StorageFull, LocalFault: see `write_atomically`.

    """
    write_atomically(path, codec.encode(_as_dict(batch)))


def read(path: Path) -> TrainingBatch:
    """Return the checked batch in `path`.

    Raises:
        MalformedMessage: no such file, not a batch, or an impossible value; says which.

    """
    try:
        data = path.read_bytes()
    except OSError as e:
        raise MalformedMessage(f"cannot read batch {path}: {e.strerror or e}") from e
    raw = codec.decode(data, BATCH_LIMITS, canonical=False)
    try:
        groups = tuple(
            Group(group_id=group["group_id"], members=tuple(Member(**member) for member in group["members"]))
            for group in raw["groups"]
        )
        batch = TrainingBatch(**{**raw, "groups": groups})
    except (KeyError, TypeError) as e:
        raise MalformedMessage(f"{path} is no batch of this version: {e}") from e
    check(batch)
    return batch


def check(batch: TrainingBatch) -> None:
    """Raise MalformedMessage for what would make an update meaningless, naming group and member."""
    try:
        json.dumps(dict(batch.data_position), allow_nan=False)
    except (TypeError, ValueError) as e:
        raise MalformedMessage(f"data_position cannot go into a checkpoint: {e}") from e
    for group in batch.groups:
        for index, member in enumerate(group.members):
            problem = _problem(member, batch.policy_version)
            if problem:
                raise MalformedMessage(f"group {group.group_id}, member {index}: {problem}")


def _problem(member: Member, policy_version: int) -> str | None:
    if not member.prompt_ids or len(member.prompt_ids) % 4:
        return f"prompt of {len(member.prompt_ids)} bytes"
    if not member.token_ids or len(member.token_ids) % 4:
        return f"completion of {len(member.token_ids)} bytes"
    if len(member.token_ids) != len(member.logprobs):
        return f"{len(member.token_ids) // 4} ids and {len(member.logprobs) // 4} log-probabilities"
    if member.reward is not None and not math.isfinite(member.reward):
        return f"reward {member.reward}"
    if any(math.isnan(value) for value in codec.unpack_f32(member.logprobs)):
        return "a log-probability is NaN"
    if not 0 <= member.oldest_version <= member.newest_version <= policy_version:
        return (
            f"sampled by versions {member.oldest_version} to {member.newest_version}, "
            f"while the trainer is at {policy_version}"
        )
    if member.finish_reason not in ("stop", "length"):
        return f"finish reason {member.finish_reason!r}"
    return None


def _as_dict(batch: TrainingBatch) -> dict[str, Any]:
    return {
        "update": batch.update,
        "policy_version": batch.policy_version,
        "data_position": dict(batch.data_position),
        "groups": [
            {
                "group_id": group.group_id,
                "members": [{f.name: getattr(member, f.name) for f in fields(member)} for member in group.members],
            }
            for group in batch.groups
        ],
    }
