"""The state of a run, put together: what is leased, stored, scored, trained, published, evaluated, and who takes part.

    admission ─► groups ─► leases ─► nodes ─► intake ─► rewards ─► settled groups
        ▲                                                              │
        └─────────── updates.commit ◄── trainer ◄── updates.take_batch ┘

Memory decides, the committer writes: every change is in the database before anybody outside is told of it. Bounds:
groups under way by `Admission.capacity`, pushes in flight by `pending_bytes`. After a crash `open_run` rebuilds all of
it: leases get a fresh term (their peers may still push), completions that were being scored are scored again, a batch
that was being trained is ready again.
"""

import sqlite3
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from echo_coordinator.state import rows
from echo_coordinator.state.admission import Admission
from echo_coordinator.state.audit_rows import PROBATION
from echo_coordinator.state.audit_settings import AuditSettings
from echo_coordinator.state.audits import Audits
from echo_coordinator.state.bans import Bans
from echo_coordinator.state.committer import Commit, commit_in_thread
from echo_coordinator.state.core import RunCore, RunFacts
from echo_coordinator.state.counters import TOTAL
from echo_coordinator.state.database import database_fault, open_database
from echo_coordinator.state.evaluations import Evaluations
from echo_coordinator.state.followed_seeds import FollowedSeeds
from echo_coordinator.state.groups import FIRST_EVAL_GROUP_ID, GroupState
from echo_coordinator.state.intake import Intake
from echo_coordinator.state.newcomers import Newcomers
from echo_coordinator.state.plausibility import Plausibility
from echo_coordinator.state.probe_settings import ProbeSettings
from echo_coordinator.state.probes import Probes
from echo_coordinator.state.rewards import Rewards
from echo_coordinator.state.roster import Node
from echo_coordinator.state.standing_settings import StandingSettings
from echo_coordinator.state.updates import Updates
from echo_coordinator.state.work_settings import WorkSettings
from echo_swarm.clock import Clock, SystemClock
from echo_swarm.identity import PeerId
from echo_swarm.render import short_peer
from echo_swarm.status import BufferStatus, NodeStatus
from echo_swarm.trajectory import Reason
from echo_swarm.work import Role

__all__ = ["RunFacts", "RunState", "open_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The parts. The wiring loop uses all of them, the work service `core` and `intake`."""

    core: RunCore
    admission: Admission
    intake: Intake
    rewards: Rewards
    updates: Updates
    evaluations: Evaluations
    probes: Probes
    audits: Audits
    bans: Bans
    newcomers: Newcomers
    followed: FollowedSeeds

    async def set_paused(self, paused: bool) -> None:
        """Stop or resume handing out and consuming work; kept over restarts. What is leased may still be pushed."""
        core = self.core
        await core.committer.execute(lambda db: rows.set_fact(db, "paused", int(paused)))
        core.paused = paused
        core.notify_all()

    def stop(self, *, finished: bool = False) -> None:
        """Hand out nothing any more. `finished`: the run has ended for good and nodes are told to leave."""
        self.core.stopping, self.core.finished = True, finished
        self.core.notify_all()

    async def tick(self) -> None:
        """Do what time asks for. Call about once a second."""
        await self.bans.write_owed()
        await self.core.tick()
        if self.newcomers.reserve_ended():
            self.core.work_changed.notify()

    async def wait_changed(self, timeout_s: float) -> bool:
        """Wait until something happens that the loop may act on; False when `timeout_s` passed without."""
        return await self.core.changed.wait(timeout_s)

    def accepted(self, scope: str = TOTAL) -> int:
        """Return how many completions were accepted, of all peers or of one peer id."""
        return self.core.counters.get(scope, Reason.ACCEPTED.value)

    def rejected(self, scope: str = TOTAL) -> dict[str, int]:
        """Return how many were refused by reason, of all peers or of one peer id."""
        accepted = Reason.ACCEPTED.value
        return {name: n for name, n in self.core.counters.of(scope).items() if name != accepted and n}

    def bars(self, peer: PeerId) -> bool:
        """Whether a peer gets no work because of its probes or its audits, or because it is banned."""
        return peer in self.bans.all or self.probes.bars(peer) or self.audits.is_suspended(peer)

    def standing(self, peer: PeerId) -> str:
        """Return for a peer's owner why it gets no work, or less; empty if it gets what others get."""
        if (aside := self.core.roster.set_aside.get(peer)) is not None:
            return f"set aside until a probe fits: {aside}"
        word, detail = self.audits.word(peer), self.audits.standing(peer).detail
        if word == "suspended":
            until = time.strftime("%Y-%m-%d %H:%M", time.gmtime(self.audits.standing(peer).until))
            return f"suspended until {until} UTC: it failed an audit ({detail})"
        if word == "probation":
            clean = self.audits.standing(peer).clean
            return f"one completion at a time until {PROBATION - clean} more audits are clean: it failed one ({detail})"
        return ""

    def buffer_status(self) -> BufferStatus:
        """Return how full the buffer is."""
        groups = self.core.groups
        return BufferStatus(
            in_flight=groups.count("train", GroupState.ACTIVE),
            ready=groups.count("train", GroupState.READY),
            capacity=self.admission.capacity,
            training=groups.count("train", GroupState.TRAINING),
            bytes=groups.size_bytes(),
        )

    def node_statuses(self, *, forget_s: float | None = None, most: int | None = None) -> list[NodeStatus]:
        """Return every peer once; with `forget_s` without those silent for longer, and the `most` latest heard."""
        now = self.core.clock.monotonic_s()
        nodes = [node for node in self.core.roster.nodes() if forget_s is None or now - node.last_seen <= forget_s]
        if most is not None and len(nodes) > most:
            nodes = sorted(nodes, key=lambda node: -node.last_seen)[:most]
        return [self._node_status(node, now) for node in nodes]

    def warnings(self) -> list[str]:
        """Return what a person should know, in no order."""
        found = [self.core.signal_window.suggestion(), *self.probes.warnings(), *self.audits.warnings()]
        if self.intake.fault:
            found.append(f"completions cannot be stored: {self.intake.fault}")
        for node in self.core.roster.nodes():
            if node.live and abs(node.skew_s) > 3:
                found.append(f"the clock of {short_peer(node.peer)} is {node.skew_s:+.0f} s off")
        return [text for text in found if text]

    def _node_status(self, node: Node, now: float) -> NodeStatus:
        backend, probed, ban = node.backend, self.probes.standings.get(node.peer), self.bans.all.get(node.peer)
        return NodeStatus(
            peer_id=node.peer,
            role=node.role.value,
            live=node.live,
            last_seen_s=max(0.0, now - node.last_seen),
            backend=backend.backend if backend else "",
            build=backend.build if backend else "",
            precision=backend.precision if backend else "",
            device=backend.device if backend else "",
            batch=backend.batch if backend else 0,
            held_version=node.held_version,
            confirmed_version=probed.version if probed and probed.confirmed else None,
            probe=probed.verdict.value if probed and probed.verdict else "",
            gap=probed.gap.mean if probed and probed.gap else None,
            set_aside=node.peer in self.core.roster.set_aside,
            standing=self._word(node),
            standing_detail=ban.reason if ban else self.audits.standing(node.peer).detail,
            suspended_s=self.audits.suspended_s(node.peer),
            audits_clean=self.audits.standing(node.peer).clean,
            state=node.state,
            in_flight=self.core.leases.in_flight(node.peer),
            accepted=self.accepted(node.peer),
            rejected=self.rejected(node.peer),
            tokens_per_s=node.tokens_per_s,
            bytes_served=node.bytes_served,
            bytes_fetched_peers=node.bytes_fetched_peers,
            outbound_only=not node.addresses,
        )

    def _word(self, node: Node) -> str:
        if node.peer in self.bans.all:
            return "banned"
        return self.audits.word(node.peer) if node.role is Role.INFERENCE else ""


@asynccontextmanager
async def open_run(
    path: Path,
    settings: WorkSettings,
    facts: RunFacts,
    clock: Clock | None = None,
    probes: ProbeSettings | None = None,
    audits: AuditSettings | None = None,
    standing: StandingSettings | None = None,
    commit: Commit = commit_in_thread,
    durable: bool = True,
) -> AsyncGenerator[RunState]:
    """Open or create a run's database and keep its state for the length of the block.

    Without `standing` unproven peers have no limits together; with it, a batch may wait for audits to be made. A
    simulation says how it commits, and waits for no real disk (`durable` false).

    Raises:
        LocalFault: the database cannot be used; the message says why and what to do.

    """
    connection = open_database(path, durable=durable)
    try:
        try:
            core = RunCore(connection, path, settings, facts, clock or SystemClock(), commit)
            state = _restore(connection, core, probes or ProbeSettings(), audits or AuditSettings(), standing)
        except sqlite3.Error as e:
            raise database_fault(e, path) from e
        async with state.core.committer.running():
            yield state
    finally:
        connection.close()


def _restore(
    connection: sqlite3.Connection,
    core: RunCore,
    probes: ProbeSettings,
    settings: AuditSettings,
    standing: StandingSettings | None,
) -> RunState:
    audits = Audits(core, settings, connection)
    bans = Bans(core, audits, connection)
    limits = standing or StandingSettings(unproven_share=1.0)
    plausibility = Plausibility(core.counters)
    audits.is_suspicious = plausibility.is_suspicious
    core.on_taken_back = plausibility.forget
    followed = FollowedSeeds(required=settings.require_followed_seeds)
    newcomers = Newcomers(core, limits, is_proven=audits.is_proven, audited=settings.share > 0)
    core.next_in_turn = newcomers.next_in_turn
    core.selector.unvetted, core.selector.unvetted_share = audits.unvetted, limits.unproven_share

    def why_barred(peer: PeerId) -> str:
        if peer in bans.all:
            return "this node was banned"
        if peer in core.roster.set_aside:
            return "the lease ended when this node was set aside: its probe did not fit"
        return audits.why_barred(peer)

    intake = Intake(
        run_id=core.facts.run_id,
        clock=core.clock,
        groups=core.groups,
        leases=core.leases,
        counters=core.counters,
        committer=core.committer,
        is_known=lambda peer: core.roster.get(peer) is not None,
        why_barred=why_barred,
        look=followed.before(plausibility.look),
        demand=core.demand,
        seed_of=core.seed_of,
        on_filled=core.on_filled,
        on_dropped=core.on_dropped,
    )
    return RunState(
        core=core,
        admission=Admission(core, rows.next_group_id(connection, "train", 0)),
        intake=intake,
        rewards=Rewards(core),
        updates=Updates(core),
        evaluations=Evaluations(
            core,
            rows.next_group_id(connection, "eval", FIRST_EVAL_GROUP_ID),
            rows.load_evaluations(connection),
        ),
        probes=Probes(core, probes, connection),
        audits=audits,
        bans=bans,
        newcomers=newcomers,
        followed=followed,
    )
