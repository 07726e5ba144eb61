"""What anybody may ask for costs a small share of the time, however often it is asked for, and holds nobody up."""

import anyio
import pytest

from echo_coordinator.loops.sparing import SHARE, Sparing
from echo_coordinator.state.slices import SLICE_S, Sliced, at_once, in_slices

pytestmark = pytest.mark.anyio


class Slow:
    """An answer that takes so long by its own clock, in so many steps."""

    def __init__(self, cost_s: float, steps: int = 1) -> None:
        self.now, self.step_s, self.steps, self.made = 0.0, cost_s / steps, steps, 0

    def make(self) -> Sliced[int]:
        for _ in range(self.steps):
            self.now += self.step_s
            yield
        self.made += 1
        return self.made


async def test_a_costly_answer_is_given_again_and_a_cheap_one_is_made_anew():
    slow = Slow(0.35)
    ask = Sparing(slow.make, clock=lambda: slow.now)
    for _ in range(10_000):
        await ask()
        slow.now += 0.01
    assert slow.made * 0.35 <= (SHARE + 0.005) * slow.now
    free = Slow(0.0)
    ask = Sparing(free.make, clock=lambda: free.now)
    assert [await ask(), await ask(), await ask()] == [1, 2, 3]


async def test_what_fails_is_tried_again_at_once():
    tried = 0

    def make() -> Sliced[str]:
        nonlocal tried
        tried += 1
        yield
        if tried == 1:
            raise ValueError
        return "good"

    ask = Sparing(make, clock=lambda: 0.0)
    with pytest.raises(ValueError):
        await ask()
    assert await ask() == "good"


async def test_others_run_between_the_slices_whose_time_is_not_counted():
    slow, turns, result, spent_s = Slow(0.4, steps=800), 0, 0, 0.0
    done = anyio.Event()

    async def other() -> None:
        nonlocal turns
        while not done.is_set():
            turns += 1
            slow.now += 1.0
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(other)
        result, spent_s = await in_slices(slow.make(), lambda: slow.now)
        done.set()
    assert result == 1 and turns >= 0.9 * 0.4 / SLICE_S
    assert spent_s == pytest.approx(0.4, rel=0.01)
    assert at_once(slow.make()) == 2


async def test_while_an_answer_is_made_others_get_the_one_before_and_the_first_ones_wait():
    slow, found = Slow(0.1, steps=100), list[int]()
    ask = Sparing(slow.make, clock=lambda: slow.now)

    async def asker() -> None:
        found.append(await ask())

    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(asker)
    assert found == [1] * 20 and slow.made == 1
    slow.now += 1000
    async with anyio.create_task_group() as tasks:
        for _ in range(20):
            tasks.start_soon(asker)
    assert sorted(found[20:]) == [1] * 19 + [2] and slow.made == 2


async def test_who_gives_up_while_an_answer_is_made_leaves_the_next_one_to_it():
    slow = Slow(0.1, steps=100)
    ask = Sparing(slow.make, clock=lambda: slow.now)
    with anyio.CancelScope() as scope:
        scope.cancel()
        await ask()
    assert scope.cancelled_caught and slow.made == 0
    assert await ask() == 1
