"""The training loop: batch ─► trainer ─► ledger ─► publication.

    sequential   train 1 │ publish 1 │ (nodes sample) │ train 2 │ publish 2 │ ...
    async        train 1 │ train 2   │ train 3   │ ...      an update is entered into the ledger, and its publication
                         │ publish 1 │ publish 2 │           begun, when the one before it is published

Order of an update, and what a crash after each step leaves:

1. batch file written, groups marked as being trained    → the groups are ready again
2. the trainer's checkpoint is durable; it names what it consumed → `reconcile` writes the ledger's line from it
3. the ledger's line is committed                          → the version is published at the next start
4. the version is published and noted                      → announced again

So no completion is trained twice and none is lost, whichever process dies when.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import anyio
import anyio.to_thread

from echo_coordinator.loops.activity import TrainerActivity
from echo_coordinator.loops.auditing import Auditing
from echo_coordinator.loops.probing import ProbedTrainer, Probing
from echo_coordinator.loops.publishing import Publishing
from echo_coordinator.run_folder import RunFolder, append_line
from echo_coordinator.state.batch import Batch, BatchGroup, WaitState
from echo_coordinator.state.run_state import RunState
from echo_coordinator.state.signals import Signal
from echo_coordinator.trainer import batch as batch_file
from echo_coordinator.trainer.batch import Group, Member, TrainingBatch
from echo_coordinator.trainer.client import Ready
from echo_coordinator.trainer.client import Trained as TrainedUpdate
from echo_coordinator.trainer.settings import TrainerConfig
from echo_swarm.checkpoint.files import explained, make_folder
from echo_swarm.clock import Clock
from echo_swarm.errors import BackendFailed
from echo_swarm.transport.tasks import background_tasks

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0
"""Longest time between two looks at the buffer; changes wake the loop at once."""
STEP_LIMIT_S = 6 * 3600.0
"""An update that takes longer is a hang."""
GIVE_UP_AFTER = 3
"""Failures of the trainer in a row after which the run stops with its message."""
RESTART_S = 2.0


class Trainer(ProbedTrainer, Protocol):
    """What trains: the child process of `trainer.client`, or anything that keeps its promises."""

    @property
    def ready(self) -> Ready:
        """Where it stood when it started."""
        ...

    async def train(self, batch_path: Path, *, timeout_s: float) -> TrainedUpdate:
        """See `TrainerClient.train`."""
        ...


OpenTrainer = Callable[[TrainerConfig], AbstractAsyncContextManager[Trainer]]
"""Runs a trainer for the length of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A version that training has produced, for those who follow once it is published."""

    policy_version: int
    last: bool
    """No further update will come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unpublished:
    trained: Trained
    weights: Path


class TrainingLoop:
    """Consumes batches until the run has had its updates or is stopped."""

    def __init__(
        self,
        *,
        folder: RunFolder,
        state: RunState,
        publishing: Publishing,
        probing: Probing,
        auditing: Auditing,
        config: TrainerConfig,
        open_trainer: OpenTrainer,
        updates: int | None,
        clock: Clock,
        on_version: Callable[[Trained], Awaitable[None]],
    ) -> None:
        self.activity = TrainerActivity(since=clock.monotonic_s())
        self.parameters = 0
        self._folder = folder
        self._state = state
        self._publishing = publishing
        self._probing = probing
        self._auditing = auditing
        self._config = config
        self._open_trainer = open_trainer
        self._planned = updates
        self._clock = clock
        self._on_version = on_version
        self._stop = False
        self._to_publish: _Unpublished | None = None
        self._publication = Signal()

    def stop(self) -> None:
        """End after the update under way."""
        self._stop = True
        self._state.core.changed.notify()

    @property
    def done(self) -> bool:
        """Whether the run has had all its updates."""
        return self._planned is not None and self._state.updates.count >= self._planned

    @property
    def _is_complete(self) -> bool:
        versions = self._state.core.versions
        return self.done and versions.published is not None and versions.lag == 0

    async def run(self) -> None:
        """Train until done or stopped.

        Raises:
            BackendFailed: the trainer failed several times in a row; with its own message.
            LocalFault, in a group: a version could not be published.

        """
        async with background_tasks() as tasks:
            tasks.start_soon(self._publish_as_they_come)
            await self._train()

    async def _train(self) -> None:
        failures = 0
        while not (self._stop or self._is_complete):
            before = self._state.updates.count
            try:
                await self._run_trainer()
            except BackendFailed as e:
                failures = 1 if self._state.updates.count > before else failures + 1
                log.error("%s", e)
                await self._state.core.record_event("trainer", str(e))
                if failures >= GIVE_UP_AFTER:
                    raise
                self.activity.say("restarting", f"the trainer failed: {e}", self._now(), normal=False)
                await anyio.sleep(RESTART_S * failures)
        self.activity.stop(self._now())
        self.activity.say("finished" if self.done else "stopped", "", self._now())

    async def _run_trainer(self) -> None:
        config = self._config.model_copy(update={"published_version": self._state.core.versions.trained})
        self.activity.say("starting", "loading the model", self._now())
        await self._all_published()
        async with self._open_trainer(config) as trainer:
            self.parameters = trainer.ready.parameters
            for warning in trainer.ready.warnings:
                log.warning("%s", warning)
                await self._state.core.record_event("trainer", warning)
            await self._reconcile(trainer.ready)
            # After a publication of version 0: how prompts are made is no reason for nodes to wait with fetching it.
            await self._probing.refer(trainer, trainer.ready.policy_version)
            update = trainer.ready.update
            while not (self._stop or self.done):
                if await self._auditing.one(trainer):
                    continue
                taken = await self._state.updates.take_batch()
                if isinstance(taken, WaitState):
                    self.activity.wait(taken, self._now())
                    await self._state.wait_changed(LOOK_AGAIN_S)
                    continue
                update += 1
                await self._update(trainer, taken, update)
            await self._all_published()

    async def _update(self, trainer: Trainer, batch: Batch, update: int) -> None:
        new_version = batch.version + 1
        detail = f"update {update}: {len(batch.groups)} groups for version {new_version}"
        self.activity.work(self._now(), detail)
        try:
            path = self._folder.batches / "batch.msgpack"
            await anyio.to_thread.run_sync(_write_batch, batch, update, path)
            result = await trainer.train(path, timeout_s=STEP_LIMIT_S)
            if result.policy_version != new_version:
                raise BackendFailed(f"the trainer made version {result.policy_version}, expected {new_version}")
            metrics = {**result.metrics, "waited_s": dict(self.activity.waited_s)}
            await self._probing.refer(trainer, new_version)
            await self._all_published()
            await self._state.updates.commit(
                batch, new_version=new_version, checkpoint=result.checkpoint, metrics=metrics
            )
        except BackendFailed:
            self._state.updates.requeue(batch)
            raise
        await anyio.to_thread.run_sync(append_line, self._folder.metrics, metrics)
        self._publish(new_version, result.weights_path)
        if not self._state.core.settings.max_staleness:
            # Nothing can be sampled for the next update before.
            await self._all_published()

    def _publish(self, version: int, weights: Path) -> None:
        """Let a version be published while training goes on; the one before it is."""
        self._to_publish = _Unpublished(trained=Trained(policy_version=version, last=self.done), weights=weights)
        self._publication.notify()

    async def _publish_as_they_come(self) -> None:
        while True:
            if self._to_publish is None:
                await self._publication.wait(LOOK_AGAIN_S)
                continue
            trained = self._to_publish.trained
            await self._publishing.publish(trained.policy_version, self._to_publish.weights)
            await self._on_version(trained)
            self._to_publish = None
            self._publication.notify()

    async def _all_published(self) -> None:
        """Wait for the publication under way."""
        if self._to_publish is not None:
            self.activity.publish(self._now(), f"version {self._to_publish.trained.policy_version}")
        while self._to_publish is not None:
            await self._publication.wait(LOOK_AGAIN_S)

    async def _reconcile(self, ready: Ready) -> None:
        """Bring ledger and publication to where the trainer's newest checkpoint stands."""
        versions = self._state.core.versions
        if ready.policy_version > versions.trained:
            if ready.rolled_back_to is None:
                await self._recover(ready)
            else:
                await self._state.updates.roll_back(
                    to=ready.rolled_back_to, new_version=ready.policy_version, checkpoint=ready.checkpoint
                )
        if versions.published is None or self._state.core.versions.lag:
            self._publish(ready.policy_version, ready.weights_path)
            await self._all_published()
        else:
            await self._on_version(Trained(policy_version=ready.policy_version, last=self.done))

    async def _recover(self, ready: Ready) -> None:
        """Enter an update that was durable when we died into the ledger, where its line was missing."""
        batch = await self._state.updates.batch_of(ready.consumed_groups)
        metrics = {"policy_version": ready.policy_version, "update": ready.update, "recovered": True}
        await self._state.updates.commit(
            batch, new_version=ready.policy_version, checkpoint=ready.checkpoint, metrics=metrics
        )
        await anyio.to_thread.run_sync(append_line, self._folder.metrics, metrics)
        text = f"update {self._state.updates.count} was finished after a crash from checkpoint {ready.checkpoint}"
        await self._state.core.record_event("recovered", text)

    def _now(self) -> float:
        return self._clock.monotonic_s()


def _write_batch(batch: Batch, update: int, path: Path) -> None:
    groups = tuple(Group(group_id=group.group_id, members=_members(group)) for group in batch.groups)
    made = TrainingBatch(
        update=update,
        policy_version=batch.version,
        groups=groups,
        data_position={"next_prompt_index": max(group.prompt_index for group in batch.groups) + 1},
    )
    with explained(path):
        make_folder(path.parent)
        batch_file.write(made, path)


def _members(group: BatchGroup) -> tuple[Member, ...]:
    return tuple(
        Member(
            prompt_ids=group.prompt_ids,
            token_ids=member.token_ids,
            logprobs=member.logprobs,
            reward=member.reward,
            trained=not member.aged,
            oldest_version=member.oldest_version,
            newest_version=member.newest_version,
            backend=member.backend,
            precision=member.precision,
            peer_id=member.peer,
            finish_reason="stop" if member.finish_reason == "stop" else "length",
        )
        for member in group.members
    )
