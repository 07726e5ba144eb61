"""Staleness is counted in versions, and never exceeds its limit."""

import pytest

from echo_coordinator.state.staleness import Versions, VersionWindow, group_capacity, is_fresh, version_window


@pytest.mark.parametrize(
    ("current", "sample", "limit", "allowed"),
    [
        (5, 5, 0, True),
        (5, 4, 0, False),
        (5, 4, 1, True),
        (5, 3, 1, False),
        (5, 6, 0, False),
        (5, 6, 100, False),
        (0, 0, 0, True),
    ],
)
def test_a_sample_may_be_at_most_the_limit_behind_and_never_ahead(current: int, sample: int, limit: int, allowed: bool):
    assert is_fresh(current, sample, limit) is allowed


@pytest.mark.parametrize(
    ("limit", "batch", "lag", "capacity"), [(0, 4, 0, 4), (0, 4, 1, 0), (2, 4, 0, 12), (2, 4, 1, 8)]
)
def test_an_update_that_is_not_published_yet_uses_up_one_version_of_the_capacity(
    limit: int, batch: int, lag: int, capacity: int
):
    assert group_capacity(limit, batch, lag) == capacity


def test_the_sequential_mode_pins_leases_to_the_published_version():
    window = version_window(0, Versions(trained=7, published=7))
    assert window == VersionWindow(trained=7, published=7, max_staleness=0)
    assert (window.oldest(), window.oldest(3), window.newest) == (7, 7, 7)


def test_the_asynchronous_mode_takes_any_version_inside_the_bound():
    window = VersionWindow(trained=7, published=7, max_staleness=2)
    assert (window.oldest(), window.newest) == (5, None)
    assert VersionWindow(trained=1, published=1, max_staleness=2).oldest() == 0


def test_what_waits_behind_other_groups_has_to_be_sampled_with_a_newer_version() -> None:
    window = VersionWindow(trained=7, published=7, max_staleness=2)
    assert [window.oldest(updates) for updates in range(4)] == [5, 6, 7, 7]
    # Version 8 is trained and not fetchable yet: nobody can be asked for more than 7.
    assert VersionWindow(trained=8, published=7, max_staleness=2).oldest(2) == 7


def test_there_is_nothing_to_sample_with_before_version_0():
    assert version_window(2, Versions(trained=0, published=None)) is None


@pytest.mark.parametrize("limit", [0, 1, 2, 5])
def test_groups_admitted_within_the_capacity_are_consumed_in_time_even_when_versions_are_never_fetched(limit: int):
    """Each group is sampled with the version at its admission, and consumed oldest first."""
    batch, queue = 3, list[int]()
    for version in range(50):
        queue += [version] * (group_capacity(limit, batch, 0) - len(queue))
        taken, queue = queue[:batch], queue[batch:]
        assert all(version - sampled <= limit for sampled in taken)
