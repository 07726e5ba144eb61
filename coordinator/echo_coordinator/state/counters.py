"""Counters that survive a restart, and the rates and shares shown beside them."""

from collections import deque
from collections.abc import Iterable

TOTAL = "total"
"""Scope of verdicts over all peers. A peer's own scope is its peer id."""
DROPPED_GROUPS = "dropped_groups"
DROPPED_SLOTS = "dropped_slots"
LAG = "lag"
"""Trained completions by staleness; the name is the number of versions."""
TRANSFERS = "transfers"
"""What peers said of transfers and cannot be, by reason."""
WORK = "work"
"""Everything else, such as `tokens` accepted, `duplicate_completions`, `aged_members`."""
STRANGERS = "strangers"
"""Verdicts of peers that never said hello, or are no longer remembered, together: anybody can make up peer ids."""


class Counters:
    """Numbers by scope and name. `dirty` is what the database has not seen."""

    def __init__(self, rows: Iterable[tuple[str, str, int]] = ()) -> None:
        self._values: dict[str, dict[str, int]] = {}
        self.dirty: set[tuple[str, str]] = set()
        for scope, name, value in rows:
            self._values.setdefault(scope, {})[name] = value

    def add(self, scope: str, name: str, count: int = 1) -> None:
        """Count something."""
        values = self._values.setdefault(scope, {})
        values[name] = values.get(name, 0) + count
        self.dirty.add((scope, name))

    def fold(self, scope: str, into: str) -> None:
        """Add a scope's numbers to another's and forget it."""
        for name, value in self._values.pop(scope, {}).items():
            self.dirty.discard((scope, name))
            self.add(into, name, value)

    def of(self, scope: str) -> dict[str, int]:
        """Return a copy of one scope."""
        return dict(self._values.get(scope, {}))

    def get(self, scope: str, name: str) -> int:
        """Return one number, 0 if never counted."""
        return self._values.get(scope, {}).get(name, 0)


class Rate:
    """Events a second over the last `window_s` seconds."""

    def __init__(self, window_s: float = 60.0) -> None:
        self._window_s = window_s
        self._marks: deque[tuple[float, float]] = deque()
        self._sum = 0.0
        self._since: float | None = None

    def add(self, now: float, amount: float) -> None:
        """Count `amount` at `now` (monotonic seconds)."""
        self._since = now if self._since is None else self._since
        if self._marks and now - self._marks[-1][0] < 1:
            # One mark a second bounds the memory whatever the rate.
            self._marks[-1] = (self._marks[-1][0], self._marks[-1][1] + amount)
        else:
            self._marks.append((now, amount))
        self._sum += amount

    def per_s(self, now: float) -> float:
        """Return the rate."""
        while self._marks and now - self._marks[0][0] > self._window_s:
            self._sum -= self._marks.popleft()[1]
        if self._since is None or not self._marks:
            return 0.0
        return max(0.0, self._sum) / max(1.0, min(self._window_s, now - self._since))


LARGEST_ADVISED = 64
"""Group size. Beyond it, most samples of an update only confirm what the others say."""


class SignalWindow:
    """Share of recent groups whose rewards were all equal, and what to do about it.

    With binary rewards and success rate p, a group of n has no signal with probability p**n + (1 - p)**n: at
    p = 0.1819 that is 0.70 for n = 2 and 0.20 for n = 8. A flat curve may be nothing but that.
    """

    _ENOUGH = 32
    """Groups before anything is concluded."""
    _TOLERABLE = 0.5
    _AIM = 0.25

    def __init__(self, group_size: int, window: int = 1024) -> None:
        self._group_size = group_size
        self._recent: deque[tuple[bool, float]] = deque(maxlen=window)

    def add(self, rewards: list[float]) -> None:
        """Count a complete group."""
        self._recent.append((max(rewards) == min(rewards), sum(rewards) / len(rewards)))

    @property
    def no_signal_share(self) -> float:
        """Between 0 and 1; 0 before the first group."""
        return sum(flat for flat, _ in self._recent) / len(self._recent) if self._recent else 0.0

    @property
    def groups(self) -> int:
        """Groups in the window."""
        return len(self._recent)

    def suggestion(self) -> str:
        """Return advice for the person who runs this, or an empty string."""
        share = self.no_signal_share
        if len(self._recent) < self._ENOUGH or share < self._TOLERABLE:
            return ""
        mean = sum(reward for _, reward in self._recent) / len(self._recent)
        told = f"{share:.0%} of recent groups carry no signal (all rewards equal)"
        size = 2 * self._group_size
        while size < LARGEST_ADVISED and mean**size + (1 - mean) ** size > self._AIM:
            size *= 2
        if share == 1.0 or size > LARGEST_ADVISED or mean**size + (1 - mean) ** size > self._AIM:
            return f"{told}; {difficulty_advice(mean)}"
        return f"{told}; raise group_size from {self._group_size} to {size}"


def difficulty_advice(mean_reward: float) -> str:
    """Return what to do when a model's rewards are so one-sided that no bigger group would mend it."""
    if 0.1 < mean_reward < 0.9:
        return "each prompt is either too hard or too easy for this model: choose prompts that it solves now and then"
    if mean_reward < 0.5:
        return (
            f"the task is too hard for this model (mean reward {mean_reward:.3g}), and bigger groups would not help: "
            "choose easier tasks, or begin with a model that was warmed up on solved ones"
        )
    return f"the task is too easy for this model (mean reward {mean_reward:.3g}): choose harder tasks"
