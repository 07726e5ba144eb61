"""Which completions of a batch are trained, with what advantage; and how they are cut into passes. No torch."""

import itertools
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from echo_coordinator.trainer.advantage import Signal, group_advantage
from echo_coordinator.trainer.batch import Member, TrainingBatch
from echo_coordinator.trainer.settings import ObjectiveSettings, OptimizerSettings
from echo_swarm import codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One completion that takes part in the loss."""

    index: int
    """Position among the rows of the batch."""
    tokens: "array[int]"
    """Prompt and completion."""
    prompt_length: int
    behaviour: "array[float]"
    """The worker's log-probabilities, one for each completion token."""
    advantage: float
    member: Member

    @property
    def length(self) -> int:
        """Completion tokens."""
        return len(self.behaviour)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A batch, decided upon."""

    rows: tuple[Row, ...]
    signals: tuple[Signal, ...]
    """One for each group."""


def plan(batch: TrainingBatch, objective: ObjectiveSettings) -> Plan:
    """Return the rows that enter the loss. Everything else is in neither numerator nor denominator.

    Left out: members without a reward, members that aged, truncated ones if they are masked, and all members of
    a group with too few usable ones. Members of groups without signal stay: their advantage is 0.
    """
    rows: list[Row] = []
    signals: list[Signal] = []
    for group in batch.groups:
        advantages = group_advantage(
            [member.reward for member in group.members],
            normalise_std=objective.normalise_std,
            min_members=objective.min_group_members,
        )
        signals.append(advantages.signal)
        if advantages.signal is Signal.TOO_FEW:
            continue
        for member, advantage in zip(group.members, advantages.values, strict=True):
            if _is_trained(member, objective):
                rows.append(_row(len(rows), member, advantage))
    return Plan(rows=tuple(rows), signals=tuple(signals))


def minibatches(rows: Sequence[Row], settings: OptimizerSettings, *, update: int) -> list[list[Row]]:
    """Return the rows of each optimizer step of one update, `epochs` × `minibatches` of them, none empty.

    The order is drawn from (seed, update, epoch) alone, so a resumed run draws the same.
    """
    steps: list[list[Row]] = []
    for epoch in range(settings.epochs):
        order = list(rows)
        if settings.minibatches > 1:
            random.Random(f"{settings.seed}/{update}/{epoch}").shuffle(order)
        count = min(settings.minibatches, len(order))
        bounds = [len(order) * index // count for index in range(count + 1)] if count else []
        steps.extend(order[start:end] for start, end in itertools.pairwise(bounds))
    return steps


def micro_batches(
    rows: Sequence[Row], settings: OptimizerSettings, *, rank: int = 0, world: int = 1
) -> list[list[Row]]:
    """Return this rank's share of `rows`, longest first, cut so that each piece fits the limits when padded."""
    by_length = sorted(rows, key=lambda row: (-len(row.tokens), row.index))
    pieces: list[list[Row]] = []
    for row in by_length[rank::world]:
        piece = pieces[-1] if pieces else None
        if piece is None or not _fits(piece, settings):
            pieces.append([row])
        else:
            piece.append(row)
    return pieces


def _fits(piece: list[Row], settings: OptimizerSettings) -> bool:
    # The first row is the longest and gives the padded width.
    if settings.micro_batch_size is not None and len(piece) >= settings.micro_batch_size:
        return False
    return (len(piece) + 1) * len(piece[0].tokens) <= settings.micro_batch_tokens


def _is_trained(member: Member, objective: ObjectiveSettings) -> bool:
    masked = objective.mask_truncated and member.finish_reason == "length"
    return member.trained and member.reward is not None and not masked


def _row(index: int, member: Member, advantage: float) -> Row:
    prompt = codec.unpack_u32(member.prompt_ids)
    return Row(
        index=index,
        tokens=prompt + codec.unpack_u32(member.token_ids),
        prompt_length=len(prompt),
        behaviour=codec.unpack_f32(member.logprobs),
        advantage=advantage,
        member=member,
    )
