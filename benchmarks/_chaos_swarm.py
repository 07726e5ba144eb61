"""The swarm of the chaos benchmark: rounds of publishing, killing, starting again and looking at what is there.

file of version n appears ─► kills, as planned ─► each starts again ─► everybody has version n ─► audit of all disks
"""

import queue
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks._chaos_audit import Auditor, leftovers
from benchmarks._chaos_plan import TIMED_S, Planner
from benchmarks._chaos_processes import Aim, Chaotic, Kill, Said, left_over
from benchmarks._distribution_files import write_similar, write_version
from benchmarks._distribution_spread import say
from benchmarks._distribution_workers import PartFailed

LIMIT_S = 600.0
"""A node that has not reached the head so long after the last kill of its round is stuck. On a machine whose cores are
busy with other things, a start alone can take minutes."""
SETTLE_S = 15.0
"""For what comes after a version is usable: old ones are deleted, the status is written."""
KEPT_FILES = 3
LOOK_S = 0.1


@dataclass(slots=True)
class Tally:
    """What was seen, for the report."""

    kills: list[Kill] = field(default_factory=list[Kill])
    hits: Counter[str] = field(default_factory=Counter[str])
    """Phase → kills in it; the coordinator's phases begin with its name."""
    recovery_s: list[float] = field(default_factory=list[float])
    """From the last kill of a round to everybody having its version."""
    lasted_s: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Phase → how long it took when nobody was killed in it."""
    loads: int = 0
    resumed_bytes: int = 0
    made_bytes: int = 0
    delta_faults: Counter[str] = field(default_factory=Counter[str])
    faults: list[str] = field(default_factory=list[str])

    def usual_s(self, phase: str) -> float:
        """Return how long a phase lasts, as a rule."""
        return median(self.lasted_s.get(phase, [0.0]))


class ChaosSwarm:
    """A coordinator and its nodes. Leaving the block ends them."""

    def __init__(self, root: Path, *, nodes: int, megabytes: int, seed: int, port: int) -> None:
        self.tally = Tally()
        self.auditor = Auditor()
        self._root = root
        self._megabytes = megabytes
        self._seed = seed
        self._port = port
        self._names = [f"node{n}" for n in range(1, nodes + 1)]
        self._planner = Planner(self._names, seed, self.tally.hits, self.tally.usual_s)
        self._inbox: queue.Queue[Said] = queue.Queue()
        self._all: dict[str, Chaotic] = {}
        self._usable: dict[str, tuple[int, int]] = {}
        """Node → life and newest version that it could load in it."""
        self._published = -1
        self._invite = ""
        self._verified: dict[tuple[str, str], int] = {}
        """Node and artifact → bytes that it called verified and not yet whole."""
        self._loads: list[tuple[str, int, str, str]] = []
        self._timed: dict[str, float] = {}
        self._begun: dict[tuple[str, int, str], float] = {}
        self._last_kill_s = 0.0

    @property
    def quota_bytes(self) -> int:
        """Of each node: half a version more than it keeps, so that room has to be made for the next one."""
        return int(4.5 * self._megabytes * 1_000_000)

    @property
    def start_s(self) -> list[float]:
        """How long each start of a process took, until it had joined."""
        return [took_s for process in self._all.values() for took_s in process.start_s]

    def __enter__(self) -> "ChaosSwarm":
        """Make the folders."""
        (self._root / "given").mkdir(parents=True)
        return self

    def __exit__(self, *error: object) -> None:
        """End all processes."""
        for process in self._all.values():
            process.aim = None
        for process in self._all.values():
            process.end()

    def begin(self) -> None:
        """Start everybody and wait until version 0 is everywhere."""
        self._give(0)
        run = self._root / "run"
        run.mkdir()
        self._start("coordinator", "_chaos_coordinator", str(run), str(self._root / "given"), str(self._port))
        self._until(lambda: bool(self._invite), "the coordinator is there")
        for name in self._names:
            self._start(name, "_chaos_node", str(self._root / name), self._invite, str(self.quota_bytes))
        self._until(lambda: self._all_have(0), "version 0 is everywhere")
        self._audit()

    def round(self, version: int) -> str:
        """Publish a version, kill as planned, wait until everybody has it, look at the disks; return it in words."""
        before = len(self.tally.kills)
        plan = self._planner.round(delta=_is_delta(version))
        now_s = time.monotonic()
        self._last_kill_s = now_s
        for name, aim in plan.items():
            self._take_aim(name, aim, now_s)
        self._give(version)
        self._until(lambda: self._all_have(version) and self._is_over(before), f"version {version} is everywhere")
        self.tally.recovery_s.append(time.monotonic() - self._last_kill_s)
        self._audit()
        kills = ", ".join(f"{kill.who} in {kill.hit}{_missed(kill)}" for kill in self.tally.kills[before:])
        kind = "as a delta" if _is_delta(version) else "whole"
        return f"version {version} {kind}; killed {kills}; all there {self.tally.recovery_s[-1]:.1f} s after the last"

    def finish(self) -> None:
        """End everybody; nothing may be left."""
        self.__exit__()
        for process in self._all.values():
            self.tally.faults += [f"left at the end: {line}" for line in left_over(process.mark)]

    # Versions.

    def _give(self, version: int) -> None:
        folder = self._root / "given"
        path = folder / f"v{version:08d}.safetensors"
        temporary = path.with_suffix(".tmp")
        seed = self._seed * 1_000_003 + version
        if _is_delta(version):
            write_similar(temporary, folder / f"v{version - 1:08d}.safetensors", seed=seed)
        else:
            write_version(temporary, megabytes=self._megabytes, seed=seed)
        temporary.rename(path)
        (folder / f"v{version - KEPT_FILES:08d}.safetensors").unlink(missing_ok=True)

    def _all_have(self, version: int) -> bool:
        nodes = all(
            self._usable.get(name, (0, -1)) >= (self._all[name].lives, version) and self._all[name].life.joined
            for name in self._names
        )
        return nodes and self._published >= version and self._all["coordinator"].life.joined

    # Processes.

    def _start(self, name: str, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "echo_swarm.under_parent", f"benchmarks.{module}", *arguments]
        self._all[name] = Chaotic(name, command, self._root, self._inbox)

    def _take_aim(self, name: str, aim: Aim, now_s: float) -> None:
        if aim.phase in TIMED_S:
            self._timed[name] = now_s + aim.delay_s
        else:
            self._all[name].aim = aim

    def _is_over(self, killed_before: int) -> bool:
        """Return whether nobody is being killed any more. Aims whose moment did not come are given up, but for one."""
        left = [process for process in self._all.values() if process.aim is not None or process.name in self._timed]
        for process in left:
            process.aim = None
            self._timed.pop(process.name, None)
        if left and len(self.tally.kills) == killed_before:
            left[0].kill("a moment that did not come")
        return not any(process.life.killed for process in self._all.values())

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + LIMIT_S
        while not condition():
            try:
                self._hear(self._inbox.get(timeout=LOOK_S))
                while not self._inbox.empty():
                    self._hear(self._inbox.get())
            except queue.Empty:
                pass
            now_s = time.monotonic()
            for name in [name for name, at_s in self._timed.items() if at_s <= now_s]:
                del self._timed[name]
                self._all[name].kill("its time")
            for process in self._all.values():
                if process.ended:
                    self._start_again(process)
                    until = time.monotonic() + LIMIT_S
            if time.monotonic() > until:
                state = {name: (self._usable.get(name), p.life.phase) for name, p in self._all.items()}
                raise PartFailed(f"stuck: not within {LIMIT_S:.0f} s: {what} ({state}, logs: {self._root})")

    def _start_again(self, process: Chaotic) -> None:
        life = process.life
        while not self._inbox.empty():
            self._hear(self._inbox.get())
        if life.killed is None:
            raise PartFailed(f"{process.name} ended by itself: {process.last_words()} (log: {process.log})")
        self._last_kill_s = time.monotonic()
        hit = life.phase
        self.tally.kills.append(Kill(who=process.name, aimed=life.killed, hit=hit))
        self.tally.hits[f"coordinator {hit}" if process.name == "coordinator" else hit] += 1
        self.tally.faults += [f"{process.name} left behind {line}" for line in left_over(process.mark)]
        process.restart()
        if process.name != "coordinator" and (aim := self._planner.again()) is not None:
            self._take_aim(process.name, aim, time.monotonic())

    # What they say.

    def _hear(self, said: Said) -> None:
        values, who = said.values, said.who
        match said.event:
            case "phase":
                self._hear_phase(said)
            case "joined" if who == "coordinator":
                self._invite = values["invite"]
            case "published":
                self._hear_published(values["version"])
            case "usable":
                self._usable[who] = max(self._usable.get(who, (0, -1)), (said.life, values["version"]))
            case "loads":
                self._loads.append((who, values["version"], values["digest"], values["expected"]))
            case "verified":
                self._verified[who, values["digest"]] = values["done"]
            case "opened":
                if (lost := self._verified.get((who, values["digest"]), 0) - values["done"]) > 0:
                    self.tally.faults.append(f"{who}: {lost} verified bytes of version {values['version']} were lost")
            case "whole":
                self._hear_whole(said)
            case _:
                pass

    def _hear_phase(self, said: Said) -> None:
        phase = said.values["phase"]
        if said.values["on"]:
            self._begun[said.who, said.life, phase] = said.values["at"]
        elif (began := self._begun.pop((said.who, said.life, phase), None)) is not None:
            self.tally.lasted_s.setdefault(phase, []).append(said.values["at"] - began)

    def _hear_published(self, version: int) -> None:
        if version < self._published:
            self.tally.faults.append(f"the coordinator published {self._published}, then {version}")
        self._published = max(version, self._published)
        self.tally.faults += self.auditor.head("coordinator", self._stores()["coordinator"])

    def _hear_whole(self, said: Said) -> None:
        values = said.values
        self._verified.pop((said.who, values["digest"]), None)
        self.tally.resumed_bytes += values["resumed_bytes"]
        self.tally.made_bytes += values["made_bytes"]
        if values["delta_fault"]:
            self.tally.delta_faults[values["delta_fault"][:160]] += 1
        self.tally.faults += [f"{said.who} was sent something wrong: {liar}" for liar in values["liars"]]

    # What lies on the disks.

    def _stores(self) -> dict[str, Path]:
        run_id = (self._root / "run" / "run-id").read_text(encoding="ascii")
        stores = {name: self._root / name / "runs" / run_id for name in self._names}
        return {**stores, "coordinator": self._root / "run" / "store" / run_id}

    def _audit(self) -> None:
        """Look at all disks until nothing is wrong; what stays wrong is a fault."""
        until = time.monotonic() + SETTLE_S
        while faults := self._look():
            if time.monotonic() > until:
                self.tally.faults += faults
                break
            self._until_heard()
        self._check_loads()

    def _look(self) -> list[str]:
        run = self._root / "run"
        faults = leftovers("coordinator", run / "checkpoints", run / "batches")
        for who, folder in self._stores().items():
            quota = None if who == "coordinator" else self.quota_bytes
            try:
                faults += self.auditor.store(who, folder, quota_bytes=quota)
            except FileNotFoundError as e:
                faults.append(f"{who}: {e.filename} has just gone")
        return faults

    def _until_heard(self) -> None:
        until = time.monotonic() + LOOK_S
        self._until(lambda: time.monotonic() > until, "a moment passes")

    def _check_loads(self) -> None:
        for who, version, digest, expected in self._loads:
            if digest != expected or expected not in self.auditor.artifacts.get(version, ()):
                self.tally.faults.append(f"{who} loaded a file of version {version} that is not the manifest's")
        self.tally.loads += len(self._loads)
        self._loads.clear()


def _is_delta(version: int) -> bool:
    return version % 2 == 1


def _missed(kill: Kill) -> str:
    return "" if kill.aimed in (kill.hit, "its time") else f" (aimed at {kill.aimed})"


def clean(root: Path, faults: list[str]) -> None:
    """Remove everything, or say where it lies."""
    if faults:
        say(f"files and logs: {root}")
    else:
        shutil.rmtree(root, ignore_errors=True)
