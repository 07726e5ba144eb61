"""A limit on bytes a second, shared by all who spend from it."""

import anyio

BURST_S = 0.25
"""What was not spent is saved up for so long."""


def bytes_per_s(mbit_per_s: float | None) -> float | None:
    """Return a limit that a person gave in Mbit/s."""
    return None if mbit_per_s is None else mbit_per_s * 125_000


class RateLimit:
    """Makes spenders wait, in the order in which they came.

    Args:
        bytes_per_s: None for no limit.

    """

    def __init__(self, bytes_per_s: float | None) -> None:
        if bytes_per_s is not None and bytes_per_s <= 0:
            raise ValueError(f"a limit of {bytes_per_s} bytes a second")
        self._bytes_per_s = bytes_per_s
        self._paid_until_s = float("-inf")

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self._bytes_per_s is not None

    def backlog_s(self) -> float:
        """Return how long the next spender will wait."""
        return 0.0 if self._bytes_per_s is None else max(0.0, self._paid_until_s - anyio.current_time())

    def charge(self, size_bytes: int) -> None:
        """Count bytes that pass now; whoever comes next waits for them."""
        if self._bytes_per_s is not None:
            earliest_s = anyio.current_time() - BURST_S
            self._paid_until_s = max(self._paid_until_s, earliest_s) + size_bytes / self._bytes_per_s

    def refund(self, size_bytes: int) -> None:
        """Give back what was charged for bytes that did not pass: what failed must not use up what others wait for."""
        if self._bytes_per_s is not None:
            self._paid_until_s -= size_bytes / self._bytes_per_s

    def duration_s(self, size_bytes: int) -> float:
        """Return how long that many bytes take; 0 without a limit."""
        return size_bytes / self._bytes_per_s if self._bytes_per_s else 0.0

    async def spend(self, size_bytes: int) -> None:
        """Wait until these bytes may pass."""
        if self._bytes_per_s is None:
            return
        self.charge(size_bytes)
        try:
            if (pause_s := self.backlog_s()) > 0:
                await anyio.sleep(pause_s)
        except BaseException:
            self.refund(size_bytes)
            raise
