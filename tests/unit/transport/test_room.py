"""Who gets memory next."""

import anyio
import pytest

from echo_swarm.transport.room import Claim, Flow, Room

pytestmark = pytest.mark.anyio


async def served_in(room: Room, requests) -> list[str]:
    """Let (name, flow, size) wait in this order for a room that is full, then empty it bit by bit."""
    blocker, order, claims = Claim(room, Flow()), [], {}
    await blocker.take(room.max_bytes)
    async with anyio.create_task_group() as tasks:

        async def ask(name, flow, size) -> None:
            claims[name] = Claim(room, flow)
            await claims[name].take(size)
            order.append(name)
            claims[name].end()

        for request in requests:
            tasks.start_soon(ask, *request)
            await anyio.wait_all_tasks_blocked()
        assert room.waiting == len(requests) and room.held == room.max_bytes
        blocker.end()
    assert room.held == 0 and room.waiting == 0 and room.blocked_since is None
    return order


async def test_the_small_go_before_the_large_and_nobody_is_passed_over_twice():
    a, b, c = Flow(), Flow(), Flow()
    requests = [("a1", a, 60), ("a2", a, 60), ("a3", a, 60), ("b", b, 100), ("c", c, 50)]
    assert await served_in(Room(100), requests) == ["c", "a1", "a2", "b", "a3"]


async def test_however_many_wait_for_much_a_small_request_waits_for_one_of_them_at_most():
    room, order = Room(100), []
    holder = Claim(room, Flow())
    await holder.take(100)
    async with anyio.create_task_group() as tasks:

        async def ask(name, flow, size) -> None:
            claim = Claim(room, flow)
            await claim.take(size)
            order.append(name)
            claim.end()

        for _ in range(200):
            tasks.start_soon(ask, "large", Flow(), 90)
        await anyio.wait_all_tasks_blocked()
        small = Flow()
        for _ in range(3):
            tasks.start_soon(ask, "small", small, 60)
            await anyio.wait_all_tasks_blocked()
        holder.end()
    assert "small" in order[:1] and order[:6].count("small") == 3 and order.count("large") == 200
    assert room.held == room.waiting == 0 and room.blocked_since is None


async def test_a_large_request_is_not_passed_over_by_small_ones_that_came_much_later():
    room, large, passed = Room(100), [], []
    holder = Claim(room, Flow())
    await holder.take(100)
    async with anyio.create_task_group() as tasks:

        async def want_all() -> None:
            claim = Claim(room, Flow())
            await claim.take(100)
            large.append(len(passed))
            claim.end()

        async def want_little(flow) -> None:
            claim = Claim(room, flow)
            await claim.take(40)
            passed.append(1)
            claim.end()

        tasks.start_soon(want_all)
        await anyio.wait_all_tasks_blocked()
        for _ in range(10):
            tasks.start_soon(want_little, Flow())
            await anyio.wait_all_tasks_blocked()
            holder.end()
            await anyio.wait_all_tasks_blocked()
            if not large:
                await holder.take(100 - room.held)
    assert large and large[0] <= 3


async def test_whoever_gives_up_leaves_its_place_and_nothing_else():
    room = Room(100)
    holder, flow = Claim(room, Flow()), Flow()
    await holder.take(100)
    for _ in range(500):
        with anyio.move_on_after(0):
            await Claim(room, flow).take(50)
    assert room.waiting == 0 and room.missing == 0 and room.blocked_since is None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Claim(room, Flow()).take, 100)
        await anyio.wait_all_tasks_blocked()
        for _ in range(500):
            with anyio.move_on_after(0):
                await Claim(room, flow).take(50)
        assert room.waiting == 1 and len(room._by_size._heap) < 200 and len(room._by_turn._heap) < 200
        holder.end()
    assert room.held == 100


async def test_a_grant_that_comes_as_its_task_is_cancelled_belongs_to_the_claim_which_gives_it_back():
    room = Room(100)
    holder, late = Claim(room, Flow()), Claim(room, Flow())
    await holder.take(100)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(late.take, 100)
        await anyio.wait_all_tasks_blocked()
        holder.end()
        tasks.cancel_scope.cancel()
    assert late.held == room.held == 100
    late.end()
    assert room.held == 0


async def test_anything_fits_into_an_empty_room():
    room = Room(100)
    claim = Claim(room, Flow())
    await claim.take(1000)
    assert room.held == room.peak == 1000
    claim.end()
    assert room.has(100) and room.held == 0
