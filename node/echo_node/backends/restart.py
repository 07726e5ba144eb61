"""When to start a failed backend again. Pure: times are passed in."""

from collections import deque


class RestartPolicy:
    """Doubling delays; gives up after too many failures within a window.

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

    def failed(self, now_s: float) -> float | None:
        """Count a failure at `now_s` (monotonic). Returns seconds to wait before the next start, None to give up."""
        self._failures.append(now_s)
        while self._failures[0] <= now_s - self.window_s:
            self._failures.popleft()
        count = len(self._failures)
        if count >= self.limit:
            return None
        return min(self.longest_delay_s, self.first_delay_s * 2.0 ** (count - 1))

    @property
    def recent_failures(self) -> int:
        """Failures counted within the window, as of the last one."""
        return len(self._failures)
