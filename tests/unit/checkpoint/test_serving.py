"""Who is served next, who hears news, and what is charged."""

import anyio
import pytest

from echo_swarm.checkpoint import news
from echo_swarm.checkpoint.news import News
from echo_swarm.checkpoint.rate import RateLimit
from echo_swarm.checkpoint.uploads import Turns
from tests.swarm.support.node_harness import until

pytestmark = pytest.mark.anyio
A = b"a" * 32
B = b"b" * 32


async def test_peers_take_turns_however_many_requests_one_of_them_has_waiting():
    turns, served = Turns(1), []

    async def ask(peer):
        async with turns.turn(peer, max_wait_s=10):
            served.append(peer)

    async with anyio.create_task_group() as tasks, turns.turn("first", max_wait_s=10):
        for peer in ["greedy"] * 8 + ["ann", "bob"]:
            tasks.start_soon(ask, peer)
            await anyio.wait_all_tasks_blocked()
        assert turns.waiting == 10
    assert set(served[:3]) == {"greedy", "ann", "bob"} and served[3:] == ["greedy"] * 7
    assert turns.waiting == 0


async def test_who_waits_too_long_or_leaves_loses_nobody_elses_place():
    turns = Turns(1)
    async with turns.turn("first", max_wait_s=10):
        with pytest.raises(TimeoutError):
            async with turns.turn("ann", max_wait_s=0.0):
                pass
        with anyio.move_on_after(0.01):
            async with turns.turn("bob", max_wait_s=10):
                pass
        assert turns.waiting == 0
    async with turns.turn("ann", max_wait_s=0.0):
        pass


async def test_one_look_serves_all_who_wait_and_somebody_looks_when_the_first_leaves(monkeypatch):
    monkeypatch.setattr(news, "LOOK_S", 0.04)
    held, looks = 3, 0

    def look(_digest):
        nonlocal looks
        looks += 1
        return held

    desk, heard = News(look), []

    async def wait(peer, wait_s):
        await desk.wait(peer, A, 3, wait_s)
        heard.append(peer)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait, "leaves", 0.05)
        await anyio.wait_all_tasks_blocked()
        for number in range(200):
            tasks.start_soon(wait, f"peer {number}", 60.0)
        await until(lambda: heard)
        looks = 0
        await anyio.sleep(10 * news.LOOK_S)
        assert heard == ["leaves"] and 0 < looks <= 220, "each of them looks by itself"
        held = 4
    assert len(heard) == 201 and desk.waiting == 0


async def test_who_waits_hears_of_what_was_told_without_looking(monkeypatch):
    monkeypatch.setattr(news, "LOOK_S", 3600.0)
    held = {A: 0, B: 0}
    desk, heard = News(held.__getitem__), []

    async def wait(digest, peer):
        await desk.wait(peer, digest, 0, 3600.0)
        heard.append(digest)

    with anyio.fail_after(20):
        async with anyio.create_task_group() as tasks:
            for digest in (A, A, B):
                tasks.start_soon(wait, digest, f"peer {digest}")
            await anyio.sleep(3 * news.PAUSE_S)
            held[A] = 1
            desk.grew(A)
            await until(lambda: len(heard) == 2)
            desk.grew(A)  # Nobody waits for it any more.
            held[B] = 1
            desk.grew(B)
    assert heard == [A, A, B] and desk.waiting == 0


async def test_waits_are_capped_for_a_peer_and_in_all(monkeypatch):
    monkeypatch.setattr(news, "MAX_WAITING", news.MAX_WAITING_PER_PEER + 1)
    held = 0
    desk = News(lambda _digest: held)
    async with anyio.create_task_group() as tasks:
        for _ in range(news.MAX_WAITING_PER_PEER):
            tasks.start_soon(desk.wait, "greedy", A, 0, 60.0)
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(5):
            await desk.wait("greedy", A, 0, 60.0)
        tasks.start_soon(desk.wait, "ann", A, 0, 60.0)
        await anyio.wait_all_tasks_blocked()
        with anyio.fail_after(5):
            await desk.wait("bob", A, 0, 60.0)
        assert desk.waiting == news.MAX_WAITING
        held = -1  # The download ended.
    assert desk.waiting == 0


async def test_what_did_not_pass_is_given_back():
    limit = RateLimit(100_000)
    for _ in range(20):
        limit.charge(100_000)
        limit.refund(100_000)
    assert limit.backlog_s() == 0
    limit.charge(100_000)
    assert 0 < limit.backlog_s() <= 1.0
    free = RateLimit(None)
    free.refund(1 << 40)
    assert free.duration_s(1 << 40) == 0 and not free.limited
