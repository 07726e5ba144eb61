"""What an update reports, as a plain dict of JSON values. No torch.

Ratios are π_trainer / π_worker of the sampled tokens at the start of the batch. Where both are the same version
(`fresh`) they show the difference between two implementations of one policy; where the sample is older (`stale`), the
policy's own movement is in them too. Both tails are kept: quantised workers also push ratios towards 0.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from echo_coordinator.trainer.advantage import Signal, no_signal_share
from echo_coordinator.trainer.batch import Member, TrainingBatch
from echo_coordinator.trainer.rows import Plan, Row

MAX_PEERS = 256
"""Peers listed one by one (those with most tokens first); the rest is summed up as `others`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStats:
    """Sums over the tokens of one trained completion."""

    tokens: float = 0.0
    ratio_sum: float = 0.0
    ratio_min: float = 0.0
    ratio_max: float = 0.0
    log_ratio_sum: float = 0.0
    gap_sum: float = 0.0
    """Σ |log π_trainer - log π_worker|."""
    entropy_sum: float = 0.0
    passes: float = 0.0
    """Tokens over all passes of the update; the sums below are over these."""
    clipped: float = 0.0
    capped: float = 0.0
    kl_sum: float = 0.0
    loss: float = 0.0
    """Weighted, so that all rows of one optimizer step add up to its loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimised:
    """What the optimiser did in one update."""

    rows: tuple[RowStats, ...]
    """In the order of the plan's rows."""
    gradient_norm: float | None
    """Before clipping, mean over the steps; None when no gradient was taken or it was not finite."""
    steps: int
    """Optimizer steps taken."""
    skipped: str | None
    """`no_signal`, `nothing_to_train`, `non_finite` (at least one step), or None."""


def report(
    batch: TrainingBatch, plan: Plan, done: Optimised, *, learning_rate: float, seconds: float
) -> dict[str, Any]:
    """Return the metrics of one update."""
    members = batch.members
    tokens = sum(stats.tokens for stats in done.rows)
    passes = sum(stats.passes for stats in done.rows)
    lengths = [len(member.token_ids) // 4 for member in members]
    return {
        "update": batch.update,
        "policy_version": batch.policy_version + 1,
        "reward": _rewards(members),
        "groups": _groups(plan.signals),
        "members": {
            "count": len(members),
            "trained": len(plan.rows),
            "aged": sum(not member.trained for member in members),
            "without_reward": sum(member.reward is None for member in members),
        },
        "loss": _finite(math.fsum(stats.loss for stats in done.rows) / max(done.steps, 1)),
        "kl": _share(sum(stats.kl_sum for stats in done.rows), passes),
        "entropy": _share(sum(stats.entropy_sum for stats in done.rows), tokens),
        "ratio": _ratios(plan.rows, done.rows, batch.policy_version),
        "logprob_gap": _gaps(plan.rows, done.rows, batch.policy_version),
        "lag": {
            str(lag): count for lag, count in sorted(Counter(_lag(m, batch.policy_version) for m in members).items())
        },
        "completion_length": _lengths(lengths),
        "truncated_share": _share(sum(member.finish_reason == "length" for member in members), len(members)),
        "gradient_norm": _finite(done.gradient_norm),
        "learning_rate": learning_rate,
        "optimizer_steps": done.steps,
        "skipped": done.skipped,
        "tokens": int(tokens),
        "seconds": seconds,
        "tokens_per_s": tokens / seconds if seconds > 0 else None,
        "warnings": _warnings(plan, done),
    }


def _rewards(members: Sequence[Member]) -> dict[str, Any]:
    rewards = [member.reward for member in members if member.reward is not None]
    return {
        "mean": math.fsum(rewards) / len(rewards) if rewards else None,
        "std": statistics.pstdev(rewards) if rewards else None,
    }


def _groups(signals: Sequence[Signal]) -> dict[str, Any]:
    return {
        "count": len(signals),
        "no_signal": signals.count(Signal.NONE),
        "too_few": signals.count(Signal.TOO_FEW),
        "no_signal_share": no_signal_share(signals),
    }


def _lengths(lengths: Sequence[int]) -> dict[str, Any]:
    # Of all completions as they came, masked or not.
    return {
        "mean": _share(sum(lengths), len(lengths)),
        "min": min(lengths, default=None),
        "max": max(lengths, default=None),
    }


def _ratios(rows: Sequence[Row], stats: Sequence[RowStats], version: int) -> dict[str, Any]:
    pairs = list(zip(rows, stats, strict=True))
    return {
        "all": _ratio(stats),
        "fresh": _ratio([s for row, s in pairs if _lag(row.member, version) == 0]),
        "stale": _ratio([s for row, s in pairs if _lag(row.member, version) > 0]),
        "by_backend": _by(pairs, lambda row: f"{row.member.backend}/{row.member.precision}"),
        "by_peer": _by(pairs, lambda row: row.member.peer_id),
    }


def _by(pairs: Iterable[tuple[Row, RowStats]], key: Callable[[Row], str]) -> dict[str, Any]:
    split: defaultdict[str, list[RowStats]] = defaultdict(list)
    for row, stats in pairs:
        split[key(row)].append(stats)
    order = sorted(split, key=lambda name: (-sum(s.tokens for s in split[name]), name))
    result = {name: _ratio(split[name]) for name in order[:MAX_PEERS]}
    if len(order) > MAX_PEERS:
        result["others"] = _ratio([s for name in order[MAX_PEERS:] for s in split[name]])
    return result


def _ratio(stats: Sequence[RowStats]) -> dict[str, Any]:
    tokens = sum(s.tokens for s in stats)
    passes = sum(s.passes for s in stats)
    return {
        "tokens": int(tokens),
        "min": _finite(min((s.ratio_min for s in stats), default=None)),
        "mean": _share(sum(s.ratio_sum for s in stats), tokens),
        "max": _finite(max((s.ratio_max for s in stats), default=None)),
        "mean_log": _share(sum(s.log_ratio_sum for s in stats), tokens),
        "clipped_share": _share(sum(s.clipped for s in stats), passes),
        "capped_share": _share(sum(s.capped for s in stats), passes),
    }


def _gaps(rows: Sequence[Row], stats: Sequence[RowStats], version: int) -> dict[str, float | None]:
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row, s in zip(rows, stats, strict=True):
        if _lag(row.member, version) == 0:
            entry = sums[f"{row.member.backend}/{row.member.precision}"]
            entry[0] += s.gap_sum
            entry[1] += s.tokens
    return {name: _share(total, tokens) for name, (total, tokens) in sorted(sums.items())}


def _warnings(plan: Plan, done: Optimised) -> list[str]:
    warnings: list[str] = []
    if plan.signals and no_signal_share(plan.signals) == 1.0:
        warnings.append("no group carries a signal: within each, all rewards are equal")
    if done.skipped == "nothing_to_train":
        warnings.append("no completion could be trained: all were masked, aged, unscored or in groups too small")
    if done.skipped == "non_finite":
        warnings.append("a step with non-finite gradients was skipped")
    return warnings


def _lag(member: Member, version: int) -> int:
    return version - member.oldest_version


def _share(part: float, whole: float) -> float | None:
    return _finite(part / whole) if whole else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
