"""This project's own distribution: a real coordinator and real nodes, each on a host of its own.

all nodes connected, nothing published
    │  version 0     cold start     everybody fetches from everybody
    ▼  version 1     a step         nothing in common with version 0
       version 2     a small step   1 % of the numbers changed
       version 3     the star       as version 1, but from the coordinator alone
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks._distribution_files import write_similar, write_version
from benchmarks._distribution_net import Net
from benchmarks._distribution_spread import Scale, Spread, say, watched
from benchmarks._distribution_workers import Event, Worker, Workers

START_S = 180.0
"""Sixteen nodes on two cores need a minute to start."""
SETTLE_S = 3.0
"""Between a version and the next, for what comes after a fetch."""
STEPS = ("cold", "step", "small_step", "star")


class EchoSwarm:
    """A coordinator and its nodes."""

    def __init__(self, net: Net, workers: Workers, scale: Scale) -> None:
        self._net = net
        self._workers = workers
        self._scale = scale
        self._version = -1
        self._published: dict[int, Event] = {}
        self._waiting: set[int] = set()
        self._live = -1
        self._served_bytes = 0
        self._spread = Spread(what="")
        self.coordinator = self._start("coordinator", 0, "_distribution_coordinator", str(workers.folder / "run"))
        found = workers.wait("ready", [self.coordinator], limit_s=START_S, also=self._hear)["coordinator"].values
        self.address: str = found["address"]
        self.nodes = [
            self._start(f"node{n}", n, "_distribution_node", str(workers.folder / f"node{n}"), str(found["invite"]))
            for n in range(1, scale.nodes + 1)
        ]

    def _start(self, name: str, host: int, module: str, state: str, *more: str) -> Worker:
        command = [sys.executable, "-m", "echo_swarm.under_parent", f"benchmarks.{module}", state]
        return self._workers.start(name, host, [*command, self._net.address(host), *more])

    def connected(self) -> None:
        """Wait until everybody is there."""
        self._until(lambda: self._live >= len(self.nodes), START_S, "all nodes have joined")
        time.sleep(SETTLE_S)

    def spread(self, what: str, path: Path) -> Spread:
        """Publish a file and return how it spread."""
        self._version += 1
        self._until(lambda: self._version in self._waiting, self._scale.limit_s, f"version {self._version} is wanted")
        time.sleep(SETTLE_S)
        self._spread = spread = Spread(what=what)
        served = self._served()
        with watched(spread, self._net, self._workers):
            self.coordinator.order(do="publish", path=str(path))
            self._until(lambda: self._version in self._published, 60.0, "the version is published")
            spread.began_at = float(self._published[self._version].values["signed_at"])
            limit_s = self._scale.limit_s
            self._until(lambda: len(spread.whole) == len(self.nodes), limit_s, f"everybody has version {self._version}")
        self._served_bytes = self._served() - served
        say(f"  {spread.summary(self._scale)}")
        return spread

    def tell(self, *, star: bool) -> None:
        """Let the nodes fetch from the coordinator alone, or from everybody again."""
        for node in self.nodes:
            self._workers.ask(node, "told", also=self._hear, do="star", on=star)

    def figures(self, spread: Spread) -> dict[str, Any]:
        """Return plain values of the last distribution, with what nodes and coordinator count themselves."""
        reports = [event.values for event in spread.whole.values()]
        size = self._scale.size_bytes

        def total(name: str) -> float:
            return round(sum(report[name] for report in reports) / size, 4)

        published = self._published[self._version].values
        began = [event.at - event.values["seconds"] - spread.began_at for event in spread.whole.values()]
        return spread.figures(self._scale) | {
            "coordinator_served_copies": round(self._served_bytes / size, 4),
            "from_coordinator_copies": total("from_coordinator"),
            "from_peers_copies": total("from_peers"),
            "by_delta_copies": total("delta_bytes"),
            "wasted_copies": total("wasted_bytes"),
            "most_peers_used": max(report["peers_used"] for report in reports),
            "retries": sum(report["retries"] for report in reports),
            "verify_s": round(max(report["verify_s"] for report in reports), 2),
            "fetch_began_s": [round(min(began), 2), round(max(began), 2)],
            "longest_fetch_copies": round(max(report["seconds"] for report in reports) / self._scale.copy_s, 3),
            "delta_size_share": round(published["files"].get("delta", 0) / size, 4),
        }

    def _served(self) -> int:
        return int(self._workers.ask(self.coordinator, "served", also=self._hear, do="served")["bytes"])

    def _hear(self, event: Event) -> None:
        if event.name == "published":
            self._published[event.values["version"]] = event
        elif event.name == "waiting":
            self._waiting.add(event.values["version"])
        elif event.name == "nodes":
            self._live = event.values["live"]
        elif event.values.get("version") == self._version:
            self._spread.hear(event)
            if event.name == "whole":
                self._spread.whole[event.worker.name] = event

    def _until(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        self._workers.until(condition, limit_s=limit_s, what=what, also=self._hear)


def run_echo(net: Net, scale: Scale, folder: Path, steps: tuple[str, ...], found: dict[str, Any]) -> None:
    """Measure some of STEPS, in this order, with one coordinator and the same nodes; put the figures into `found`."""
    megabytes = scale.size_bytes // 1_000_000
    with Workers(net, folder) as workers:
        swarm = EchoSwarm(net, workers, scale)
        swarm.connected()
        before: Path | None = None
        for seed, step in enumerate(steps):
            path = folder / f"{step}.safetensors"
            if step == "small_step" and before is not None:
                write_similar(path, before, seed=seed)
            else:
                write_version(path, megabytes=megabytes, seed=seed)
            swarm.tell(star=step == "star")
            found[step] = swarm.figures(swarm.spread(f"echo, {step}", path))
            before = path
