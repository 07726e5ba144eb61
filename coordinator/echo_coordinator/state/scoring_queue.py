"""Accepted completions on their way to a reward."""

from collections import deque


class ScoringQueue:
    """Keys (group id, member) in order of arrival. A key is handed out once, until it is put back."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int]] = deque()
        self._out: set[tuple[int, int]] = set()

    def put(self, key: tuple[int, int]) -> None:
        """Add a key at the end."""
        self._waiting.append(key)

    def take(self, limit: int) -> list[tuple[int, int]]:
        """Hand out up to `limit` keys."""
        keys = [self._waiting.popleft() for _ in range(min(limit, len(self._waiting)))]
        self._out.update(keys)
        return keys

    def put_back(self, keys: list[tuple[int, int]]) -> None:
        """Queue keys again, first, whose scoring was interrupted."""
        returned = [key for key in keys if key in self._out]
        self._out.difference_update(returned)
        self._waiting.extendleft(reversed(returned))

    def done(self, key: tuple[int, int]) -> bool:
        """Note that a key has its reward. Returns whether it was out."""
        if key not in self._out:
            return False
        self._out.discard(key)
        return True

    def __len__(self) -> int:
        return len(self._waiting) + len(self._out)
