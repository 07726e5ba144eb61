"""Group-relative advantages and the share of groups that teach nothing."""

import math
import random

import pytest

from echo_coordinator.trainer.advantage import (
    Signal,
    expected_no_signal_share,
    group_advantage,
    group_size_advice,
    no_signal_share,
)


def test_rewards_are_centred_and_scaled_within_the_group():
    assert group_advantage([1.0, 0.0, 0.0, 1.0]).values == (1.0, -1.0, -1.0, 1.0)
    assert group_advantage([1.0, 0.0, 0.0, 1.0], normalise_std=False).values == (0.5, -0.5, -0.5, 0.5)


def test_a_tiny_deviation_is_floored():
    assert group_advantage([0.0, 1e-6]).values == pytest.approx((-5e-4, 5e-4))


def test_a_member_without_reward_is_in_no_statistic():
    assert group_advantage([1.0, None, 0.0]).values == (1.0, 0.0, -1.0)


def test_five_of_eight_members_are_normalised_over_five_or_dropped_whole_by_the_setting():
    rewards = [1.0, 0.0, 0.0, 0.0, 0.0, None, None, None]
    over_five = group_advantage(rewards)
    assert over_five.values[0] == pytest.approx(0.8 / math.sqrt(0.16))
    assert over_five.values[5:] == (0.0, 0.0, 0.0)
    dropped = group_advantage(rewards, min_members=6)
    assert dropped.signal is Signal.TOO_FEW and set(dropped.values) == {0.0}


def test_one_usable_member_or_none_gives_nothing_and_no_nan():
    for rewards in ([1.0], [1.0, None], [None, None], []):
        result = group_advantage(rewards)
        assert result.signal is Signal.TOO_FEW
        assert result.values == (0.0,) * len(rewards)


def test_equal_rewards_give_zero_and_are_counted():
    result = group_advantage([0.1, 0.1, 0.1])
    assert result.values == (0.0, 0.0, 0.0)
    assert no_signal_share([result.signal, Signal.SOME, Signal.TOO_FEW]) == 0.5
    assert no_signal_share([Signal.TOO_FEW]) is None


@pytest.mark.parametrize(("size", "share"), [(2, 0.70), (8, 0.20)])
def test_the_no_signal_share_at_a_low_success_rate_shows_and_asks_for_bigger_groups(size, share):
    draw = random.Random(0)
    signals = [group_advantage([float(draw.random() < 0.1819) for _ in range(size)]).signal for _ in range(4000)]
    measured = no_signal_share(signals)
    assert measured == pytest.approx(share, abs=0.03)
    assert expected_no_signal_share(0.1819, size) == pytest.approx(share, abs=0.005)
    advice = group_size_advice(measured, 0.1819, size)
    assert (advice is None) == (size == 8)
    assert advice is None or "a group size of 7" in advice


def test_a_task_that_always_pays_is_called_too_easy():
    assert "choose harder tasks" in (group_size_advice(1.0, 1.0, 8) or "")
    assert "choose easier tasks" in (group_size_advice(1.0, 0.0, 8) or "")
    assert "group size" not in (group_size_advice(0.99, 0.001, 8) or "")
