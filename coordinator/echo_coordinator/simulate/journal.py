"""What happened, as lines: their digest tells whether two simulations are the same, the last ones what led up to it."""

import hashlib
from collections import deque

KEPT = 200
"""Lines."""


class Journal:
    """Told everything that crosses the coordinator's border."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.tail: deque[str] = deque(maxlen=KEPT)
        self.lines = 0

    def note(self, now_s: float, what: str) -> None:
        """Add a line."""
        line = f"{now_s:.6f} {what}"
        self._digest.update(line.encode() + b"\n")
        self.tail.append(line)
        self.lines += 1

    @property
    def digest(self) -> str:
        """Of all lines so far, in hex."""
        return self._digest.hexdigest()
