"""One line when something changes, and few while it stays."""

from echo_node.activity import Activity, Part, Rate
from echo_swarm.clock import ManualClock


def test_a_long_wait_is_told_once_and_repeated_ever_more_rarely_with_a_count():
    clock, lines = ManualClock(), list[str]()
    activity = Activity(clock, lines.append)
    for _ in range(8 * 3600):
        activity.waits(Part.LINK, "the coordinator", "connection refused")
        clock.advance(1)
    assert lines[0] == "waiting for the coordinator (connection refused)"
    assert lines[1] == "still waiting for the coordinator, for 1 min and 60 tries (connection refused)"
    assert len(lines) < 16


def test_the_most_fundamental_wait_is_the_headline():
    clock = ManualClock()
    activity = Activity(clock, lambda line: None)
    activity.doing("sampling")
    assert activity.headline == "sampling"
    activity.waits(Part.WORK, "work")
    activity.waits(Part.LINK, "the coordinator")
    clock.advance(75)
    assert activity.headline == "waiting for the coordinator, 1 min 15 s"
    activity.done(Part.LINK)
    assert activity.headline == "waiting for work, 1 min 15 s"


def test_the_headline_fits_into_a_beat():
    activity = Activity(ManualClock(), lambda line: None)
    activity.waits(Part.POLICY, "x" * 500)
    assert len(activity.headline) <= 128


def test_the_end_of_a_wait_is_told_only_if_there_was_one():
    lines = list[str]()
    activity = Activity(ManualClock(), lines.append)
    activity.done(Part.LINK, "connected again")
    assert lines == []
    activity.waits(Part.LINK, "the coordinator")
    activity.done(Part.LINK, "connected again")
    assert lines[-1] == "connected again"


def test_a_rate_follows_what_is_counted_and_decays_when_nothing_comes():
    clock = ManualClock()
    rate = Rate(clock)
    for _ in range(60):
        clock.advance(1)
        rate.add(100)
        rate.per_s()
    assert 90 < rate.per_s() < 110
    clock.advance(300)
    assert rate.per_s() == 0


def test_rejections_are_told_by_reason_and_rarely():
    clock, lines = ManualClock(), list[str]()
    activity = Activity(clock, lines.append)
    for _ in range(100):
        activity.rejected("late", "expired 3 s ago")
        activity.rejected("stale", "")
        clock.advance(1)
    assert lines[:2] == ["a trajectory not accepted: late (expired 3 s ago)", "a trajectory not accepted: stale"]
    assert lines[2] == "60 trajectories not accepted: late (expired 3 s ago)" and len(lines) == 4
