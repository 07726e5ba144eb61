"""Rates, and the share of groups that teach nothing."""

import random
import re

import pytest

from echo_coordinator.state.counters import Rate, SignalWindow


@pytest.mark.parametrize(("size", "share"), [(2, 0.70), (8, 0.20)])
def test_the_share_of_groups_without_signal_is_that_of_the_binomial(size: int, share: float):
    window, source = SignalWindow(size, window=4096), random.Random(1)
    for _ in range(4096):
        window.add([float(source.random() < 0.1819) for _ in range(size)])
    assert window.no_signal_share == pytest.approx(share, abs=0.03)
    assert ("raise group_size from 2 to 8" in window.suggestion()) is (size == 2)


def test_a_task_that_always_pays_is_told_apart_from_small_groups():
    window = SignalWindow(8)
    assert window.suggestion() == "" and window.no_signal_share == 0
    for _ in range(50):
        window.add([1.0] * 8)
    assert window.no_signal_share == 1.0
    assert window.suggestion().endswith("the task is too easy for this model (mean reward 1): choose harder tasks")


@pytest.mark.parametrize("solved", [0, 1, 2])
def test_a_task_that_hardly_ever_pays_asks_for_easier_tasks_and_no_bigger_groups(solved: int):
    window = SignalWindow(16)
    for number in range(100):
        window.add([float(number < solved)] + [0.0] * 15)
    assert "choose easier tasks, or begin with a model that was warmed up" in window.suggestion()
    assert "group_size" not in window.suggestion()


@pytest.mark.parametrize("size", [2, 8, 33, 64, 128, 1024])
def test_no_group_larger_than_64_is_ever_advised(size: int):
    for solved in range(33):
        window = SignalWindow(size)
        for number in range(64):
            window.add([float(number < 2 * solved)] * (size - 1) + [0.0 if number % 3 else 1.0])
        advised = re.findall(r"raise group_size from \d+ to (\d+)", window.suggestion())
        assert all(size < int(number) <= 64 for number in advised)


def test_a_rate_follows_the_last_minute():
    rate = Rate(window_s=60)
    assert rate.per_s(0) == 0
    for second in range(120):
        rate.add(second, 3)
    assert rate.per_s(119) == pytest.approx(3, rel=0.05)
    assert rate.per_s(300) == 0
