"""One hour of a run whose nodes come and go: does anything grow that should not, is anybody shown who is gone?

    python -m benchmarks.soak [--minutes 60]

A real coordinator (trainer and scorer children, a model of 20,000 parameters) and four to eight real `echo-node join`
processes with scripted backends, over hivemind on loopback. Every minute 30 % of the nodes go, by SIGKILL and SIGTERM
in turn, and others come, half of them on the folder of one that went. Every ten seconds: status, DHT, memory, open
files, threads, disk. Ends with 1 if anything was wrong.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anyio

from benchmarks import _soak_judge as judge
from benchmarks._report import write_report
from benchmarks._soak_looks import HISTORY, family, parts_of, plain, rows_by_table
from benchmarks._soak_swarm import BACKEND, BEAT_S, GONE_S, STAYER, Crowd, folder_of, soak_run
from echo_coordinator.control import ask
from echo_coordinator.demo.processes import Peers
from echo_coordinator.run_folder import RunFolder
from echo_node.hosts import open_network
from echo_node.own_record import ANNOUNCE_S
from echo_swarm.directory.base import Directory, peers_topic
from echo_swarm.directory.reading import newest_peers
from echo_swarm.errors import EchoError
from echo_swarm.identity import Identity
from echo_swarm.invite import Invite, parse
from tests.e2e.support.swarm import Swarm

LOOK_S, CHURN_S, PHASE_S, ROWS_S = 10.0, 60.0, 240.0, 600.0
WANTED = (4, 6, 8, 6)
"""Nodes, one phase after the other."""
SHARE = 0.3
LATE_S = 6.0
"""For what is judged by the clock of a busy machine."""
RECORD_S = 3 * ANNOUNCE_S
"""A record of a peer that is gone expires after this."""
WINDOW = 2 / 3
"""Last part of the time, over which slopes are taken."""
START_S, END_S = 300.0, 60.0


class Soak:
    """The looks, one after the other, and what was wrong in them."""

    def __init__(self, swarm: Swarm, crowd: Crowd, coordinator: int, directory: Directory, invite: Invite) -> None:
        self._swarm = swarm
        self._crowd = crowd
        self._coordinator = coordinator
        self._directory = directory
        self._invite = invite
        self._began_s = time.monotonic()
        self.looks: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        """Of the database's tables, now and then."""
        self.ghost_s: list[float] = []
        """How long after its end somebody was still called live."""
        self.record_s: list[float] = []
        """How long after its end somebody's record was still found."""
        self.silent_looks = 0
        """Looks at a node that is there and was not called live."""

    @property
    def at_s(self) -> float:
        """Seconds since the first look."""
        return time.monotonic() - self._began_s

    async def look(self) -> None:
        """Take one look at everything."""
        self._crowd.look()
        self._crowd.peers.look()
        began_s = time.monotonic()
        reply = await ask(RunFolder(self._swarm.root), "status")
        took_s = time.monotonic() - began_s
        status = reply["status"]
        live = {n["peer_id"] for n in status["nodes"] if n["live"]}
        found = newest_peers(await self._directory.find(peers_topic(self._invite.run)), run_id=self._invite.run)
        self._judge(live, set(found))
        look: dict[str, Any] = {
            "at_s": round(self.at_s, 1),
            "alive": self._crowd.alive(),
            "live_in_status": len(live),
            "listed": len(status["nodes"]),
            "in_dht": len(found),
            "accepted": status["accepted"],
            "rejected": status["rejected"],
            "dropped_groups": status["dropped_groups"],
            "version": status["policy_version"],
            "trainer": status["trainer"]["state"],
            "status_ms": round(1000 * took_s, 1),
            "status_bytes": len(json.dumps(status)),
            "coordinator": plain(family(self._coordinator)),
            "node": plain(family(self._crowd.here[STAYER].process.process.pid)),
            "run_folder": parts_of(self._swarm.root),
            "load": round(os.getloadavg()[0], 1),
            "node_folder": parts_of(folder_of(self._swarm, STAYER) / "runs" / self._invite.run),
        }
        if look["at_s"] >= ROWS_S * len(self.rows) and (rows := rows_by_table(RunFolder(self._swarm.root).database)):
            self.rows.append({"minute": round(look["at_s"] / 60, 1), **rows})
        self.looks.append(look)

    def _judge(self, live: set[str], found: set[str]) -> None:
        """Compare who is shown with who is there."""
        now_s = time.monotonic()
        for peer, at_s in self._crowd.gone_at_s.items():
            gone_s = now_s - at_s
            if peer in live:
                self.ghost_s.append(gone_s)
                if gone_s > GONE_S + LATE_S:
                    self._crowd.fault(f"{self.at_s:.0f} s: {peer} is called live, {gone_s:.0f} s after its end")
            if peer in found:
                self.record_s.append(gone_s)
                if gone_s > RECORD_S + LATE_S:
                    self._crowd.fault(f"{self.at_s:.0f} s: {peer} has a record, {gone_s:.0f} s after its end")
        for member in self._crowd.here.values():
            member.seen_live |= member.peer_id in live
            if member.seen_live and member.peer_id not in live and member.told_to_end_s is None:
                self.silent_looks += 1


async def soak(root: Path, minutes: float, seed: int) -> dict[str, Any]:
    """Run it and return the figures."""
    swarm, peers = soak_run(root), Peers(root / "logs")
    try:
        coordinator = peers.start("coordinator", "echo_coordinator.cli", ["start", str(swarm.root), "--plain"])
        invite = await _invite(swarm)
        crowd = Crowd(swarm=swarm, peers=peers, invite=invite, choose=random.Random(seed))
        observer = open_network(Identity.generate(), parse(invite), outbound_only=True, patience_s=60)
        async with observer as network:
            for _ in range(WANTED[0]):
                crowd.join()
            seen = Soak(swarm, crowd, coordinator.process.pid, network.directory, parse(invite))
            await _through(seen, crowd, minutes * 60)
    finally:
        peers.end(grace_s=END_S)
    ends = [c for c in (peer.complaint() for peer in peers.peers) if c]
    left = [f"still running: {process}" for process in peers.left_behind()]
    return _figures(seen, crowd, swarm, [*crowd.faults, *ends, *left])


async def _invite(swarm: Swarm) -> str:
    with anyio.fail_after(START_S):
        while True:
            try:
                return str((await ask(RunFolder(swarm.root), "invite"))["invite"])
            except EchoError:
                await anyio.sleep(0.5)


async def _through(seen: Soak, crowd: Crowd, whole_s: float) -> None:
    churned_s = 0.0
    while seen.at_s < whole_s:
        await seen.look()
        look = seen.looks[-1]
        if seen.at_s - churned_s >= CHURN_S:
            churned_s += CHURN_S
            crowd.churn(SHARE, WANTED[int(churned_s // PHASE_S) % len(WANTED)])
            memory = {kind: p["rss_mb"] for kind, p in look["coordinator"].items()}
            said = f"{look['alive']} nodes, version {look['version']}, {look['accepted']} accepted, {memory}"
            print(f"{seen.at_s / 60:.1f} min: {said}, {len(crowd.faults)} faults", flush=True)
        await anyio.sleep(max(0.0, LOOK_S - seen.at_s % LOOK_S))


def _figures(seen: Soak, crowd: Crowd, swarm: Swarm, faults: list[str]) -> dict[str, Any]:
    looks, minutes = seen.looks, judge.by_minute(seen.looks)
    window = judge.late(looks, WINDOW)
    figures: dict[str, Any] = {
        "minutes": round(looks[-1]["at_s"] / 60, 1),
        "window_minutes": round((window[-1]["at_s"] - window[0]["at_s"]) / 60, 1),
        "backend": BACKEND,
        "beat_s": BEAT_S,
        "nodes": {"lives": crowd.lives, "killed": crowd.killed, "left": crowd.left, "came_back": crowd.came_back},
        "never_joined": crowd.never_joined,
        "accepted": looks[-1]["accepted"],
        "versions": looks[-1]["version"],
        "rejected": looks[-1]["rejected"],
        "dropped_groups": looks[-1]["dropped_groups"],
        "throughput": judge.throughput(minutes[1:]),
        "longest_live_after_end_s": round(max(seen.ghost_s, default=0.0), 1),
        "longest_record_after_end_s": round(max(seen.record_s, default=0.0), 1),
        "looks": len(looks),
        "looks_at_a_node_called_silent": seen.silent_looks,
        "coordinator": judge.processes(window, "coordinator"),
        "node": judge.processes(window, "node"),
        "run_folder": judge.folders(window, "run_folder"),
        "node_folder": judge.folders(window, "node_folder"),
        "rows": [*seen.rows, {"minute": "the end", **rows_by_table(RunFolder(swarm.root).database)}],
        "status_ms": {"median": sorted(look["status_ms"] for look in looks)[len(looks) // 2]},
    }
    return {**figures, "faults": [*faults, *judge.complaints(figures, HISTORY)], "by_minute": minutes}


def main() -> int:
    """Run, report, say whether all was well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="where files and logs go")
    parser.add_argument("--scratch", action="store_true", help="leave the results of the repository alone")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="echo-soak-", dir=arguments.folder))
    figures = anyio.run(soak, root, arguments.minutes, arguments.seed)
    for fault in figures["faults"]:
        print(f"FAULT: {fault}", file=sys.stderr)
    scratch = {"folder": root} if arguments.scratch else {}
    write_report("soak", figures, packages=("hivemind",), **scratch)
    if figures["faults"] or arguments.scratch:
        print(f"files and logs: {root}", file=sys.stderr)
    else:
        shutil.rmtree(root, ignore_errors=True)
    return int(bool(figures["faults"]))


if __name__ == "__main__":
    sys.exit(main())
