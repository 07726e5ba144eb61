"""What one distribution of one file was like: for any contestant, measured in the same way.

Times count from the moment when the file could be had. Bytes on the wire are those of the links, headers included.
"""

import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import psutil

from benchmarks._distribution_lines import MARKS
from benchmarks._distribution_net import Net
from benchmarks._distribution_workers import Event, Workers

SAY_EVERY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What all parts have in common."""

    nodes: int
    size_bytes: int
    rate_mbit: float
    copy_s: float
    """One plain TCP copy over one link."""

    @property
    def limit_s(self) -> float:
        """How long any distribution may take: half as long again as one copy after the other."""
        return 60.0 + 1.5 * self.copy_s * (self.nodes + 1)


@dataclass(slots=True, kw_only=True)
class Spread:
    """One distribution, while it goes on and afterwards."""

    what: str
    began_at: float = 0.0
    """Time of day; set once it is known."""
    marks: dict[str, dict[int, float]] = field(default_factory=dict[str, dict[int, float]])
    """Node → percent → time of day."""
    whole: dict[str, Event] = field(default_factory=dict[str, Event])
    sent: list[int] = field(default_factory=list[int])
    """By each host, bytes on the wire; the coordinator's first."""
    cpu_s: float = 0.0
    machine_busy: float = 0.0
    """Share of all cores, everything on the machine included."""
    notes: list[str] = field(default_factory=list[str])
    said_at: float = 0.0

    def hear(self, event: Event) -> None:
        """Take in what a process says on the way."""
        if event.name == "reached":
            self.marks.setdefault(event.worker.name, {})[event.values["percent"]] = event.at
        elif event.name == "gave_up":
            self.notes.append(f"{event.worker.name}: {event.values['reason']}")
        if time.time() - self.said_at > SAY_EVERY_S and self.began_at:
            self.said_at = time.time()
            reached = {name: max(found) for name, found in self.marks.items()}
            say(f"  {self.what}: {time.time() - self.began_at:.0f} s, {_words(reached)}")

    @property
    def seconds(self) -> float:
        """Until the last node had it."""
        return max(event.at for event in self.whole.values()) - self.began_at

    def summary(self, scale: Scale) -> str:
        """Return the result in words."""
        return f"{self.what}: {self.seconds:.1f} s, {self.seconds / scale.copy_s:.2f} copies"

    def figures(self, scale: Scale) -> dict[str, Any]:
        """Return plain values."""
        ends = sorted(event.at - self.began_at for event in self.whole.values())
        found: dict[str, Any] = {
            "seconds": round(ends[-1], 2),
            "copies": round(ends[-1] / scale.copy_s, 3),
            "median_node_s": round(median(ends), 2),
            "first_node_s": round(ends[0], 2),
            "reached_s": {
                f"{percent}%": _low_and_high([m[percent] - self.began_at for m in self.marks.values() if percent in m])
                for percent in MARKS
            },
            "nodes_s": {name: self._node(name) for name in sorted(self.whole)},
            "wire_coordinator_copies": round(self.sent[0] / scale.size_bytes, 3),
            "wire_nodes_copies": round(sum(self.sent[1:]) / scale.size_bytes, 3),
            "cpu_s": round(self.cpu_s, 1),
            "share_of_cores": round(self.cpu_s / (os.cpu_count() or 1) / ends[-1], 2),
            "machine_busy": round(self.machine_busy, 2),
        }
        return found | ({"notes": self.notes[:8]} if self.notes else {})

    def _node(self, name: str) -> str:
        """Return when one node had MARKS and the whole, verified and on disk."""
        marks = self.marks.get(name, {})
        times = [marks[percent] for percent in MARKS if percent in marks] + [self.whole[name].at]
        return " ".join(f"{at - self.began_at:.2f}" for at in times)


@contextmanager
def watched(spread: Spread, net: Net, workers: Workers) -> Generator[None]:
    """Count bytes and processor time of the block."""
    before, cpu = net.traffic(), workers.cpu_s()
    psutil.cpu_percent()
    yield
    spread.machine_busy = psutil.cpu_percent() / 100
    spread.cpu_s = workers.cpu_s() - cpu
    spread.sent = [now.sent - then.sent for then, now in zip(before, net.traffic(), strict=True)]


def say(line: str) -> None:
    """Print progress."""
    print(line, file=sys.stderr, flush=True)


def _low_and_high(values: list[float]) -> list[float]:
    return [round(min(values), 2), round(max(values), 2)] if values else []


def _words(reached: dict[str, int]) -> str:
    listed = ", ".join(f"{name} {percent} %" for name, percent in sorted(reached.items()))
    return f"at least {listed}" if listed else "under half everywhere"
