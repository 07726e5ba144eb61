"""How much a peer may have in flight, by what it has shown. Time is passed in; nothing here sleeps."""

import pytest

from echo_coordinator.state.pace import GROWTH, MAX_PEERS, PATIENCE, REST_AFTER, Pace
from echo_coordinator.state.work_settings import WorkSettings
from echo_swarm.identity import PeerId

ANN, BOB = PeerId("ann"), PeerId("bob")
PROBE = 4


def made(**settings: object) -> Pace:
    return Pace(WorkSettings(**{"probe_members": PROBE, "lease_s": 60.0, "lease_max_s": 1800.0, **settings}))  # pyright: ignore


def deliver(pace: Pace, peer: PeerId, count: int, took_s: float = 1.0) -> None:
    for _ in range(count):
        pace.accepted(peer, 0.0, took_s)


def rounds(pace: Pace, peer: PeerId, places: int, count: int, took_s: float = 1.0) -> list[int]:
    """Let a peer fill its places and deliver all, `count` times; return what it had in flight each time."""
    held: list[int] = []
    for _ in range(count):
        held.append(min(places, pace.allowance(peer, 0)))
        pace.granted(peer, held[-1])
        deliver(pace, peer, held[-1], took_s)
    return held


def test_a_newcomer_gets_the_probe_and_an_honest_fast_node_64_places_in_its_fourth_round():
    assert rounds(made(), ANN, 64, 4) == [4, 12, 36, 64]


def test_completions_that_take_longer_than_the_target_fill_all_places_too():
    assert rounds(made(lease_target_s=20.0), ANN, 64, 5, took_s=300.0)[-1] == 64


def test_a_peer_may_hold_no_more_than_about_three_times_what_it_ever_used():
    pace = made()
    rounds(pace, ANN, 8, 1000)
    assert 8 <= pace.allowance(ANN, 0) <= 3 * 8 + GROWTH
    assert pace.allowance(BOB, 0) == PROBE


def test_the_quota_of_the_settings_bounds_what_can_be_shown():
    pace = made(max_in_flight_per_peer=10)
    rounds(pace, ANN, 64, 10)
    assert pace.allowance(ANN, 0) == 10


def test_a_peer_that_dribbles_out_completions_falls_back_to_the_probe():
    pace = made()
    rounds(pace, BOB, 64, 10)
    rounds(pace, ANN, 64, 4)
    assert pace.allowance(ANN, 0) >= 64
    pace.granted(ANN, 64)
    for _ in range(200):
        deliver(pace, BOB, 20)
        deliver(pace, ANN, 1, took_s=PATIENCE * 20.0 + 1)
    assert pace.allowance(ANN, 0) == PROBE


@pytest.mark.parametrize("kind", ["expired", "failed"])
def test_failures_in_a_row_end_in_one_completion_after_pauses_that_double(kind: str):
    pace = made()
    now, seen, longest = 0.0, [], []
    for _ in range(REST_AFTER + 8):
        getattr(pace, kind)(ANN, now)
        seen.append(pace.allowance(ANN, now))
        longest.append(pace.longest_s(ANN))
        wait_s = 0.0
        while not pace.allowance(ANN, now + wait_s):
            wait_s += 30.0
        seen[-1] = (seen[-1], wait_s)
        now += wait_s
    assert seen[:6] == [(2, 0), (1, 0), (0, 60), (0, 120), (0, 240), (0, 480)]
    assert seen[-1] == (0, 1800)
    assert longest[:6] == [900, 450, 225, 112.5, 60, 60]


def test_an_accepted_completion_ends_the_row_of_failures():
    pace = made()
    for _ in range(5):
        pace.expired(ANN, 0.0)
    pace.granted(ANN, 1)
    pace.accepted(ANN, 0.0, 1.0)
    assert pace.allowance(ANN, 0.0) == PROBE
    assert pace.longest_s(ANN) == 1800


def test_work_that_ran_out_costs_all_that_was_shown_and_a_failure_half():
    pace = made()
    rounds(pace, ANN, 64, 5)
    rounds(pace, BOB, 64, 5)
    shown = pace.allowance(BOB, 0)
    pace.expired(ANN, 0.0)
    pace.failed(BOB, 0.0)
    assert (pace.allowance(ANN, 0.0), pace.allowance(BOB, 0.0)) == (PROBE // 2, shown // 2)


def test_refused_completions_lower_it_to_one_and_an_accepted_one_brings_it_back_to_the_probe():
    pace = made()
    rounds(pace, ANN, 64, 3)
    shown = pace.allowance(ANN, 0)
    pace.refused(ANN)
    assert pace.allowance(ANN, 0) == shown - 1
    for _ in range(1000):
        pace.refused(ANN)
    assert pace.allowance(ANN, 0) == 1
    pace.granted(ANN, 1)
    pace.accepted(ANN, 0.0, 1.0)
    assert pace.allowance(ANN, 0) == PROBE


def test_made_up_peers_take_bounded_memory():
    pace = made()
    for number in range(MAX_PEERS + 10):
        pace.granted(PeerId(str(number)), 1)
    assert len(pace._shown) == MAX_PEERS
