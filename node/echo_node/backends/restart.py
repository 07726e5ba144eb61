"""When to start a failed backend again. Pure: times are passed in."""

import re
from collections import deque

_BY_CHANCE = ("signal SIG", "no answer", "hangs", "out of memory", "No space left")
"""In words about failures that may not come again: the machine was full or slow."""
ADVICE = (
    "the next try would end as this one did. Try another backend (`--backend`; `echo-node doctor` says which can run "
    "here), or a version of this one that can run the model"
)


class RestartPolicy:
    """Doubling delays; gives up after too many failures within a window, or two alike before anything was sampled.

    Example:
        With the defaults, failures at 0, 5, 10, 15 and 20 s are answered by delays of 1, 2, 4 and 8 s, and None.

    """

    def __init__(
        self, *, limit: int = 5, window_s: float = 900.0, first_delay_s: float = 1.0, longest_delay_s: float = 60.0
    ) -> None:
        """`limit` failures within `window_s` seconds are the end."""
        if limit < 1 or min(window_s, first_delay_s, longest_delay_s) <= 0:
            raise ValueError("a restart policy needs positive figures")
        self.limit = limit
        self.window_s = window_s
        self.first_delay_s = first_delay_s
        self.longest_delay_s = longest_delay_s
        self._failures: deque[float] = deque()
        self._last_words = ""
        self._hopeless = False

    def failed(self, now_s: float, words: str = "", *, sampled: bool = True) -> float | None:
        """Count a failure at `now_s` (monotonic). Returns seconds to wait before the next start, None to give up.

        Args:
            now_s: when.
            words: what the backend said. Numbers in them do not count: addresses and process ids differ.
            sampled: whether anything was ever sampled. What fails twice in one way before cannot run here at all.

        """
        self._failures.append(now_s)
        while self._failures[0] <= now_s - self.window_s:
            self._failures.popleft()
        alike = re.sub(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+", "#", words)
        by_chance = not words or any(sign in words for sign in _BY_CHANCE)
        self._hopeless = not sampled and not by_chance and alike == self._last_words
        self._last_words = alike
        count = len(self._failures)
        if count >= self.limit or self._hopeless:
            return None
        return min(self.longest_delay_s, self.first_delay_s * 2.0 ** (count - 1))

    def verdict(self, failure: object) -> str:
        """Return why it is given up."""
        if self._hopeless:
            return f"the backend failed twice in the same way, and has sampled nothing yet: {failure}; {ADVICE}"
        return f"the backend failed {self.recent_failures} times; the last: {failure}"

    @property
    def recent_failures(self) -> int:
        """Failures counted within the window, as of the last one."""
        return len(self._failures)
