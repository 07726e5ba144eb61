"""What a process of the chaos benchmark is in the middle of, said in lines as it begins and ends.

The lines are in the pipe before anything else happens, so that a process killed in a phase has said so.
"""

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

from benchmarks._distribution_lines import Lines

P = ParamSpec("P")
R = TypeVar("R")


class Phases:
    """Wraps functions of the product. Safe to call from several threads."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._lock = threading.Lock()

    def say(self, event: str, **values: Any) -> None:
        """Say a line."""
        with self._lock:
            self._lines.say(event, **values)

    @contextmanager
    def within(self, phase: str) -> Generator[None]:
        """Say that a phase begins and, however it ends, that it has ended."""
        self.say("phase", phase=phase, on=True)
        try:
            yield
        finally:
            self.say("phase", phase=phase, on=False)

    def around(self, phase: str, function: Callable[P, R]) -> Callable[P, R]:
        """Return `function`, each call of which is a phase."""

        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            with self.within(phase):
                return function(*args, **kwargs)

        return wrapped
