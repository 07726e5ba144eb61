"""What two looks at both clocks say about the time between them."""

import pytest

from echo_node.slumber import Moment, describe_gap

HOUR_S = 3600.0


@pytest.mark.parametrize(
    ("wall_s", "monotonic_s", "said"),
    [
        (5, 5, ""),
        (5 + 20, 5 + 20, ""),  # A busy machine.
        (8 * HOUR_S + 5, 5, "slept, or its clock was set forward, by 8 h"),  # Linux and macOS.
        (8 * HOUR_S + 5, 8 * HOUR_S + 5, "slept or stood still for 8 h"),  # Windows, SIGSTOP.
        (-3 * HOUR_S + 5, 5, "clock was set back by 3 h"),
        (5, 8 * HOUR_S + 5, "slept or stood still for 8 h"),  # And the clock was lost meanwhile.
    ],
)
def test_a_sleep_a_stop_and_a_clock_that_was_set_are_told_from_ordinary_time(
    wall_s: float, monotonic_s: float, said: str
):
    before = Moment(wall_s=1_000_000.0, monotonic_s=50.0)
    after = Moment(wall_s=before.wall_s + wall_s, monotonic_s=before.monotonic_s + monotonic_s)
    gap = describe_gap(before, after, paused_s=5.0)
    assert said in gap if said else gap == ""
