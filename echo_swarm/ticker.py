"""Says what is waited for before a program is up, and says it again every few seconds while it lasts."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import anyio

from echo_swarm.words import duration

EVERY_S = 5.0
RAREST_S = 60.0
"""A step that has taken minutes is told this often."""


class Ticker:
    """One step at a time. `run` is a task of its own."""

    def __init__(
        self, emit: Callable[[str], None], *, every_s: float = EVERY_S, note: Callable[[str], None] | None = None
    ) -> None:
        self._emit = emit
        self.note = note
        """Told each step, and again while it lasts, for the status file; None once the node writes that itself."""
        self._every_s = every_s
        self._what = ""
        self._began = anyio.Event()

    @contextmanager
    def step(self, what: str) -> Generator[None]:
        """Say `what` now, and again while the block takes long."""
        self.begin(what)
        try:
            yield
        finally:
            self.end()

    def begin(self, what: str) -> None:
        """Say `what` now, and again until `end` or the next step."""
        self._emit(what)
        self._what = what
        self._noted(what)
        self._began.set()
        self._began = anyio.Event()

    def end(self) -> None:
        """The step is over; nothing is said."""
        self._what = ""
        self._began.set()
        self._began = anyio.Event()

    async def run(self) -> None:
        """Repeat for ever."""
        while True:
            began, since_s = self._began, anyio.current_time()
            while self._began is began:
                waited_s = anyio.current_time() - since_s
                with anyio.move_on_after(max(self._every_s, min(RAREST_S, waited_s / 4))):
                    await began.wait()
                if self._what and self._began is began:
                    self._emit(f"still {self._what}, for {duration(anyio.current_time() - since_s)}")
                    self._noted(f"{self._what}, {duration(anyio.current_time() - since_s)}")

    def _noted(self, what: str) -> None:
        if self.note is not None:
            self.note(what)
