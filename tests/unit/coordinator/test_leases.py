"""Leases: who gets what, for how long. Time is passed in; nothing here sleeps."""

import itertools

import pytest

from echo_coordinator.state.batch import Prompt
from echo_coordinator.state.groups import GroupTable, SlotState
from echo_coordinator.state.leases import LeaseBook, LiveLease
from echo_coordinator.state.rows import new_group
from echo_coordinator.state.staleness import VersionWindow
from echo_coordinator.state.work_settings import WorkSettings
from echo_swarm.identity import PeerId

ANN, BOB = PeerId("ann"), PeerId("bob")
WINDOW = VersionWindow(trained=5, published=5, max_staleness=2)


class Book:
    """A book over some groups, with ids that count up."""

    def __init__(self, train: int = 3, evaluate: int = 0, **settings: object) -> None:
        self.settings = WorkSettings(**{"group_size": 4, "max_tokens": 100, **settings})  # pyright: ignore
        self.groups = GroupTable()
        self.book = LeaseBook(self.groups, self.settings)
        self.ids = (n.to_bytes(16, "big") for n in itertools.count(1))
        for number in range(train + evaluate):
            pinned = None if number < train else 9
            size = 4 if number < train else 1
            self.groups.add(new_group(number, Prompt(index=number, prompt_ids=b""), size, pinned))

    def grant(
        self, peer: PeerId, capacity: int = 100, speed: float = 0, alone: bool = False, now: float = 0
    ) -> list[LiveLease]:
        return self.book.grant(
            peer,
            capacity=capacity,
            tokens_per_s=speed,
            alone=alone,
            window=WINDOW,
            now=now,
            new_id=lambda: next(self.ids),
        )


def members(leases: list[LiveLease]) -> list[tuple[int, list[int]]]:
    return [(lease.group_id, sorted(lease.attempts)) for lease in leases]


def test_the_oldest_group_is_completed_first_and_may_be_split():
    made = Book()
    assert members(made.grant(ANN, 6, alone=True)) == [(0, [0, 1, 2, 3]), (1, [0, 1])]
    assert members(made.grant(BOB, 4, alone=True)) == [(1, [2, 3]), (2, [0, 1])]


def test_evaluation_comes_before_training_and_is_pinned():
    leases = Book(train=2, evaluate=2).grant(ANN, 3, alone=True)
    assert members(leases) == [(2, [0]), (3, [0]), (0, [0])]
    assert [(lease.min_version, lease.max_version) for lease in leases] == [(9, 9), (9, 9), (3, None)]


@pytest.mark.parametrize(
    ("speed", "alone", "share"),
    [(0, False, 4), (0, True, 12), (1, False, 1), (15, False, 6), (1000, False, 12), (1, True, 12)],
)
def test_slow_nodes_get_smaller_shares_and_a_lone_node_all_it_can_take(speed: float, alone: bool, share: int):
    """A completion is taken to be 50 tokens long, a share to last 20 s."""
    assert sum(len(lease.attempts) for lease in Book().grant(ANN, speed=speed, alone=alone)) == share


def test_a_peer_never_has_more_in_flight_than_its_quota():
    made = Book(max_in_flight_per_peer=5)
    assert sum(len(lease.attempts) for lease in made.grant(ANN, alone=True)) == 5
    assert made.grant(ANN, alone=True) == []
    assert made.book.share(ANN, capacity=1, tokens_per_s=0, alone=True) == 0


def test_a_lease_that_is_not_renewed_returns_its_slots():
    made = Book(train=1, lease_s=10)
    (lease,) = made.grant(ANN, alone=True)
    assert made.book.next_deadline() == 10
    assert made.book.expire(9.9) == []
    assert [(d.member, d.cause) for d in made.book.expire(10)] == [(m, "expired") for m in range(4)]
    assert made.book.renew(ANN, [lease.lease_id], 11) == [lease.lease_id]
    (again,) = made.grant(BOB, alone=True, now=11)
    assert again.attempts == {m: 1 for m in range(4)}


def test_beats_renew_a_lease_up_to_its_hard_limit():
    made = Book(train=1, lease_s=10, lease_max_s=25)
    (lease,) = made.grant(ANN, alone=True)
    for now in (5, 12, 20):
        assert made.book.renew(ANN, [lease.lease_id], now) == []
        assert made.book.expire(now) == []
    assert len(made.book.expire(25)) == 4


def test_a_beat_cannot_renew_the_lease_of_another_peer():
    made = Book(train=1, lease_s=10)
    (lease,) = made.grant(ANN, alone=True)
    assert made.book.renew(BOB, [lease.lease_id, b"?" * 16], 5) == [lease.lease_id, b"?" * 16]
    assert len(made.book.expire(10)) == 4


def test_a_peer_releases_its_own_leases_only():
    made = Book(train=1)
    (lease,) = made.grant(ANN, alone=True)
    assert made.book.release(BOB, [lease.lease_id], "released") == []
    assert len(made.book.release(ANN, [lease.lease_id, lease.lease_id], "released")) == 4
    assert made.book.in_flight(ANN) == 0


def test_a_slot_is_given_up_after_so_many_tries():
    made = Book(train=1, max_attempts=3)
    for _ in range(3):
        (lease,) = made.grant(ANN, 1, alone=True)
        made.book.release(ANN, [lease.lease_id], "failed")
    assert made.groups.by_id[0].slots[0].state is SlotState.VOID
    assert members(made.grant(ANN, alone=True)) == [(0, [1, 2, 3])]


def test_the_leases_of_a_replaced_process_take_no_quota_and_end_soon():
    made = Book(train=1, max_in_flight_per_peer=4)
    (lease,) = made.grant(ANN, alone=True)
    made.book.orphan(ANN, 3)
    assert made.book.in_flight(ANN) == 0
    assert made.book.renew(ANN, [lease.lease_id], 2) == []
    assert len(made.book.expire(3)) == 4


def test_shares_follow_the_length_of_completions():
    made = Book(train=20)
    for _ in range(500):
        made.book.learn_length(10)
    assert sum(len(lease.attempts) for lease in made.grant(ANN, speed=10)) == 19


def test_leases_of_a_group_that_is_gone_are_forgotten():
    made = Book()
    first, *_ = made.grant(ANN, alone=True)
    made.book.forget_group(0)
    assert made.book.get(first.lease_id) is None
    assert made.book.in_flight(ANN) == 8


def test_a_lease_that_two_beats_do_not_name_was_never_heard_of_and_is_taken_back():
    made = Book(train=2, beat_s=3.0)
    first, second = made.grant(ANN, 8, alone=True)
    assert made.book.drop_unnamed(ANN, [first.lease_id], now=5.9) == []
    dropped = made.book.drop_unnamed(ANN, [first.lease_id], now=6.0)
    assert {drop.group.group_id for drop in dropped} == {second.group_id} and len(dropped) == 4
    assert {drop.cause for drop in dropped} == {"unnamed"}
    assert members(made.grant(BOB, 8, alone=True)) == [(1, [0, 1, 2, 3])]
    assert made.book.drop_unnamed(ANN, [first.lease_id], now=60.0) == []
