"""The swarm of the soak benchmark: a coordinator that stays, one node that stays, and nodes that come and go.

every minute: 30 % of the nodes go (SIGKILL and SIGTERM in turn); others come, half of them on the folder and the
key of one that went, until as many are there as the schedule says
"""

import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks._small_run import small_run
from echo_coordinator.demo.processes import Peer, Peers
from echo_swarm.identity import load
from tests.e2e.support.swarm import Swarm

BACKEND = "scripted:mean_s=1,sigma=0.5,batch=2,length=6"
"""Two completions a second: nodes are what the run waits for, never the trainer."""
BEAT_S = 3.0
GONE_S = 3 * BEAT_S
LEAVING_S = 120.0
"""A node that was told to end and has not by then is a fault. On a busy machine each of its steps takes seconds."""
GROUPS, MEMBERS = 16, 8
STAYER = "node-000"


def soak_run(folder: Path) -> Swarm:
    """Make the run: asynchronous, without an end."""
    return small_run(
        folder,
        max_staleness=4,
        group_size=MEMBERS,
        groups_per_update=GROUPS,
        beat_s=BEAT_S,
        retain_updates=8,
        retain_leases=40,
    )


@dataclass(slots=True, kw_only=True)
class Member:
    """One life of a node."""

    name: str
    process: Peer
    peer_id: str = ""
    seen_live: bool = False
    """By the coordinator, at least once in this life."""
    told_to_end_s: float | None = None


@dataclass(slots=True)
class Crowd:
    """The nodes. Times are monotonic seconds."""

    swarm: Swarm
    peers: Peers
    invite: str
    choose: random.Random
    here: dict[str, Member] = field(default_factory=dict[str, Member])
    gone_at_s: dict[str, float] = field(default_factory=dict[str, float])
    """Peer → when it went, of those that are not here."""
    gone_names: list[str] = field(default_factory=list[str])
    started: int = 0
    lives: int = 0
    ends: int = 0
    killed: int = 0
    left: int = 0
    came_back: int = 0
    never_joined: list[str] = field(default_factory=list[str])
    """Last words of those that ended before they took part: on a busy machine a start can exceed its time."""
    faults: list[str] = field(default_factory=list[str])

    def join(self, name: str = "") -> None:
        """Start a new node, or the one of that name again."""
        if not name:
            name = f"node-{self.started:03}"
            self.started += 1
        state = self.swarm.folder / "nodes" / name
        options = ["--role", "inference", "--state-dir", str(state), "--listen", "/ip4/127.0.0.1/tcp/0"]
        self.lives += 1
        process = self.peers.start(
            f"{name}-{self.lives}", "echo_node.cli", ["join", *options, "--backend", BACKEND, self.invite]
        )
        self.here[name] = Member(name=name, process=process)

    def churn(self, share: float, wanted: int) -> None:
        """Let a share of the nodes go, and others come until as many as wanted are there."""
        going = [name for name in self.here if name != STAYER and self.here[name].told_to_end_s is None]
        count = min(len(going), self._rounded(share * len(self.here)))
        for name in self.choose.sample(going, count):
            self._end(self.here[name])
        staying = sum(member.told_to_end_s is None for member in self.here.values())
        for number in range(wanted - staying):
            returning = number % 2 and self.gone_names
            if returning:
                self.came_back += 1
                self.join(self.gone_names.pop(self.choose.randrange(len(self.gone_names))))
            else:
                self.join()

    def _rounded(self, number: float) -> int:
        """Round at random, so that the mean is kept."""
        return int(number) + (self.choose.random() < number % 1)

    def _end(self, member: Member) -> None:
        self.ends += 1
        if self.ends % 2:
            member.told_to_end_s = time.monotonic()
            member.process.process.send_signal(signal.SIGTERM)
        else:
            self.killed += 1
            member.process.process.kill()
            member.process.process.wait()
            self._forget(member)

    def _forget(self, member: Member) -> None:
        del self.here[member.name]
        if member.peer_id:
            self.gone_at_s[member.peer_id] = time.monotonic()
        self.gone_names.append(member.name)
        self.peers.peers.remove(member.process)

    def look(self) -> None:
        """Note who has ended, and who is who."""
        for member in list(self.here.values()):
            if not member.peer_id:
                key = self.swarm.folder / "nodes" / member.name / "identity.key"
                if key.exists():
                    member.peer_id = load(key).peer_id
                    self.gone_at_s.pop(member.peer_id, None)
            self._look_at_end(member)

    def _look_at_end(self, member: Member) -> None:
        code, told_s = member.process.exit_code, member.told_to_end_s
        if code is None:
            if told_s is not None and time.monotonic() - told_s > LEAVING_S:
                self.fault(f"{member.name} did not end within {LEAVING_S:.0f} s of SIGTERM")
                member.process.process.kill()
                member.process.process.wait()
                self._forget(member)
            return
        words = f"{member.process.complaint() or f'{member.name} ended with 0'}"
        if told_s is None and not member.seen_live:
            self.never_joined.append(words)
        elif told_s is None:
            self.fault(f"by itself: {words}")
        elif code and not (code == -signal.SIGTERM and not member.seen_live):  # Before it could listen to signals.
            self.fault(f"told to end: {words}")
        self.left += told_s is not None
        self._forget(member)

    def fault(self, words: str) -> None:
        """Take note of what is wrong, and say it."""
        self.faults.append(words)
        print(f"FAULT: {words}", flush=True)

    def alive(self) -> int:
        """Return how many have joined and are not on their way out."""
        return sum(member.seen_live and member.told_to_end_s is None for member in self.here.values())


def folder_of(swarm: Swarm, name: str) -> Path:
    """Return a node's state folder."""
    return swarm.folder / "nodes" / name
