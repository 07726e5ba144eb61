"""What anybody may ask for costs a small share of the time, however often it is asked for."""

from echo_coordinator.loops.sparing import SHARE, Sparing


class Slow:
    """An answer that takes so long by its own clock."""

    def __init__(self, cost_s: float) -> None:
        self.now, self.cost_s, self.made = 0.0, cost_s, 0

    def make(self) -> int:
        self.now += self.cost_s
        self.made += 1
        return self.made


def test_a_costly_answer_is_given_again_and_a_cheap_one_is_made_anew():
    slow = Slow(0.35)
    ask = Sparing(slow.make, clock=lambda: slow.now)
    for _ in range(10_000):
        ask()
        slow.now += 0.01
    assert slow.made * slow.cost_s <= (SHARE + 0.005) * slow.now
    free = Slow(0.0)
    ask = Sparing(free.make, clock=lambda: free.now)
    assert [ask(), ask(), ask()] == [1, 2, 3]


def test_what_fails_is_tried_again_at_once():
    tried = 0

    def make() -> str:
        nonlocal tried
        tried += 1
        if tried == 1:
            raise ValueError
        return "good"

    ask = Sparing(make, clock=lambda: 0.0)
    try:
        ask()
    except ValueError:
        assert ask() == "good"
