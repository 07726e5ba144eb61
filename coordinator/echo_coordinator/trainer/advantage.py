"""Group-relative advantages: each completion is judged against its siblings. No torch.

    A_i = (r_i - mean(r)) / max(std(r), 1e-3)        GRPO, arXiv 2402.03300 (population standard deviation)
    A_i =  r_i - mean(r)                             Dr. GRPO, arXiv 2503.20783

Mean and deviation are over the usable members of the one group: those that have a reward. A member that aged counts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

STD_FLOOR = 1e-3
"""Keeps rewards that differ only by noise from becoming advantages of ±1."""


class Signal(StrEnum):
    """What a group can teach."""

    SOME = "some"
    NONE = "none"
    """All usable members have the same reward: every advantage is 0. A KL term still acts on its tokens."""
    TOO_FEW = "too_few"
    """Not enough usable members to compare: the group has weight 0 and is in no denominator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdvantage:
    """Advantages of one group."""

    values: tuple[float, ...]
    """One for each member, in order; 0.0 for unusable members."""
    signal: Signal


def group_advantage(
    rewards: Sequence[float | None], *, normalise_std: bool = True, min_members: int = 2
) -> GroupAdvantage:
    """Return the advantages of the members of one group; a reward of None is in no statistic."""
    usable = [reward for reward in rewards if reward is not None]
    nothing = (0.0,) * len(rewards)
    if len(usable) < max(min_members, 2):
        return GroupAdvantage(values=nothing, signal=Signal.TOO_FEW)
    if min(usable) == max(usable):
        return GroupAdvantage(values=nothing, signal=Signal.NONE)
    mean = math.fsum(usable) / len(usable)
    scale = 1.0
    if normalise_std:
        variance = math.fsum((reward - mean) ** 2 for reward in usable) / len(usable)
        scale = max(math.sqrt(variance), STD_FLOOR)
    return GroupAdvantage(
        values=tuple(0.0 if reward is None else (reward - mean) / scale for reward in rewards), signal=Signal.SOME
    )


def no_signal_share(signals: Sequence[Signal]) -> float | None:
    """Return the share of comparable groups whose rewards are all equal; None without any."""
    comparable = [signal for signal in signals if signal is not Signal.TOO_FEW]
    return comparable.count(Signal.NONE) / len(comparable) if comparable else None


def expected_no_signal_share(success_rate: float, group_size: int) -> float:
    """Return p^n + (1-p)^n: how often n pass-or-fail rewards are all equal. (0.1819, 2) gives 0.70; 8 gives 0.20."""
    return success_rate**group_size + (1 - success_rate) ** group_size


def group_size_advice(share: float | None, success_rate: float, group_size: int, *, limit: float = 0.5) -> str | None:
    """Return a sentence for the status when more than `limit` of the groups teach nothing, else None.

    A flat reward curve then says little about the algorithm; a bigger group usually helps.
    """
    if share is None or share <= limit:
        return None
    sizes = range(group_size + 1, 65)
    better = next((size for size in sizes if expected_no_signal_share(success_rate, size) <= limit / 2), None)
    found = f"{share:.0%} of the groups carry no signal (all {group_size} rewards equal)"
    if better is None or not 0 < success_rate < 1:
        if success_rate < 0.5:
            return f"{found}; the task is too hard for this model: choose easier tasks, or warm the model up first"
        return f"{found}; the task is too easy for this model: choose harder tasks"
    return (
        f"{found}; at a success rate of {success_rate:.0%} a group size of {better} would bring that to {limit / 2:.0%}"
    )
