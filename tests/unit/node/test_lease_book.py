"""Which lease comes next, and what becomes of leases that end early."""

from echo_node.lease_book import LeaseBook, version_for
from echo_swarm.codec import pack_u32
from echo_swarm.work import Lease, LeaseMember, Sampling


def lease(number: int, *, members: int = 4, low: int = 0, high: int | None = None, expires_in_s: float = 100) -> Lease:
    return Lease(
        lease_id=number.to_bytes(16, "big"),
        group_id=number,
        prompt_ids=pack_u32([1, 2, 3]),
        members=tuple(LeaseMember(member=index, seed=index) for index in range(members)),
        sampling=Sampling(temperature=1.0, max_tokens=8),
        min_version=low,
        max_version=high,
        expires_in_s=expires_in_s,
    )


def book_with(*leases: Lease, now_s: float = 0) -> LeaseBook:
    book = LeaseBook()
    book.add(leases, now_s)
    return book


def test_an_open_lease_gets_the_newest_version_and_a_pinned_one_its_own():
    assert version_for(lease(1, low=10), 12) == 12
    assert version_for(lease(1, low=13), 12) == 13
    assert version_for(lease(1, low=11, high=11), 12) == 11
    assert version_for(lease(1, low=11, high=14), 12) == 12
    assert version_for(lease(1, low=3), None) == 3


def test_members_are_begun_in_order_and_never_more_than_asked_for():
    book = book_with(lease(1, members=3))
    first = lease(1).lease_id
    assert [m.member for m in book.begin(first, 2)] == [0, 1]
    assert [m.member for m in book.begin(first, 2)] == [2]
    assert book.begin(first, 2) == [] and book.waiting == 0 and book.running == 3


def test_a_lease_is_complete_when_its_last_member_is_done():
    book = book_with(lease(1, members=2))
    lease_id = lease(1).lease_id
    book.begin(lease_id, 2)
    assert book.finish(lease_id, 0) and not book.is_complete(lease_id)
    assert book.finish(lease_id, 1) and book.is_complete(lease_id)
    assert not book.finish(lease_id, 1)


def test_the_same_lease_delivered_twice_is_held_once():
    book = book_with(lease(1, members=2))
    book.begin(lease(1).lease_id, 1)
    book.add([lease(1, members=2)], 5)
    assert book.waiting == 1 and book.running == 1


def test_a_completion_of_a_dropped_lease_is_thrown_away():
    book = book_with(lease(1))
    book.begin(lease(1).lease_id, 1)
    assert book.drop([lease(1).lease_id, lease(2).lease_id]) == [lease(1).lease_id]
    assert not book.finish(lease(1).lease_id, 0)


def test_leases_run_out_at_their_own_deadline():
    book = book_with(lease(1, expires_in_s=10), lease(2, expires_in_s=20), now_s=5)
    assert book.next_deadline_s() == 15
    assert book.overdue(14.9) == []
    assert book.overdue(15) == [lease(1).lease_id]
    assert len(book.overdue(25)) == 2


def test_a_beat_that_was_answered_gives_the_leases_it_named_their_full_time_again():
    book = book_with(lease(1, expires_in_s=10), lease(2, expires_in_s=10))
    book.renew([lease(1).lease_id, lease(9).lease_id], 8)
    assert book.overdue(10) == [lease(2).lease_id]
    assert book.overdue(18) == [lease(1).lease_id, lease(2).lease_id]


def test_a_lease_whose_version_is_not_held_lets_others_pass_and_is_reported():
    book = book_with(lease(1, low=13), lease(2, low=10))
    turn = book.turn(loaded=12, newest=12, held={12}, now_s=0)
    assert turn is not None and turn.lease.group_id == 2 and turn.version == 12
    assert book.missing(12, {12}) == {13}


def test_leases_of_the_loaded_version_go_first_until_an_older_one_has_waited_a_quarter_of_its_time():
    book = book_with(lease(1, low=11, high=11, expires_in_s=100), lease(2, low=10))
    early = book.turn(loaded=12, newest=12, held={11, 12}, now_s=24)
    late = book.turn(loaded=12, newest=12, held={11, 12}, now_s=25)
    assert early is not None and early.version == 12
    assert late is not None and late.version == 11


def test_a_newer_version_is_taken_up_between_leases():
    book = book_with(lease(1, low=10))
    turn = book.turn(loaded=12, newest=13, held={12, 13}, now_s=0)
    assert turn is not None and turn.version == 13


def test_leaving_gives_back_what_has_not_begun_and_keeps_what_runs():
    book = book_with(lease(1, members=2), lease(2, members=2))
    book.begin(lease(1).lease_id, 1)
    assert book.drop_waiting() == [lease(1).lease_id, lease(2).lease_id]
    assert book.ids == (lease(1).lease_id,) and book.waiting == 0 and book.running == 1
