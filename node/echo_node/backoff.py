"""How long to wait before trying again."""

import random


class Backoff:
    """Waits that double from `first_s` to `limit_s`, each shortened by up to half at random.

    The randomness keeps a swarm from coming back in one instant after its coordinator restarted.
    """

    def __init__(self, *, first_s: float, limit_s: float, random_source: random.Random | None = None) -> None:
        self._first_s = first_s
        self._limit_s = limit_s
        self._random = random_source or random.Random()
        self.failures = 0
        """In a row."""

    def next_s(self) -> float:
        """Count a failure and return how long to wait now."""
        full_s = min(self._limit_s, self._first_s * 2.0 ** min(self.failures, 32))
        self.failures += 1
        return full_s * (1.0 - 0.5 * self._random.random())

    def reset(self) -> None:
        """Note a success."""
        self.failures = 0
