"""What stands in for the coordinator's children where no model is needed: a trainer of fixed step time, seeded rewards.

Everything around them is real. The trainer keeps real checkpoints (same files, same order of writes) and reads real
batch files; only the optimisation is a sleep.
"""

import hashlib
import json
import struct
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from echo_coordinator.scoring.items import Prompt, Scored, ScoreRequest
from echo_coordinator.trainer import batch as batches
from echo_coordinator.trainer.batch import TrainingBatch
from echo_coordinator.trainer.client import Ready, Trained
from echo_coordinator.trainer.probe_job import ProbeJob, ProbeRefused, ProbeValues
from echo_coordinator.trainer.settings import TrainerConfig
from echo_coordinator.trainer.state import OPTIMIZER_FILE, WEIGHTS_FILE, Checkpoint, Checkpoints, TrainerState
from echo_swarm.codec import pack_u32
from echo_swarm.errors import BackendFailed

VOCABULARY = 64
END = 0
WEIGHTS_BYTES = 300_000


def weights(version: int, size_bytes: int = WEIGHTS_BYTES) -> bytes:
    """Return a valid safetensors file whose bytes differ from version to version."""
    data = version.to_bytes(8, "little") * (size_bytes // 8)
    header = {"w": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write_model(folder: Path) -> None:
    """Write what the coordinator reads of a model: its config and its weights."""
    folder.mkdir(parents=True)
    config = {"model_type": "none", "vocab_size": VOCABULARY, "eos_token_id": END, "max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model.safetensors").write_bytes(weights(0))


class StandInTrainer:
    """A trainer whose update takes `step_s` and moves nothing but the version. It outlives its sessions, as disk does.

    Knobs for tests: `hold` stops it inside an update until `let_go`; `fail` is asked before each update.
    """

    def __init__(self, *, step_s: float = 0.0) -> None:
        self.step_s = step_s
        self.fail: Callable[[TrainingBatch], str | None] = lambda batch: None
        self.die_before_answer = 0
        """So many updates end after their checkpoint is durable and before the coordinator hears of it."""
        self.trained: list[TrainingBatch] = []
        """Batches of all durable updates."""
        self.salt = 0
        """Makes the weights of its versions other ones than those of another trainer."""
        self.opened = 0
        self.spans: list[tuple[float, float]] = []
        """When each update began and ended, on the event loop's clock."""
        self.training = False
        self.probe: Callable[[int, ProbeJob], tuple[ProbeValues, ...]] | None = None
        """Values of a version for probes; None: it refuses them."""
        self._gate = anyio.Event()
        self._gate.set()

    def hold(self) -> None:
        """Stop in the next update, or in this one."""
        if self._gate.is_set():
            self._gate = anyio.Event()

    def let_go(self) -> None:
        """Go on."""
        self._gate.set()

    def salt_of(self, batch: TrainingBatch) -> int:
        """Return what the weights that a batch leads to are made of, beside their version."""
        return self.salt

    @property
    def lags(self) -> Counter[int]:
        """Trained members by staleness."""
        return Counter(b.policy_version - m.oldest_version for b in self.trained for m in b.members if m.trained)

    @asynccontextmanager
    async def open(self, config: TrainerConfig) -> AsyncGenerator["_Session"]:
        """Start where the newest checkpoint is (an `OpenTrainer`)."""
        self.opened += 1
        checkpoints = Checkpoints(config.checkpoint_folder)
        checkpoints.sweep()
        checkpoint = checkpoints.newest().checkpoint or _write(checkpoints, TrainerState(), self.salt)
        yield _Session(self, checkpoints, checkpoint)

    async def work(self, batch: TrainingBatch, began: float, write: Callable[[], Checkpoint]) -> Checkpoint:
        """Spend the rest of one update's time. Raises BackendFailed when told to."""
        self.training = True
        try:
            reason = self.fail(batch)
            if reason is not None:
                raise BackendFailed(reason)
            checkpoint = await to_thread.run_sync(write)
            await anyio.sleep(max(0.0, began + self.step_s - anyio.current_time()))
            await self._gate.wait()
        finally:
            self.training = False
        self.spans.append((began, anyio.current_time()))
        self.trained.append(batch)
        if self.die_before_answer:
            self.die_before_answer -= 1
            raise BackendFailed("the stand-in trainer died after its checkpoint")
        return checkpoint


class _Session:
    """One life of the trainer (a `Trainer`)."""

    def __init__(self, trainer: StandInTrainer, checkpoints: Checkpoints, checkpoint: Checkpoint) -> None:
        self._trainer = trainer
        self._checkpoints = checkpoints
        self._checkpoint = checkpoint

    @property
    def ready(self) -> Ready:
        state = self._checkpoint.state
        return Ready(
            update=state.update,
            policy_version=state.policy_version,
            checkpoint=self._checkpoint.folder.name,
            weights_path=self._checkpoint.weights_path,
            parameters=WEIGHTS_BYTES,
            warnings=(),
            consumed_groups=state.consumed_groups,
            data_position=state.data_position,
            rolled_back_to=state.rolled_back_to,
        )

    async def probe(self, job: ProbeJob, *, timeout_s: float) -> tuple[ProbeValues, ...]:
        if self._trainer.probe is None:
            raise ProbeRefused("a stand-in has no model")
        return self._trainer.probe(self._checkpoint.state.policy_version, job)

    async def train(self, batch_path: Path, *, timeout_s: float) -> Trained:
        began = anyio.current_time()
        batch = await to_thread.run_sync(batches.read, batch_path)
        before = self._checkpoint.state
        if (batch.update, batch.policy_version) != (before.update + 1, before.policy_version):
            raise BackendFailed(f"batch {batch.update} for version {batch.policy_version} does not follow {before}")
        state = TrainerState(
            update=batch.update,
            policy_version=batch.policy_version + 1,
            consumed_groups=tuple(group.group_id for group in batch.groups),
            data_position=dict(batch.data_position),
        )
        with anyio.fail_after(timeout_s):
            salt = self._trainer.salt_of(batch)
            self._checkpoint = await self._trainer.work(batch, began, lambda: _write(self._checkpoints, state, salt))
        return Trained(
            update=state.update,
            policy_version=state.policy_version,
            checkpoint=self._checkpoint.folder.name,
            weights_path=self._checkpoint.weights_path,
            metrics=_metrics(batch),
        )


def _write(checkpoints: Checkpoints, state: TrainerState, salt: int) -> Checkpoint:
    def fill(folder: Path) -> None:
        (folder / WEIGHTS_FILE).write_bytes(weights(state.policy_version + salt))
        (folder / OPTIMIZER_FILE).write_bytes(weights(0, 8))

    checkpoint = checkpoints.write(state, fill)
    checkpoints.prune(3)
    return checkpoint


def _metrics(batch: TrainingBatch) -> dict[str, Any]:
    rewards = [member.reward for member in batch.members if member.reward is not None]
    return {"reward": {"mean": sum(rewards) / len(rewards)}}


@dataclass(kw_only=True)
class StandInScorers:
    """Prompts that are their own index, and a reward for each completion (a `Scorers`)."""

    reward: Callable[[ScoreRequest], float | None] = field(default_factory=lambda: coin(0.5))
    """None: the verifier fails."""

    @asynccontextmanager
    async def open(self) -> AsyncGenerator["StandInScorers"]:
        """Run for the length of the block (an `open_scorers`)."""
        yield self

    def why_skipped(self) -> str:
        return ""

    def held_up(self) -> str:
        return ""

    async def prompts(self, split: str, start: int, count: int) -> list[Prompt]:
        indices = range(start, start + count)
        return [Prompt(index=i, prompt_ids=pack_u32([1, i % VOCABULARY, i // VOCABULARY]), text="") for i in indices]

    async def score(self, items: Sequence[ScoreRequest]) -> list[Scored]:
        rewards = [self.reward(item) for item in items]
        return [Scored(reward=r, failure="no verdict" if r is None else None, text="") for r in rewards]


def coin(share: float) -> Callable[[ScoreRequest], float]:
    """Return rewards of 1 for about `share` of all completions and 0 for the rest, always the same for the same one."""

    def reward(item: ScoreRequest) -> float:
        drawn = hashlib.blake2b(item.token_ids, key=item.index.to_bytes(8, "little"), digest_size=4).digest()
        return float(int.from_bytes(drawn) < share * 2**32)

    return reward
