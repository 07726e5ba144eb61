"""The session of a trainer that trains nothing: each update's weights come from elsewhere."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from anyio import to_thread

from echo_coordinator.trainer import batch as batches
from echo_coordinator.trainer.client import Ready, Trained
from echo_coordinator.trainer.probe_job import ProbeJob, ProbeRefused, ProbeValues
from echo_coordinator.trainer.state import Checkpoint, TrainerState

Following = Callable[[TrainerState], Awaitable[Checkpoint]]
"""Waits until the next version may come, and returns its durable checkpoint with that state."""


class MadeUpSession:
    """A `Trainer` for `Children.open_trainer`."""

    def __init__(self, following: Following, first: Checkpoint) -> None:
        self._following = following
        self._checkpoint = first

    @property
    def ready(self) -> Ready:
        return Ready(
            update=self._checkpoint.state.update,
            policy_version=self._checkpoint.state.policy_version,
            checkpoint=self._checkpoint.folder.name,
            weights_path=self._checkpoint.weights_path,
            parameters=0,
            warnings=(),
            consumed_groups=self._checkpoint.state.consumed_groups,
            data_position=self._checkpoint.state.data_position,
        )

    async def probe(self, job: ProbeJob, *, timeout_s: float) -> tuple[ProbeValues, ...]:
        raise ProbeRefused("nothing is trained in this benchmark")

    async def train(self, batch_path: Path, *, timeout_s: float) -> Trained:
        batch = await to_thread.run_sync(batches.read, batch_path)
        state = TrainerState(
            update=batch.update,
            policy_version=batch.policy_version + 1,
            consumed_groups=tuple(group.group_id for group in batch.groups),
            data_position=dict(batch.data_position),
            base_digest=self._checkpoint.state.base_digest,
        )
        self._checkpoint = await self._following(state)
        return Trained(
            update=state.update,
            policy_version=state.policy_version,
            checkpoint=self._checkpoint.folder.name,
            weights_path=self._checkpoint.weights_path,
            metrics={"reward": {"mean": 0.5}},
        )
