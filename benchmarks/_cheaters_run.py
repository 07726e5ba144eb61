"""One run of the cheaters benchmark: the coordinator and its trainer as processes, the nodes here; then its database.

model ──► run folder ──► `echo-coordinator start` ◄── hivemind ──► Crew
                              └──► run.db: leases, audits, standings, groups consumed ──► figures
"""

import shutil
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import msgpack

from benchmarks._cheaters_nodes import HONEST_FIRST, Crew, Part
from echo_coordinator.demo.processes import Peers
from echo_coordinator.demo.run_file import Sections, write_demo_run
from echo_coordinator.demo.swarm import Swarm
from echo_coordinator.state.groups import SlotState
from echo_coordinator.state.rows import unpack_slots
from echo_swarm.errors import BackendFailed
from echo_swarm.invite import Invite, parse

GGUF = ("f16", "q8_0", "q4_0")
FOREVER_S = 86_400.0
Play = Callable[[Crew], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run."""

    model: Path
    other_model: Path
    seed: int
    updates: int
    evaluate_every: int = 0
    changes: Sections = field(default_factory=dict[str, dict[str, Any]])


def run(folder: Path, plan: Plan, play: Play) -> tuple[Crew, "Ledger"]:
    """Run in FOLDER, `play` being what the crew does; return what the coordinator wrote down.

    Raises:
        BackendFailed: a process failed.

    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    changes: Sections = {
        "run": {"updates": plan.updates},
        "publish": {"gguf": list(GGUF)},
        "audits": {"suspend_s": FOREVER_S},
        "evaluation": {"every": plan.evaluate_every, **({"prompts": 256} if plan.evaluate_every else {})},
    }
    kept: Sections = {"work": {"retain_updates": plan.updates + 1}}
    for name, values in (*kept.items(), *plan.changes.items()):
        changes[name] = {**changes.get(name, {}), **values}
    write_demo_run(folder / "run", model=plan.model, seed=plan.seed, changes=changes)
    swarm = Swarm(folder, Peers(folder / "logs"))
    try:
        crew = anyio.run(_run, swarm, plan, play)
    finally:
        swarm.peers.end(grace_s=20.0)
    return crew, Ledger.read(swarm)


async def _run(swarm: Swarm, plan: Plan, play: Play) -> Crew:
    coordinator = swarm.start_coordinator()
    invite: Invite = parse(await swarm.wait_for_invite(coordinator))
    crew = Crew(folder=swarm.folder / "nodes", invite=invite, other_model=plan.other_model)
    shown_s = time.monotonic()

    def show(status: Any) -> None:
        nonlocal shown_s
        if time.monotonic() - shown_s > 10:
            shown_s = time.monotonic()
            standings = Counter(node.standing for node in status.nodes if node.role == "inference")
            print(f"  update {status.updates} of {plan.updates}, {dict(standings)}", file=sys.stderr, flush=True)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(play, crew)
        await swarm.watch(coordinator, show)
        with anyio.move_on_after(10):
            await swarm.wait_for_exits()
        tasks.cancel_scope.cancel()
    if coordinator.exit_code != 0:
        raise BackendFailed(coordinator.complaint() or "the coordinator did not end")
    return crew


@dataclass(slots=True, kw_only=True)
class Ledger:
    """What the coordinator's database says."""

    delivered: dict[str, dict[int, int]]
    """Peer → group → accepted completions, those taken back included."""
    trained: Counter[str]
    """Peer → completions that were trained on."""
    audits: dict[str, list[tuple[int, str, str]]]
    """Peer → group, verdict and detail of each audit, in their order."""
    rejected: dict[str, dict[str, int]]
    """Peer → reason → completions."""
    set_aside: dict[str, str]
    """Peer → what a probe showed, if it did not fit."""
    groups: int
    """Trained on."""
    accuracy: dict[int, float]

    @property
    def consumed(self) -> int:
        """Completions trained on."""
        return self.trained.total()

    @classmethod
    def read(cls, swarm: Swarm) -> "Ledger":
        """Read it."""
        db = sqlite3.connect(f"{swarm.run.database.resolve().as_uri()}?mode=ro", uri=True)
        try:
            return cls._read(db)
        finally:
            db.close()

    @classmethod
    def _read(cls, db: sqlite3.Connection) -> "Ledger":
        delivered: dict[str, dict[int, int]] = {}
        train = {group_id for (group_id,) in db.execute("SELECT group_id FROM groups WHERE kind = 'train'")}
        for peer, group_id, verdicts in db.execute("SELECT peer, group_id, verdicts FROM leases ORDER BY group_id"):
            said = msgpack.unpackb(verdicts, strict_map_key=False)
            count = sum(reason == "accepted" for _, reason, _ in said.values())
            if count and group_id in train:
                of_peer = delivered.setdefault(peer, {})
                of_peer[group_id] = of_peer.get(group_id, 0) + count
        trained: Counter[str] = Counter()
        groups = 0
        for (slots,) in db.execute("SELECT slots FROM groups WHERE state = 'consumed' AND kind = 'train'"):
            groups += 1
            trained.update(s.work.peer for s in unpack_slots(slots) if s.work and s.state is SlotState.SCORED)
        audits: dict[str, list[tuple[int, str, str]]] = {}
        for peer, group_id, verdict, detail in db.execute(
            "SELECT peer, group_id, verdict, detail FROM audits ORDER BY at"
        ):
            audits.setdefault(peer, []).append((group_id, verdict, detail))
        rejected: dict[str, dict[str, int]] = {}
        for scope, name, value in db.execute("SELECT scope, name, value FROM counters"):
            if value and name != "accepted":
                rejected.setdefault(scope, {})[name] = value
        probes = db.execute(
            "SELECT peer, detail FROM probe_answers WHERE verdict IN ('far', 'other_version', 'unusable')"
        )
        return cls(
            delivered=delivered,
            trained=trained,
            audits=audits,
            rejected=rejected,
            set_aside=dict(probes.fetchall()),
            groups=groups,
            accuracy=dict(db.execute("SELECT version, accuracy FROM evaluations").fetchall()),
        )


def row(part: Part, crew: Crew, ledger: Ledger) -> dict[str, Any]:
    """Return the figures of one peer."""
    peer = part.identity.peer_id
    audits = ledger.audits.get(peer, [])
    failed = [(number, audit) for number, audit in enumerate(audits, 1) if audit[1] in AGAINST]
    delivered = ledger.delivered.get(peer, {})
    trained = ledger.trained[peer]
    poison = max(0, trained - HONEST_FIRST) if part.kind.startswith("turns") else trained
    found: dict[str, Any] = {
        "name": part.name,
        "kind": part.kind,
        "backend": part.backend,
        "precision": part.precision,
        "groups": len(delivered),
        "completions_accepted": sum(delivered.values()),
        "audits": len(audits),
        "trained": trained,
    }
    if part.kind != "honest":
        found |= {"poison": poison, "poison_share": round(poison / max(1, ledger.consumed), 5)}
    if failed:
        number, (_, verdict, detail) = failed[0]
        found |= {"caught_at_audit": number, "by": verdict, "detail": detail}
    if said := ledger.set_aside.get(peer):
        found["set_aside"] = said
    if rejected := ledger.rejected.get(peer):
        found["refused"] = rejected
    if answers := crew.refused.get(part.name):
        found["answers"] = dict(answers)
    return found


AGAINST = ("far", "outlier", "not_drawn", "other_seed")


def rows(crew: Crew, ledger: Ledger, chosen: Sequence[Part] | None = None) -> list[dict[str, Any]]:
    """Return the figures of some, or all that took part."""
    return [row(part, crew, ledger) for part in (crew.joined if chosen is None else chosen)]
