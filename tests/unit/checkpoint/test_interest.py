"""Who else is after an artifact, and what the coordinator promises to whom."""

from collections import Counter
from random import Random

import anyio
import pytest

from echo_swarm.checkpoint.allocation import MAX_PROMISES, PROMISE_S, Allocation
from echo_swarm.checkpoint.interest import HOLD_S, MAX_ARTIFACTS, MAX_PEERS, InterestBook
from echo_swarm.checkpoint.pieces import PieceMap
from echo_swarm.checkpoint.rate import BURST_S, RateLimit

A, B = b"a" * 32, b"b" * 32


def at(peer: str) -> tuple[str, ...]:
    return (f"/ip4/10.0.0.1/tcp/1/p2p/{peer}",)


def test_peers_learn_of_others_that_can_be_dialled_and_not_of_themselves():
    book = InterestBook(Random(0))
    book.note(A, "ann", at("ann"), 0.0)
    book.note(A, "bob", at("bob"), 0.0)
    book.note(A, "cut off", (), 0.0)
    book.note(B, "dan", at("dan"), 0.0)
    assert book.others(A, "ann", 16, 1.0) == {"bob": at("bob")}
    assert set(book.others(A, "cut off", 16, 1.0)) == {"ann", "bob"}
    assert len(book.others(A, "cut off", 1, 1.0)) == 1
    assert set(book.connected(A, 1.0)) == {"ann", "bob", "cut off"}


def test_a_peer_names_only_itself():
    book = InterestBook()
    book.note(A, "ann", (*at("victim"), *at("ann")), 0.0)
    assert book.others(A, "bob", 16, 0.0) == {"ann": at("ann")}


def test_who_is_silent_is_forgotten_and_the_book_is_bounded():
    book = InterestBook()
    book.note(A, "ann", at("ann"), 0.0)
    assert book.connected(A, HOLD_S - 1) and not book.connected(A, HOLD_S)
    for number in range(MAX_PEERS + 5):
        book.note(A, f"peer {number}", (), 1.0)
    assert len(book.connected(A, 1.0)) == MAX_PEERS and "ann" not in book.connected(A, 1.0)
    for number in range(MAX_ARTIFACTS):
        book.note(number.to_bytes(32), "bob", (), 2.0)
    assert not book.connected(A, 2.0)


def test_every_piece_is_promised_once_before_any_is_promised_twice():
    allocation, wanted = Allocation(Random(1)), PieceMap.full(20)
    promised = Counter(index for n in range(5) for index in allocation.choose(A, f"peer {n}", wanted, 4, 0.0))
    assert promised == Counter(range(20))
    promised.update(index for n in range(5) for index in allocation.choose(A, f"other {n}", wanted, 4, 0.0))
    assert set(promised.values()) == {2}
    assert allocation.choose(A, "ann", PieceMap(20), 4, 0.0) == []
    assert len(allocation.choose(B, "ann", PieceMap.full(3), 9, 0.0)) == 3


def test_who_is_alone_gets_pieces_in_order_and_several_get_them_from_anywhere():
    allocation, wanted = Allocation(Random(1)), PieceMap.full(1000)
    assert allocation.choose(A, "ann", wanted, 4, 0.0) == [0, 1, 2, 3]
    others = allocation.choose(A, "bob", wanted, 4, 0.0)
    assert max(others) - min(others) > 100
    assert max(allocation.choose(A, "ann", wanted, 4, 0.0)) > 100
    assert allocation.choose(B, "ann", wanted, 4, 0.0) == [0, 1, 2, 3]


def test_promises_that_are_not_called_in_are_taken_back_and_those_kept_stay():
    allocation, wanted = Allocation(Random(1)), PieceMap.full(20)
    dying = allocation.choose(A, "dying", wanted, 5, 0.0)
    honest = allocation.choose(A, "honest", wanted, 5, 0.0)
    for index in honest:
        allocation.gave(A, "honest", index)
        allocation.gave(A, "nobody", index)
    rest = allocation.choose(A, "ann", wanted, 10, PROMISE_S - 1)
    assert not {*rest} & {*dying, *honest}
    assert {*allocation.choose(A, "bob", wanted, 5, PROMISE_S)} == {*dying}


def test_a_greedy_peer_skews_no_more_than_a_few_pieces():
    allocation, count = Allocation(Random(1)), 1000
    for _ in range(100):
        allocation.choose(A, "greedy", PieceMap.full(count), 64, 0.0)
    fresh = [i for n in range(14) for i in allocation.choose(A, f"peer {n}", PieceMap.full(count), 64, 0.0)]
    assert len(set(fresh)) == len(fresh) == 14 * 64
    crowd = Allocation(Random(1))
    for number in range(200):
        crowd.choose(A, f"identity {number}", PieceMap.full(count), 64, 0.0)
    assert len(crowd._artifacts[A].promises) <= MAX_PROMISES


@pytest.mark.anyio
async def test_a_limit_lets_a_burst_pass_and_then_as_much_as_it_says():
    limit = RateLimit(1_000_000)
    start = anyio.current_time()
    for _ in range(10):
        await limit.spend(50_000)
    assert anyio.current_time() - start >= 0.5 - BURST_S - 0.01
    assert limit.backlog_s() <= 0.05
    free = RateLimit(None)
    await free.spend(1 << 50)
    assert free.backlog_s() == 0
    with pytest.raises(ValueError, match="limit of 0"):
        RateLimit(0)


@pytest.mark.anyio
async def test_who_hangs_up_while_waiting_does_not_use_up_what_others_wait_for():
    limit = RateLimit(100_000)
    for _ in range(20):
        with anyio.move_on_after(0.01):
            await limit.spend(100_000)
    assert limit.backlog_s() <= 1.0
