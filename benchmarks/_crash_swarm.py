"""The swarm of the crash benchmark: waves of SIGKILL to every kind of process, until each was killed often enough.

a wave: scorers, backends, nodes and the trainer are killed at moments drawn at random, the coordinator a little
        later; each starts again at once, some are killed again while they start ─► an update gets done ─► next wave
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from benchmarks._chaos_processes import MARK
from benchmarks._crash_audit import History
from benchmarks._crash_node import VERDICTS
from benchmarks._crash_processes import KINDS, Forked, kill
from benchmarks._distribution_workers import PartFailed
from echo_coordinator.control import ask
from echo_coordinator.run_folder import RunFolder
from echo_swarm.errors import EchoError
from tests.e2e.support.swarm import Swarm

NODES = ("node1", "node2", "node3")
BACKEND = "scripted:mean_s=0.3,sigma=0.5,batch=4,length=6"
LIMIT_S = 900.0
"""Without an update for so long, the run is stuck. On a machine whose cores are busy a start alone takes minutes."""
TICK_S = 0.03
AGAIN = {"coordinator": 0.75, "trainer": 0.4}
"""Share of the restarts that are killed too, most of them while they start."""
AGAIN_S = 2.5
"""At most so long after."""
IN_A_WAVE = {"trainer": 2, "scorer": 6, "node": 5, "backend": 6}
BY_DESIGN = {
    "coordinator": ("trainer", "scorer"),
    "node": ("the backend failed",),
}
"""What the last words of one say that ended by itself, as it should when its child was killed again and again."""


@dataclass(slots=True)
class Tally:
    """What happened."""

    kills: Counter[str] = field(default_factory=Counter[str])
    while_starting: Counter[str] = field(default_factory=Counter[str])
    """Of these: coordinators before they answered, nodes before they had joined once in this life."""
    ended: Counter[str] = field(default_factory=Counter[str])
    """Ends of their own, by what they said."""
    ready_s: list[float] = field(default_factory=list[float])
    """From a coordinator's start to its answering."""
    updated_s: list[float] = field(default_factory=list[float])
    """From a wave's last kill to a new version."""
    waves: int = 0
    faults: list[str] = field(default_factory=list[str])


class CrashSwarm:
    """A coordinator and its nodes. Leaving the block ends them."""

    def __init__(self, swarm: Swarm, *, seed: int, tally: Tally, targets: dict[str, int]) -> None:
        self.swarm = swarm
        self.run = RunFolder(swarm.root)
        self.tally = tally
        self.history = History(self.run)
        self._targets = targets
        self._choose = random.Random(seed)
        logs = swarm.folder / "logs"
        logs.mkdir(parents=True)
        self.coordinator = Forked("coordinator", "echo_coordinator.cli", ["start", str(swarm.root), "--plain"], logs)
        self.nodes: list[Forked] = []
        self._ready = False

    def __enter__(self) -> "CrashSwarm":
        """Mark all that is started from here."""
        os.environ[MARK] = f"{os.getpid()}-{self.swarm.folder.name}"
        return self

    def __exit__(self, *error: object) -> None:
        """Kill what is left."""
        for process in (self.coordinator, *self.nodes):
            if process.pid and process.poll() is None:
                process.send(signal.SIGKILL)
                process.wait(10)

    def begin(self) -> None:
        """Start everybody and wait for the first update."""
        self.coordinator.start()
        self._until(lambda: self._ready, "the coordinator answers")
        invite = str(self._ask("invite")["invite"])
        for name in NODES:
            state = self.state_of(name)
            options = ["--role", "inference", "--state-dir", str(state), "--listen", "/ip4/127.0.0.1/tcp/0"]
            arguments = ["join", *options, "--patience", "600", "--backend", BACKEND, invite]
            node = Forked(name, "benchmarks._crash_node", arguments, self.coordinator.folder)
            self.nodes.append(node)
            self._start_node(node)
        self._until(lambda: self.version() >= 2, "there are updates")

    def state_of(self, name: str) -> Path:
        """Return a node's folder."""
        return self.swarm.folder / "nodes" / name

    def verdicts_of(self, name: str) -> Path:
        """Return where a node writes what it hears."""
        return self.swarm.folder / f"{name}.verdicts"

    def version(self) -> int:
        """Return the trainer's newest version, by its folder: 0 before the first update."""
        names = [path.name for path in self.run.checkpoints.glob("v*")]
        return max((int(name[1:]) for name in names if name[1:].isdigit()), default=0)

    @property
    def done(self) -> bool:
        """Whether each kind was killed often enough."""
        return all(self.tally.kills[kind] >= self._targets[kind] for kind in KINDS)

    def wave(self) -> None:
        """Kill as drawn, wait until an update is done."""
        before, now = self.version(), time.monotonic()
        wanted = [kind for kind in KINDS if self.tally.kills[kind] < self._targets[kind]]
        several = [kind for kind in wanted for _ in range(IN_A_WAVE.get(kind, 0))]
        aims = [(now + self._choose.uniform(0, 4), kind) for kind in several]
        if "coordinator" in wanted:
            aims.append((now + self._choose.uniform(0.5, 3), "coordinator"))
        self._until(lambda: self._aimed(aims), "everybody was hit")
        hit_s = time.monotonic()
        self._until(lambda: self.version() > before, "an update is done")
        self.tally.updated_s.append(time.monotonic() - hit_s)
        self.tally.waves += 1

    def _aimed(self, aims: list[tuple[float, str]]) -> bool:
        """Carry out what is due; what has nobody to hit waits. Returns whether nothing is left."""
        now = time.monotonic()
        for aim in [aim for aim in aims if aim[0] <= now]:
            kind = aim[1]
            if not self._kill(kind):
                continue
            aims.remove(aim)
            if self._choose.random() < AGAIN.get(kind, 0.0):
                aims.append((now + self._choose.uniform(0.0, AGAIN_S), kind))
        return not aims

    def _kill(self, kind: str) -> bool:
        if kind == "coordinator":
            victim, starting = self.coordinator, not self._ready
        elif kind == "node":
            victim = self._choose.choice(self.nodes)
            starting = not victim.children("backend")
        else:
            return self._kill_child(kind)
        if victim.poll() is not None or victim.killed:
            return False
        victim.children("backend")  # Remembers whom it has.
        victim.killed = True
        victim.send(signal.SIGKILL)
        self.tally.kills[kind] += 1
        self.tally.while_starting[kind] += starting
        return True

    def _kill_child(self, kind: str) -> bool:
        parents = self.nodes if kind == "backend" else [self.coordinator]
        found = [pid for parent in parents if parent.poll() is None for pid in parent.children(kind)]
        if not found or not kill(self._choose.choice(found)):
            return False
        self.tally.kills[kind] += 1
        return True

    # Life goes on.

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + LIMIT_S
        while not condition():
            self.tick()
            if time.monotonic() > until:
                raise PartFailed(f"stuck: not within {LIMIT_S:.0f} s: {what} (logs: {self.coordinator.folder})")
            time.sleep(TICK_S)

    def tick(self) -> None:
        """Start again whoever has ended."""
        if self.coordinator.poll() is not None:
            self._ended("coordinator", self.coordinator)
            self.tally.faults += self.history.look()
            self._ready = False
            self.coordinator.start()
        for node in self.nodes:
            if node.poll() is not None:
                self._ended("node", node)
                self._start_node(node)
        if not self._ready and self._answers():
            self._ready = True
            self.tally.ready_s.append(time.monotonic() - self.coordinator.started_s)

    def _start_node(self, node: Forked) -> None:
        os.environ[VERDICTS] = str(self.verdicts_of(node.name))
        node.start()

    def _ended(self, kind: str, process: Forked) -> None:
        if left := process.left_behind():
            self.tally.faults.append(f"{process.name} left processes behind: {left}")
        if process.killed:
            return
        words = process.last_words()
        self.tally.ended[f"{kind}: {words[:160]}"] += 1
        if not any(part in words for part in BY_DESIGN[kind]):
            self.tally.faults.append(f"{process.name} ended by itself: {words}")

    def _answers(self) -> bool:
        """Whether this life of the coordinator has its control socket."""
        try:
            return f'"pid": {self.coordinator.pid},' in self.run.control.read_text()
        except OSError:
            return False

    def _ask(self, op: str) -> dict[str, object]:
        until = time.monotonic() + LIMIT_S
        while True:
            try:
                return anyio.run(lambda: ask(self.run, op))
            except EchoError:
                if time.monotonic() > until:
                    raise
                self.tick()
                time.sleep(0.2)

    # The end.

    def settle(self) -> None:
        """Let the run do two more updates, then everybody deliver what they have and leave."""
        version = self.version()
        self._until(lambda: self._ready and self.version() >= version + 2, "the run goes on")
        self._ask("pause")
        self._until(self._nothing_in_flight, "everything is delivered")
        for node in self.nodes:
            node.send(signal.SIGTERM)
        codes = {node.name: node.wait(120) for node in self.nodes}
        self.coordinator.send(signal.SIGTERM)
        codes["coordinator"] = self.coordinator.wait(120)
        self.tally.faults += [f"{name} ended with {code}" for name, code in codes.items() if code]
        self.tally.faults += self.history.look()

    def _nothing_in_flight(self) -> bool:
        time.sleep(0.5)
        status = self._ask("status")["status"]
        assert isinstance(status, dict)
        live = [node for node in status["nodes"] if node["live"]]
        return len(live) == len(NODES) and not any(node["in_flight"] for node in live)
