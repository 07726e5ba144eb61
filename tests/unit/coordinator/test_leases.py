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

    def show(self, peer: PeerId, count: int) -> None:
        """Let a peer have delivered so much in time."""
        self.book.pace.granted(peer, 1000)
        for _ in range(count):
            self.book.pace.accepted(peer, 0.0, 1.0)

    def oldest(self, peer: PeerId) -> LiveLease:
        """Return the oldest lease of which a peer holds something."""
        return next(lease for lease in self.book._leases.values() if lease.peer == peer and lease.outstanding)


def members(leases: list[LiveLease]) -> list[tuple[int, list[int]]]:
    return [(lease.group_id, sorted(lease.draws)) for lease in leases]


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
    made = Book()
    made.show(ANN, 64)
    assert sum(len(lease.draws) for lease in made.grant(ANN, speed=speed, alone=alone)) == share


def test_a_newcomer_gets_the_probe_whatever_it_claims_and_no_more_by_asking_again():
    made = Book(train=100)
    assert sum(len(lease.draws) for lease in made.grant(ANN, speed=1e6)) == 4
    assert made.grant(ANN, speed=1e6) == []
    assert made.book.share(ANN, capacity=1, tokens_per_s=1e6, alone=False, now=0) == 0


def test_an_honest_node_with_64_places_has_them_all_filled_after_30_deliveries():
    made = Book(train=100)
    delivered = 0
    while made.book.in_flight(ANN) < 64:
        (first, *_) = made.grant(ANN, 64 - made.book.in_flight(ANN), speed=1e6) or [made.oldest(ANN)]
        if made.book.in_flight(ANN) < 64:
            made.book.delivered(first, min(first.outstanding), 1.0)
            delivered += 1
    assert delivered == 30


def test_what_one_peer_failed_at_goes_to_others_first_and_comes_back_to_it():
    made = Book(train=1, lease_s=60)
    (lease,) = made.grant(ANN, 4, speed=1e6)
    made.book.release(ANN, [lease.lease_id], "failed", 10, failed=True)
    assert made.grant(ANN, speed=1e6, now=10) == []
    assert members(made.grant(BOB, 1, speed=1e6, now=10)) == [(0, [0])]
    assert members(made.grant(ANN, 1, alone=True, now=10)) == [(0, [1])]
    assert [len(lease.draws) for lease in made.grant(ANN, speed=1e6, now=70)] == [1]


def test_one_peer_that_fails_at_once_whatever_it_gets_uses_up_one_try_of_a_group():
    made = Book(train=30, max_attempts=3)
    for second in range(50):
        for lease in made.grant(ANN, speed=1e6, now=second):
            made.book.release(ANN, [lease.lease_id], "failed", second, failed=True)
    assert {slot.attempt for group in made.groups.by_id.values() for slot in group.slots} <= {0, 1}
    assert sum(slot.attempt for group in made.groups.by_id.values() for slot in group.slots) <= 4 + 2 + 1


def fail(made: Book, peer: PeerId, now: float) -> None:
    """Let a peer take the one slot there is and fail."""
    (lease,) = made.grant(peer, 1, alone=True, now=now)
    made.book.release(peer, [lease.lease_id], "failed", now, failed=True)


def one_slot(**settings: object) -> Book:
    made = Book(train=0, evaluate=1, lease_s=10, **settings)
    made.book.tries.others = lambda sources: not {ANN, BOB, PeerId("cat")} <= set(sources)
    return made


def test_one_peer_alone_does_not_use_up_the_tries_of_a_slot_while_others_are_here():
    made = one_slot(max_attempts=2)
    for second in range(40):
        fail(made, ANN, second)
    slot = made.groups.by_id[0].slots[0]
    assert (slot.state, slot.attempt - slot.spared) == (SlotState.OPEN, 1)
    # Nobody else took it in four times `lease_s`: a prompt that nobody wants must end.
    fail(made, ANN, 41)
    assert slot.state is SlotState.VOID


def test_peers_behind_one_address_count_as_one_and_two_from_elsewhere_as_two():
    made = one_slot(max_attempts=2)
    made.book.tries.source_of = lambda peer: "192.0.2.1" if peer.startswith("sybil") else peer
    for number in range(30):
        fail(made, PeerId(f"sybil {number}"), 1)
    slot = made.groups.by_id[0].slots[0]
    assert slot.state is SlotState.OPEN and slot.losers == ("192.0.2.1",)
    fail(made, BOB, 2)
    assert slot.state is SlotState.VOID


def test_a_poisonous_prompt_ends_when_all_who_are_here_have_failed_at_it():
    made = one_slot(max_attempts=4)
    for peer in (ANN, ANN, BOB, PeerId("cat")):
        fail(made, peer, 1)
    slot = made.groups.by_id[0].slots[0]
    assert (slot.state, slot.attempt - slot.spared) == (SlotState.OPEN, 3)
    fail(made, ANN, 1)
    assert slot.state is SlotState.VOID


def test_work_handed_back_in_time_costs_nothing_and_a_held_lease_does():
    made = Book(train=20)
    made.show(ANN, 20)
    shown = made.book.pace.allowance(ANN, 0)
    (first, *_) = made.grant(ANN, 8, speed=1e6)
    made.book.release_all(ANN, "released", 5)
    assert made.book.pace.allowance(ANN, 5) == shown
    assert not first.outstanding
    made.grant(ANN, 8, speed=1e6, now=6)
    made.book.release_all(ANN, "released", 1000)
    assert made.book.pace.allowance(ANN, 1000) == shown // 2


def test_a_vanished_peer_begins_anew_when_it_comes_back():
    made = Book(train=20)
    made.show(ANN, 20)
    made.grant(ANN, 8, speed=1e6)
    assert len(made.book.lose(ANN, 10)) == 8
    assert made.book.pace.allowance(ANN, 10) == 2
    assert made.book.lose(ANN, 11) == []


def test_a_peer_that_took_everything_while_alone_and_delivers_nothing_gives_it_up_to_a_second():
    made = Book(train=20, lease_s=1000)
    made.grant(ANN, alone=True)
    assert made.book.in_flight(ANN) == 80
    patience = made.book.pace.patience_s
    assert made.book.expire(patience, alone=False) == []
    assert made.book.expire(patience + 1, alone=True) == []
    made.book.expire(patience + 1, alone=False)
    assert made.book.in_flight(ANN) == 4


def test_what_a_silent_peer_holds_is_taken_back_when_others_have_nothing_left_to_do():
    made = Book(train=1, lease_s=1000)
    made.grant(ANN, 2, speed=1e6)
    patience = made.book.pace.patience_s
    assert made.book.expire(2 * patience + 1, alone=False) == []
    (busy,) = made.grant(BOB, 2, speed=1e6)
    made.book.delivered(busy, 2, 1.0)
    assert made.book.expire(2 * patience, alone=False) == []
    assert made.book.expire(2 * patience + 1, alone=True) == []
    (kept,) = [lease for lease in made.book._leases.values() if lease.peer == BOB]
    made.book.renew(BOB, [kept.lease_id], 2 * patience)
    dropped = made.book.expire(2 * patience + 1, alone=False)
    assert [(drop.peer, drop.member, drop.cause) for drop in dropped] == [(ANN, 0, "expired"), (ANN, 1, "expired")]
    assert made.book.in_flight(BOB) == 1


def test_a_peer_never_has_more_in_flight_than_its_quota():
    made = Book(max_in_flight_per_peer=5)
    assert sum(len(lease.draws) for lease in made.grant(ANN, alone=True)) == 5
    assert made.grant(ANN, alone=True) == []
    assert made.book.share(ANN, capacity=1, tokens_per_s=0, alone=True, now=0) == 0


def test_a_lease_that_is_not_renewed_returns_its_slots():
    made = Book(train=1, lease_s=10)
    (lease,) = made.grant(ANN, alone=True)
    assert made.book.next_deadline() == 10
    assert made.book.expire(9.9) == []
    assert [(d.member, d.cause) for d in made.book.expire(10)] == [(m, "expired") for m in range(4)]
    assert made.book.renew(ANN, [lease.lease_id], 11) == [lease.lease_id]
    (again,) = made.grant(BOB, alone=True, now=11)
    assert again.draws == {m: 0 for m in range(4)}


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
    assert made.book.release(BOB, [lease.lease_id], "released", 0) == []
    assert len(made.book.release(ANN, [lease.lease_id, lease.lease_id], "released", 0)) == 4
    assert made.book.in_flight(ANN) == 0


def test_a_slot_is_given_up_after_so_many_tries():
    made = Book(train=1, max_attempts=3)
    for _ in range(3):
        (lease,) = made.grant(ANN, 1, alone=True)
        made.book.release(ANN, [lease.lease_id], "failed", 0, failed=True)
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
    made.show(ANN, 64)
    for _ in range(500):
        made.book.learn_length(10)
    assert sum(len(lease.draws) for lease in made.grant(ANN, speed=10)) == 19


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


def test_work_that_is_handed_back_uses_up_no_try_and_gets_another_seed():
    group = new_group(0, Prompt(index=0, prompt_ids=b""), 4, None)
    attempts = [group.slots[0].attempt]
    for _ in range(50):
        group.drop(0, 3, spared=True)
        attempts.append(group.slots[0].attempt)
    assert group.slots[0].state is SlotState.OPEN and len(set(attempts)) == len(attempts)
    for state in (SlotState.OPEN, SlotState.OPEN, SlotState.VOID):
        group.drop(0, 3)
        assert group.slots[0].state is state
