"""Puts the run's status together from its parts."""

from typing import Any, Literal, cast

from echo_coordinator.config import RunSettings
from echo_coordinator.loops.feeding import Scorers
from echo_coordinator.loops.publishing import Publishing
from echo_coordinator.loops.training import TrainingLoop
from echo_coordinator.state.batch import UpdateRecord
from echo_coordinator.state.counters import DROPPED_GROUPS, TRANSFERS, WORK
from echo_coordinator.state.probe_report import class_statuses
from echo_coordinator.state.run_state import RunState
from echo_coordinator.state.slices import Sliced, at_once, in_slices
from echo_swarm.checkpoint.serve import BlobServer
from echo_swarm.status import ClassStatus, EvaluationStatus, RunStatus, StreamStatus, UpdateStatus
from echo_swarm.succession import RunKeys
from echo_swarm.transport.rpc import TrafficLedger

RECENT_UPDATES = 60
FORGET_AFTER_S = 3600.0
"""Nodes silent for longer are left out of the list; their counts stay in the totals."""

LISTED_NODES = 512
"""Peer ids cost nothing; beyond this, those silent for the longest are left out too."""
LISTED_EVALUATIONS = 1000
"""Beside the first. With both, a status stays below the number of items that a frame may have (docs/protocol.md)."""
LISTED_WARNINGS = 20
MAX_COUNT = 2**63 - 1
"""Peers report their own byte counts, and the sum of some of them may be more than a frame can carry."""

RunPhase = Literal["starting", "running", "paused", "stopping", "stopped", "finished"]


class Reporter:
    """Makes RunStatus on demand. Holds nothing but references and the recent updates."""

    def __init__(
        self,
        *,
        settings: RunSettings,
        state: RunState,
        publishing: Publishing,
        training: TrainingLoop,
        blobs: BlobServer,
        pool: Scorers,
        recent: list[UpdateRecord],
    ) -> None:
        self._settings = settings
        self._state = state
        self._publishing = publishing
        self._training = training
        self._blobs = blobs
        self._pool = pool
        self._started = state.core.clock.monotonic_s()
        self.recent = recent
        """Newest last."""
        self.extra_warnings: list[str] = []
        self.keys: RunKeys | None = None
        """The run's; None if it never had another."""
        self.traffic: dict[str, TrafficLedger] = {"pieces": blobs.traffic}
        """What each service counted."""

    def warn(self, line: str) -> None:
        """Show a warning from now on."""
        self.extra_warnings.append(line)

    async def refresh(self) -> None:
        """Read the newest updates from the ledger."""
        self.recent = list(reversed(await self._state.updates.ledger(RECENT_UPDATES)))

    def status(self) -> RunStatus:
        """Return the status of this moment. With thousands of peers it takes a quarter of a second: see `making`."""
        return at_once(self.making())

    async def status_in_slices(self) -> RunStatus:
        """Return the status while other tasks run."""
        status, _ = await in_slices(self.making())
        return status

    def making(self) -> Sliced[RunStatus]:
        """Make the status, yielding where others may run."""
        state, core = self._state, self._state.core
        transfers = yield from core.transfers.report(self._blobs.bytes_by_digest, core.clock.monotonic_s())
        nodes = state.node_statuses(forget_s=FORGET_AFTER_S, most=LISTED_NODES)
        yield
        now, wall = core.clock.monotonic_s(), core.clock.wall_s()
        head = self._publishing.head
        evaluations = [e for e in state.evaluations.recorded() if e.accuracy is not None]
        return RunStatus(
            run_id=core.facts.run_id,
            name=self._settings.run.name,
            mode=self._settings.work.mode,
            max_staleness=self._settings.work.max_staleness,
            state=self._phase(),
            policy_version=core.versions.published,
            version_age_s=None if head is None else max(0.0, wall - head.message.issued_at),
            uptime_s=now - self._started,
            updates=state.updates.count,
            updates_planned=self._settings.run.updates,
            model_parameters=self._training.parameters,
            trainer=self._training.activity.report(now),
            trainer_busy_share=self._training.activity.busy_share(now),
            waiting_s={cause: round(seconds, 3) for cause, seconds in self._training.activity.waited_s.items()},
            buffer=state.buffer_status(),
            nodes=nodes,
            classes=self._classes(),
            audits=state.audits.report(),
            accepted=state.accepted(),
            rejected=state.rejected(),
            dropped_groups=core.counters.of(DROPPED_GROUPS),
            staleness=state.updates.lags(),
            trajectories_per_s=core.accepted_rate.per_s(now),
            tokens_per_s=core.token_rate.per_s(now),
            recent_updates=[_update_status(record) for record in self.recent],
            evaluations=[
                EvaluationStatus(policy_version=e.version, accuracy=e.accuracy, prompts=e.scored)
                for e in [*evaluations[:1], *evaluations[1:][-LISTED_EVALUATIONS:]]
                if e.accuracy is not None
            ],
            bytes_served_coordinator=self._blobs.bytes_served,
            bytes_served_peers=min(MAX_COUNT, sum(node.bytes_served for node in nodes)),
            streams={service: _stream_status(ledger) for service, ledger in self.traffic.items()},
            transfers=transfers,
            transfers_refused=core.counters.of(TRANSFERS),
            key_changes=0 if self.keys is None else len(self.keys.chain.links),
            key_changed_at=None if self.keys is None or self.keys.last is None else self.keys.last.made_at,
            failed_conversions=core.counters.get(WORK, "failed_conversions"),
            warnings=_shortened(self._warnings()),
        )

    def making_plain(self) -> Sliced[dict[str, Any]]:
        """Make the status of plain values, as `making` does."""
        status = yield from self.making()
        yield
        return status.model_dump(mode="json")

    def _classes(self) -> list[ClassStatus]:
        metrics = cast("dict[str, Any]", self.recent[-1].metrics) if self.recent else {}
        return class_statuses(self._state.core.roster, self._state.probes, metrics.get("logprob_gap", {}))

    def _warnings(self) -> list[str]:
        ours = [*self.extra_warnings, *self._publishing.warnings]
        return [*ours, *self._of_pool(), *self._of_last_update(), *self._state.warnings()]

    def _of_pool(self) -> list[str]:
        words = self._pool.held_up()
        return [words] if words else []

    def _of_last_update(self) -> list[str]:
        """Return what the newest update warned of."""
        if not self.recent or "recovered" in self.recent[-1].metrics:
            return []
        metrics = cast("dict[str, Any]", self.recent[-1].metrics)
        found: list[str] = list(metrics.get("warnings", []))
        groups, wanted = metrics.get("groups", {}).get("count"), self._settings.work.groups_per_update
        if groups is not None and groups < wanted:
            found.append(f"the last update trained on {groups} of {wanted} groups: too few had any signal")
        return found

    def _phase(self) -> RunPhase:
        core = self._state.core
        if core.finished:
            return "finished"
        if core.stopping:
            return "stopping"
        if core.paused:
            return "paused"
        return "starting" if core.versions.published is None else "running"


def _shortened(warnings: list[str]) -> list[str]:
    left_out = len(warnings) - LISTED_WARNINGS
    return warnings if left_out <= 0 else [*warnings[:LISTED_WARNINGS], f"and {left_out} more"]


def _stream_status(ledger: TrafficLedger) -> StreamStatus:
    return StreamStatus(
        crowded_streams=ledger.crowded_streams,
        evicted_streams=ledger.evicted_streams,
        refused_streams=ledger.refused_streams,
        malformed_streams=ledger.malformed_streams,
    )


def _update_status(record: UpdateRecord) -> UpdateStatus:
    metrics = cast("dict[str, Any]", record.metrics)
    ratio: dict[str, Any] = metrics.get("ratio", {}).get("all", {})
    return UpdateStatus(
        policy_version=record.new_version,
        reward_mean=metrics.get("reward", {}).get("mean"),
        no_signal_share=metrics.get("groups", {}).get("no_signal_share"),
        gradient_norm=metrics.get("gradient_norm"),
        ratio_min=ratio.get("min"),
        ratio_mean=ratio.get("mean"),
        ratio_max=ratio.get("max"),
        clipped_share=ratio.get("clipped_share"),
        seconds=metrics.get("seconds"),
    )
