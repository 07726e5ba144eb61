"""How the benchmark of distribution talks to its processes: JSON, one object a line. Standard library only.

Everything else that a process prints goes to its log. A process whose starter is gone reads the end and leaves.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

MARKS = (50, 90, 99)
"""Percent of a file whose times are reported."""


class Lines:
    """A process' end. Make it first thing: from then on standard output is the log."""

    def __init__(self) -> None:
        self._reader: TextIO = os.fdopen(os.dup(0), "r", encoding="utf-8")
        self._writer: TextIO = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
        with open(os.devnull, "rb") as null:
            os.dup2(null.fileno(), 0)
        os.dup2(2, 1)

    def say(self, event: str, **values: Any) -> None:
        """Tell the benchmark something, with the time of day."""
        self._writer.write(json.dumps({"event": event, "at": time.time(), **values}) + "\n")

    def read(self) -> dict[str, Any] | None:
        """Return what is to be done next; None when the benchmark is gone."""
        line = self._reader.readline()
        return json.loads(line) if line else None

    def orders(self) -> Iterator[dict[str, Any]]:
        """Return what is to be done, one after the other, to the end."""
        while (order := self.read()) is not None:
            yield order


class Marks:
    """Tells when so much of a file was there for the first time."""

    def __init__(self, lines: Lines, **about: Any) -> None:
        self._lines = lines
        self._about = about
        self._left = list(MARKS)

    def reached(self, share: float) -> None:
        """Take note of how much is there now."""
        while self._left and share >= self._left[0] / 100:
            self._lines.say("reached", percent=self._left.pop(0), **self._about)


def flush(path: str) -> None:
    """Force a file to the disk."""
    with open(path, "r+b", buffering=0) as file:
        os.fsync(file.fileno())


def leave() -> None:
    """End at once, whatever threads still do."""
    sys.stderr.flush()
    os._exit(0)
