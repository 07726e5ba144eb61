"""The modelled trainer: real batches from the real buffer, a fixed time for each update, publication beside the next.

The order is that of `loops.training`: checkpoint durable, the version before published, line in the ledger,
publication. What it has on disk is its newest checkpoint, which names what it consumed.
"""

import asyncio
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from echo_coordinator.loops.activity import TrainerActivity
from echo_coordinator.loops.auditing import Auditing
from echo_coordinator.simulate.scenario import Scenario
from echo_coordinator.simulate.truth import USUAL_LOGPROB, Truth, artifact
from echo_coordinator.simulate.watch import Watch
from echo_coordinator.state.batch import Batch, WaitState
from echo_coordinator.state.run_state import RunState
from echo_coordinator.state.signals import Signal
from echo_coordinator.trainer.probe_job import ProbeJob, ProbeValues

LOOK_AGAIN_S = 1.0
RESTART_S = 2.0
FORWARD_SHARE = 1 / 3
"""Of an update's time for each completion, that recomputing it takes."""
IMPROBABLE = -13.0
"""Log-probability of a token that a liar put where the policy would hardly have."""


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """What the trainer has on disk."""

    version: int = 0
    consumed: tuple[int, ...] = ()
    """Groups of the update that made it."""


class SimTrainer:
    """One life of the trainer, which is that of the coordinator's process."""

    def __init__(
        self,
        *,
        state: RunState,
        scenario: Scenario,
        checkpoint: Checkpoint,
        truth: Truth,
        watch: Watch,
        draws: random.Random,
        on_version: Callable[[int], None],
    ) -> None:
        self._state = state
        self._scenario = scenario
        self._checkpoint = checkpoint
        self._truth = truth
        self._watch = watch
        self._draws = draws
        self._on_version = on_version
        self.activity = TrainerActivity(since=_now())
        self._to_publish: int | None = None
        self._publication = Signal()

    async def run(self) -> None:
        """Train until cancelled."""
        state = self._state
        await self._reconcile()
        auditing = Auditing(state, weights=lambda version, newest: Path("file"))
        while True:
            if await auditing.one(self):
                self._watch.step(state)
                continue
            taken = await state.updates.take_batch()
            if isinstance(taken, WaitState):
                self.activity.wait(taken, _now())
                await state.wait_changed(LOOK_AGAIN_S)
                continue
            self._watch.took(state, taken)
            await self._update(taken)

    async def publish_as_they_come(self) -> None:
        """Publish what was trained, until cancelled."""
        while True:
            if self._to_publish is None:
                await self._publication.wait(LOOK_AGAIN_S)
                continue
            version = self._to_publish
            await asyncio.sleep(self._scenario.trainer.publish_s)
            await self._state.updates.publish(version, [artifact(version)])
            self._watch.published(self._state, version)
            self._on_version(version)
            self._to_publish = None
            self._publication.notify()

    async def probe(self, job: ProbeJob, *, timeout_s: float) -> tuple[ProbeValues, ...]:
        """Recompute completions, as the policy that they name would have them."""
        work, step_s = self._scenario.work, self._scenario.trainer.step_s
        share = len(job.texts) / (work.groups_per_update * work.group_size)
        await asyncio.sleep(FORWARD_SHARE * step_s * share)
        return tuple(self._values(text.completion_ids) for text in job.texts)

    def _values(self, token_ids: bytes) -> ProbeValues:
        count = len(token_ids) // 4
        logprobs = array("f", [USUAL_LOGPROB]) * count
        if token_ids in self._truth.improbable:
            logprobs[-1] = IMPROBABLE
        usual, variance = array("f", [USUAL_LOGPROB]) * count, array("f", [1.0]) * count
        return ProbeValues(completion_ids=token_ids, logprobs=logprobs, expected=usual, variance=variance)

    async def _update(self, batch: Batch) -> None:
        faults, now = self._scenario.faults, _now()
        self.activity.work(now, f"version {batch.version + 1}")
        await asyncio.sleep(self._scenario.trainer.step_s)
        if faults.trainer_failures and self._draws.random() < faults.trainer_failures:
            self._state.updates.requeue(batch)
            self._watch.requeued(self._state, batch)
            self.activity.say("restarting", "the trainer failed", _now(), normal=False)
            await asyncio.sleep(RESTART_S)
            return
        self._checkpoint.version = batch.version + 1
        self._checkpoint.consumed = tuple(group.group_id for group in batch.groups)
        await self._all_published()
        await self._commit(batch)
        if not self._state.core.settings.max_staleness:
            await self._all_published()

    async def _commit(self, batch: Batch) -> None:
        version = batch.version + 1
        await self._state.updates.commit(batch, new_version=version, checkpoint=f"v{version}", metrics={})
        self._watch.trained(self._state, batch)
        self._publish(version)

    def _publish(self, version: int) -> None:
        self._to_publish = version
        self._publication.notify()

    async def _all_published(self) -> None:
        if self._to_publish is not None:
            self.activity.publish(_now(), f"version {self._to_publish}")
        while self._to_publish is not None:
            await self._publication.wait(LOOK_AGAIN_S)

    async def _reconcile(self) -> None:
        """Enter an update that was durable when the coordinator was killed, and publish what is not published."""
        updates, versions = self._state.updates, self._state.core.versions
        if self._checkpoint.version > versions.trained:
            await self._commit(await updates.batch_of(self._checkpoint.consumed))
        elif versions.published is None or versions.lag:
            self._publish(versions.trained)
        else:
            self._on_version(versions.trained)
        await self._all_published()


def _now() -> float:
    return asyncio.get_running_loop().time()
