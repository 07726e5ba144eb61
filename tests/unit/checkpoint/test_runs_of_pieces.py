"""Pieces that lie side by side and are asked for in one request."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from echo_swarm.checkpoint.pieces import PieceMap
from tests.unit.checkpoint.test_plans import land, plan_of

MIRROR = "http://mirror"


def take_run(plan, peer, limit):
    first = plan.take(peer, 0.0)
    return [] if first is None else list(plan.extend(peer, first, limit, 0.0))


def grown(count, *, have=None, wide=64, seed=0):
    """Return a plan whose mirror has earned a window of `wide` pieces, and what is there."""
    have = have or PieceMap(count)
    plan = plan_of(have, max_in_flight=2 * wide, seed=seed)
    plan.update(MIRROR, PieceMap.full(count))
    plan.widen(MIRROR, wide)
    while plan.window(MIRROR) < wide:
        (index,) = take_run(plan, MIRROR, 1)
        land(plan, have, MIRROR, index)
    return plan, have


def test_a_run_is_no_longer_than_allowed_and_lies_in_the_file():
    plan, have = grown(200, wide=32)
    run = take_run(plan, MIRROR, 8)
    assert 1 <= len(run) <= 8 and run == list(range(run[0], run[-1] + 1))
    assert not any(index in have for index in run)


def test_runs_take_every_piece_once_and_are_few():
    for seed in range(20):
        count = 300
        plan, have = grown(count, wide=16, seed=seed)
        left, runs = set(have.missing()), 0
        while not have.complete:
            run = take_run(plan, MIRROR, 8)
            assert set(run) <= left
            left -= set(run)
            runs += 1
            for index in run:
                land(plan, have, MIRROR, index)
        assert not left and runs < count // 3


def test_a_run_does_not_reach_over_pieces_that_more_peers_have():
    have, common = PieceMap(100), PieceMap(100)
    for index in range(0, 100, 2):
        common.add(index)
    plan, have = grown(100, have=have, wide=16)
    plan.update("A", common)
    # Odd pieces are rarer, and each has even ones beside it.
    run = take_run(plan, MIRROR, 8)
    assert len(run) == 1 and run[0] % 2 == 1


def test_a_mirror_waits_until_a_request_of_some_size_can_be_made():
    plan, have = grown(500, wide=32)
    assert plan.room_for_run(MIRROR, 8)
    runs = [take_run(plan, MIRROR, 8) for _ in range(20)]
    assert sum(map(len, runs)) == 32 and plan.is_full(MIRROR)
    asked = [index for run in runs for index in run]
    for index in asked[:7]:
        land(plan, have, MIRROR, index)
        assert not plan.room_for_run(MIRROR, 8)
    land(plan, have, MIRROR, asked[7])
    assert plan.room_for_run(MIRROR, 8)


def test_a_mirror_has_half_of_all_requests_at_most():
    have = PieceMap(100)
    plan = plan_of(have, max_in_flight=10)
    plan.update(MIRROR, PieceMap.full(100))
    plan.widen(MIRROR, 64)
    for _ in range(20):
        land(plan, have, MIRROR, take_run(plan, MIRROR, 1)[0])
    assert plan.window(MIRROR) == 5
    plan.widen(MIRROR, 0)
    assert take_run(plan, MIRROR, 1)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32))
def test_whatever_happens_no_piece_is_lost_or_asked_twice(seed):
    random, have = Random(seed), PieceMap(60)
    plan = plan_of(have, seed=seed)
    asked = {}
    for peer in (MIRROR, "A", "C"):
        plan.update(peer, PieceMap.full(60))
    plan.widen(MIRROR, 16)
    for _ in range(400):
        peer = random.choice((MIRROR, "A", "C"))
        if asked and random.random() < 0.5:
            owner, index = random.choice(list(asked))
            del asked[owner, index]
            if random.random() < 0.6:
                have.add(index)
            plan.settle(owner, index, 0.0)
        else:
            for index in take_run(plan, peer, random.randint(1, 8) if peer == MIRROR else 1):
                assert index not in have and not any((other, index) in asked for other in (MIRROR, "A", "C"))
                asked[peer, index] = None
    for owner, index in asked:
        plan.settle(owner, index, 0.0)
    missing = set(have.missing())
    got = set()
    while run := take_run(plan, MIRROR, 4):
        got |= set(run)
        for index in run:
            land(plan, have, MIRROR, index)
    assert got == missing and have.complete
