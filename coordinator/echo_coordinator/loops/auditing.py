"""Has the trainer recompute what peers claimed, between two updates, within the budget."""

import logging
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path

from echo_coordinator.loops.probing import ProbedTrainer
from echo_coordinator.state.audit_rules import (
    AGAINST,
    AuditVerdict,
    Finding,
    Recomputed,
    find,
    follow,
    uniforms_of,
)
from echo_coordinator.state.audits import Share, worst
from echo_coordinator.state.intake_rules import MOST_VERSIONS
from echo_coordinator.state.rows import StoredTrajectory
from echo_coordinator.state.run_state import RunState
from echo_coordinator.trainer.probe_job import ProbeJob, ProbeRefused, ProbeText, ProbeValues
from echo_swarm.codec import unpack_f32
from echo_swarm.trajectory import DRAW_BY_SEED

log = logging.getLogger(__name__)

AUDIT_LIMIT_S = 1800.0
"""One forward pass over a few completions takes longer than this only in a hang."""
Weights = Callable[[int, bool], Path | None]
"""The published weights of a version, given whether the trainer stands at it; an empty path: those it has. None: the
file is gone."""


class Auditing:
    """One audit after another, as long as there is something to audit and time for it."""

    def __init__(self, state: RunState, *, weights: Weights) -> None:
        self._state = state
        self._weights = weights

    async def one(self, trainer: ProbedTrainer) -> bool:
        """Make the next audit if it may be made now. Returns whether one was.

        Raises:
            BackendFailed: the trainer ended. What it was at counts as not audited, so that it is not asked again.

        """
        core, audits = self._state.core, self._state.audits
        began = core.clock.monotonic_s()
        free = not core.selector.has_batch(core.groups)
        if not audits.pending() or core.paused or not (free or audits.budget.allows(began)):
            return False
        share = await audits.next()
        if share is None:
            return False
        began = core.clock.monotonic_s()
        finding = Finding(verdict=AuditVerdict.NOT_AUDITED, detail="the trainer ended")
        try:
            finding = await self._find(trainer, share)
        finally:
            await audits.record(share, finding, core.clock.monotonic_s() - began, free=free)
        if finding.verdict in AGAINST:
            log.warning("%s failed the audit of group %d: %s", share.peer, share.group.group_id, finding.detail)
        return True

    async def _find(self, trainer: ProbedTrainer, share: Share) -> Finding:
        """Recompute a share version by version, and judge it class by class."""
        by_kind: dict[tuple[str, str], list[Recomputed]] = {}
        found: list[list[Recomputed]] = [[] for _ in share.completions]
        try:
            for version in sorted({v for made in share.completions for v in _versions(made)}):
                chosen = [place for place, made in enumerate(share.completions) if version in _versions(made)]
                texts = [share.completions[place] for place in chosen]
                values = await self._recompute(trainer, share, version, texts)
                for place, made, value in zip(chosen, texts, values, strict=True):
                    found[place].append(_recomputed(made, value))
            for made, by_version in zip(share.completions, found, strict=True):
                by_kind.setdefault((made.backend, made.precision), []).append(follow(by_version))
        except ProbeRefused as e:
            return Finding(verdict=AuditVerdict.NOT_AUDITED, detail=str(e))
        before, allowed = self._state.audits.standing(share.peer), self._state.probes.allowed
        return worst(
            [find(made, allowed(share.peer, kind), before.drift, before.strays) for kind, made in by_kind.items()]
        )

    async def _recompute(
        self, trainer: ProbedTrainer, share: Share, version: int, chosen: Iterable[StoredTrajectory]
    ) -> tuple[ProbeValues, ...]:
        weights = self._weights(version, version == self._state.core.versions.trained)
        if weights is None:
            raise ProbeRefused(f"the weights of version {version} are not kept any more")
        facts = self._state.core.facts
        prompt = share.group.prompt_ids
        job = ProbeJob(
            texts=tuple(ProbeText(prompt_ids=prompt, completion_ids=made.token_ids) for made in chosen),
            tokens=1,
            seed=0,
            end_token_ids=facts.end_token_ids,
            vocabulary=facts.vocabulary_size,
            weights="" if weights == Path() else str(weights.absolute()),
            spread=True,
        )
        return await trainer.probe(job, timeout_s=AUDIT_LIMIT_S)


def _versions(made: StoredTrajectory) -> range:
    """Return the versions that may have made a completion; more than one if weights changed in its middle."""
    if made.newest_version - made.oldest_version >= MOST_VERSIONS:  # Accepted before there was that rule.
        raise ProbeRefused(f"versions {made.oldest_version} to {made.newest_version}: too many to recompute")
    return range(made.oldest_version, made.newest_version + 1)


def _recomputed(made: StoredTrajectory, value: ProbeValues) -> Recomputed:
    claimed = unpack_f32(made.logprobs)
    if not len(claimed) == len(value.logprobs) == len(value.expected) == len(value.variance):
        raise ProbeRefused(f"the trainer gave {len(value.logprobs)} values for {len(claimed)} tokens")
    follows = made.backend in DRAW_BY_SEED and len(value.below) == len(claimed)
    return Recomputed(
        claimed=claimed,
        logprobs=array("f", value.logprobs),
        expected=array("f", value.expected),
        variance=array("f", value.variance),
        below=array("f", value.below) if follows else array("f"),
        uniforms=uniforms_of(made.seed, len(claimed)) if follows else array("d"),
    )
