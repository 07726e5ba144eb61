"""The pure parts of a fetch: piece maps, retention, who is asked for what."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_swarm.checkpoint.fetch_plan import PiecePlan
from echo_swarm.checkpoint.pieces import PieceMap
from echo_swarm.checkpoint.retention import HeldVersion, check_retention, versions_to_delete, versions_to_evict
from echo_swarm.checkpoint.sources import GIVEN_UP_REST_S, MAX_KNOWN, USELESS_S, SourceBook
from echo_swarm.errors import MalformedMessage, SettingsError


@given(st.integers(1, 70).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_a_piece_map_survives_the_wire(example):
    count, held = example
    pieces = PieceMap(count)
    for index in held:
        pieces.add(index)
    again = PieceMap.unpack(count, pieces.pack())
    assert set(again) == held and set(again.missing()) == set(range(count)) - held
    assert again.held == len(held) and again.complete == (len(held) == count)
    assert PieceMap.full(count).complete


@pytest.mark.parametrize("packed", [b"", b"\xff\xff\xff", b"\xff\x04"])
def test_a_piece_map_of_the_wrong_size_is_refused(packed):
    with pytest.raises(MalformedMessage):
        PieceMap.unpack(10, packed)


def held(version, *, complete=True, in_use=False, size=10):
    return HeldVersion(version=version, complete=complete, in_use=in_use, size_bytes=size)


def test_fewer_versions_than_trajectories_may_lag_is_refused_at_start():
    check_retention(keep_versions=9, max_staleness=8)
    with pytest.raises(SettingsError, match="at least 9"):
        check_retention(keep_versions=2, max_staleness=8)


def test_retention_keeps_what_is_new_or_in_use():
    versions = [
        held(0),
        held(1, in_use=True),
        held(2),
        held(3, complete=False),
        held(4),
        held(5),
        held(6, complete=False),
    ]
    assert versions_to_delete(versions, keep_versions=2) == [0, 2, 3]
    assert versions_to_delete(versions, keep_versions=0) == [0, 2, 3, 4]
    assert versions_to_delete([], keep_versions=3) == []


def test_eviction_takes_the_oldest_and_spares_what_is_needed():
    versions = [held(0, in_use=True), held(1), held(2), held(3), held(4, complete=False)]
    assert versions_to_evict(versions, excess_bytes=15, keep=4) == [1, 2]
    assert versions_to_evict(versions, excess_bytes=1000, keep=4) == [1, 2]
    assert versions_to_evict(versions, excess_bytes=0, keep=4) == []


def plan_of(have, *, window=4, max_in_flight=100, seed=0):
    return PiecePlan(have, coordinator="C", window=window, max_in_flight=max_in_flight, random=Random(seed))


def land(plan, have, peer, index, now=0.0):
    have.add(index)
    plan.settle(peer, index, now)


def test_every_piece_is_asked_for_once_while_there_are_others():
    have = PieceMap(40)
    plan = plan_of(have)
    for peer in "ABC":
        plan.update(peer, PieceMap.full(40))
    asked = []
    while not have.complete:
        for peer in "ABC":
            while (index := plan.take(peer, 0.0)) is not None:
                asked.append(index)
                land(plan, have, peer, index)
    assert sorted(asked) == list(range(40))


def test_the_coordinator_is_asked_for_what_nobody_else_has():
    have = PieceMap(20)
    peers = PieceMap(20)
    for index in range(10):
        peers.add(index)
    plan = plan_of(have)
    plan.update("A", peers)
    plan.update("C", PieceMap.full(20))
    first = [plan.take("C", 0.0)]
    land(plan, have, "C", first[0])
    while len(first) < 10:
        first.append(plan.take("C", 0.0))
        land(plan, have, "C", first[-1])
    assert sorted(first) == list(range(10, 20))
    # Of those that a peer has too, one at a time.
    assert plan.take("C", 0.0) in range(10)
    assert plan.take("C", 0.0) is None


def test_what_the_coordinator_may_choose_from_is_what_nobody_else_has():
    have = PieceMap(20)
    peers = PieceMap(20)
    for index in range(10):
        peers.add(index)
    plan = plan_of(have)
    plan.update("A", peers)
    plan.update("C", PieceMap.full(20))
    wanted, count = plan.wanted("C")
    # One to ask for now, and one for when that is there.
    assert set(wanted) == set(range(10, 20)) and count == 2
    assert plan.claim("C", 12, 0.0) and not plan.claim("C", 12, 0.0) and not plan.claim("A", 12, 0.0)
    assert plan.is_full("C") and plan.wanted("C")[1] == 1 and plan.wanted("C", [13])[1] == 0
    land(plan, have, "C", 12)
    assert plan.wanted("C")[1] == 4 and 12 not in plan.wanted("C")[0] and 13 not in plan.wanted("C", [13])[0]
    for index in set(range(10, 20)) - {12}:
        have.add(index)
        plan._free.discard(index)
    wanted, count = plan.wanted("C")
    assert set(wanted) == set(range(10)) and count == 1
    assert plan.claim("C", 3, 0.0)
    assert plan.wanted("C")[1] == 0


def test_of_a_fast_source_more_is_chosen_ahead():
    have = PieceMap(100)
    plan = plan_of(have, window=8)
    plan.update("C", PieceMap.full(100))
    assert plan.ahead("C") == 1 and plan.pieces_per_s("C") == 0 and plan.ahead("A") == 0
    for index in range(20):
        assert plan.claim("C", index, 0.0)
        land(plan, have, "C", index, 0.01)
    assert plan.pieces_per_s("C") == pytest.approx(800) and plan.ahead("C") == 32
    slow = PieceMap(100)
    plan = plan_of(slow, window=8)
    plan.update("C", PieceMap.full(100))
    assert plan.claim("C", 0, 0.0)
    land(plan, slow, "C", 0, 10.0)
    assert plan.ahead("C") == plan.window("C")


def test_beside_a_piece_that_was_chosen_only_chosen_ones_are_taken():
    have = PieceMap(40)
    plan = plan_of(have, window=8)
    plan.update("C", PieceMap.full(40))
    for index in range(20):
        assert plan.claim("C", index, 0.0)
        land(plan, have, "C", index)
    assert plan.claim("C", 30, 0.0)
    assert plan.extend("C", 30, 5, 0.0, among=[28, 29, 31, 33]) == range(28, 32)
    assert not plan.claim("C", 29, 0.0) and plan.claim("C", 33, 0.0)


def test_at_the_end_the_coordinator_is_asked_for_what_others_are_late_with():
    have = PieceMap(1)
    plan = plan_of(have)
    plan.update("A", PieceMap.full(1))
    plan.update("C", PieceMap.full(1))
    assert plan.take("A", 0.0) == 0
    assert plan.wanted("C")[1] == 0 and plan.take_late("C", 0.1) is None
    assert plan.take_late("C", 10.0) == 0


def test_rare_pieces_come_first():
    have = PieceMap(30)
    plan = plan_of(have)
    common = PieceMap.full(30)
    common.discard(17)
    plan.update("A", PieceMap.full(30))
    plan.update("B", common)
    assert plan.take("A", 0.0) == 17


def test_a_source_earns_its_window_and_memory_is_bounded():
    have = PieceMap(100)
    plan = plan_of(have, window=3, max_in_flight=4)
    plan.update("A", PieceMap.full(100))
    plan.update("B", PieceMap.full(100))
    index = plan.take("A", 0.0)
    assert plan.take("A", 0.0) is None
    land(plan, have, "A", index)
    taken = [plan.take("A", 0.0) for _ in range(2)]
    assert plan.take("A", 0.0) is None
    land(plan, have, "A", taken[0])
    assert [plan.take("A", 0.0) is None for _ in range(3)] == [False, False, True]
    assert plan.take("B", 0.0) is not None
    assert plan.take("B", 0.0) is None


def test_a_source_that_answers_slowly_is_asked_for_less_at_a_time():
    have = PieceMap(100)
    plan = plan_of(have, window=8)
    plan.update("A", PieceMap.full(100))

    def window() -> int:
        taken = []
        while (index := plan.take("A", 0.0)) is not None:
            taken.append(index)
        for index in taken:
            plan.settle("A", index, 0.0)
        return len(taken)

    for _ in range(10):
        land(plan, have, "A", plan.take("A", 0.0), now=0.1)
    assert window() == 8
    for _ in range(3):
        land(plan, have, "A", plan.take("A", 0.0), now=0.45)
    assert window() == 8
    for _ in range(3):
        land(plan, have, "A", plan.take("A", 0.0), now=3.0)
    assert window() == 5
    for _ in range(10):
        land(plan, have, "A", plan.take("A", 0.0), now=3.0)
    assert window() == 2


def test_a_piece_that_takes_long_is_asked_of_another_in_the_end_game():
    have = PieceMap(1)
    plan = plan_of(have)
    for peer in "ABDE":
        plan.update(peer, PieceMap.full(1))
    assert plan.take("A", 0.0) == 0
    assert plan.take("B", 0.1) is None
    assert plan.take("B", 10.0) == 0
    assert plan.take("D", 20.0) == 0
    assert plan.take("E", 30.0) is None
    plan.remove("A")
    assert plan.take("E", 30.0) == 0
    land(plan, have, "E", 0)
    plan.settle("B", 0, 31.0)
    assert plan.take("B", 99.0) is None


def test_what_a_lost_source_was_asked_for_is_asked_of_others():
    have = PieceMap(2)
    plan = plan_of(have)
    plan.update("A", PieceMap.full(2))
    plan.update("B", PieceMap.full(2))
    lost = plan.take("A", 0.0)
    assert plan.take("B", 0.0) != lost
    plan.remove("A")
    plan.settle("A", lost, 0.0)
    plan.settle("B", 1 - lost, 0.0)
    assert plan.take("B", 0.0) in (0, 1)


def test_a_piece_that_came_gives_others_work_only_where_all_places_were_taken():
    have = PieceMap(6)
    plan = plan_of(have, max_in_flight=2)
    for peer in "AB":
        plan.update(peer, PieceMap.full(6))
    first = plan.take("A", 0.0)
    have.add(first)
    assert not plan.settle("A", first, 1.0)
    assert plan.take("A", 1.0) is not None
    piece = plan.take("B", 1.0)
    assert plan.take("A", 1.0) is None
    have.add(piece)
    assert plan.settle("B", piece, 2.0)


def test_a_piece_that_did_not_come_gives_others_work():
    plan = plan_of(PieceMap(6))
    for peer in "AB":
        plan.update(peer, PieceMap.full(6))
    assert plan.settle("A", plan.take("A", 0.0), 1.0)
    assert not plan.settle("A", 5, 1.0)


def test_the_stock_of_a_source_is_what_is_missing_and_asked_of_nobody():
    have, few = PieceMap(20), PieceMap(20)
    for index in (3, 11, 12):
        few.add(index)
    plan = plan_of(have)
    assert plan.stock("A") == 0
    plan.update("A", few)
    assert plan.stock("A") == 3
    first = plan.take("A", 0.0)
    assert plan.stock("A") == 2
    land(plan, have, "A", first)
    second = plan.take("A", 0.0)
    assert plan.stock("A") == 1
    plan.settle("A", second, 1.0)
    assert plan.stock("A") == 2


def test_there_is_work_while_any_source_has_a_missing_piece():
    have, few = PieceMap(20), PieceMap(20)
    few.add(11)
    plan = plan_of(have)
    assert not plan.has_work
    plan.update("A", few)
    assert plan.has_work
    have.add(11)
    assert not plan.has_work
    plan.update("B", PieceMap.full(20))
    assert plan.has_work
    plan.remove("B")
    assert not plan.has_work


def test_a_source_that_was_given_up_is_tried_again_after_a_rest_and_not_waited_for():
    book = SourceBook(max_active=2, max_attempts=1, retry_s=1.0)
    book.know("A")
    book.start(0.0)
    book.failed("A", 0.0)
    assert book.exhausted and book.start(GIVEN_UP_REST_S) == []
    assert book.start(GIVEN_UP_REST_S + 1.0) == ["A"]


def test_a_source_is_tried_again_later_and_a_liar_never():
    book = SourceBook(max_active=2, max_attempts=2, retry_s=1.0)
    for peer in "ABD":
        book.know(peer)
    assert book.start(0.0) == ["A", "B"] and book.active == 2
    assert book.start(0.0) == []
    book.lied("A")
    book.failed("B", 0.0)
    assert book.start(0.5) == ["D"]
    assert book.start(1.0) == ["B"]
    book.failed("D", 2.0)
    book.failed("B", 2.0)
    assert not book.exhausted
    assert book.start(3.0) == ["D"]
    book.delivered("D", 3.0)
    book.failed("D", 3.0)
    assert book.start(4.0) == ["D"]
    book.failed("D", 4.0)
    assert book.exhausted


def test_a_place_is_kept_for_the_coordinator_however_many_others_come_first():
    book = SourceBook(max_active=3, max_attempts=2, retry_s=1.0, reserved="C")
    for peer in ["A", "B", "D", "C"]:
        book.know(peer)
    assert book.start(0.0) == ["C", "A", "B"]
    book.failed("C", 0.0)
    assert book.start(0.5) == [] and book.start(1.0) == ["C"]
    book.lied("C")
    assert book.start(2.0) == ["D"]


def test_a_source_that_gave_nothing_gives_way_to_one_that_was_not_tried():
    book = SourceBook(max_active=2, max_attempts=3, retry_s=1.0)
    for peer in "AB":
        book.know(peer)
    book.start(0.0)
    assert book.gives_way(USELESS_S) is None, "nobody else is there"
    book.know("D")
    book.delivered("B", 1.0)
    assert book.gives_way(USELESS_S - 0.1) is None
    assert book.gives_way(USELESS_S) == "A"
    book.failed("A", USELESS_S)
    assert book.start(USELESS_S) == ["D"]
    book.know("E")
    assert book.gives_way(USELESS_S + 1.0) == "B", "the one that gave nothing for longest"
    book.delivered("B", USELESS_S + 1.0)
    assert book.gives_way(USELESS_S + 1.0) is None
    book.failed("B", 20.0)
    assert book.start(20.0) == ["E"], "who was set aside waits for its back-off"


def test_peers_that_failed_make_room_for_newly_named_ones():
    book = SourceBook(max_active=1, max_attempts=1, retry_s=1.0)
    for number in range(MAX_KNOWN):
        book.know(f"peer {number}")
    book.know("late")
    (first,) = book.start(0.0)
    book.failed(first, 0.0)
    book.know("later")
    assert "late" not in book._standings and "later" in book._standings and len(book._standings) == MAX_KNOWN
