"""The trainer without a process around it: open, train a batch, save. The child process and plain loops run this code.

trainer = Trainer(config)            resumes from the newest intact checkpoint, or writes version 0
metrics = trainer.train(batch)       changes weights, optimizer and `trainer.state`
checkpoint = trainer.save()          durable; name it to others only after this
"""

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from echo_coordinator.trainer.adapter import (
    WithoutAdapter,
    adapter_tensors,
    add_adapter,
    fix_base,
    load_adapter,
    save_adapter,
)
from echo_coordinator.trainer.batch import TrainingBatch, check
from echo_coordinator.trainer.metrics import Optimised, report
from echo_coordinator.trainer.model import load_model, load_tensors, load_weights, save_tensors, save_weights, tensors
from echo_coordinator.trainer.optimise import Optimiser, make_optimizer
from echo_coordinator.trainer.ranks import Ranks
from echo_coordinator.trainer.rows import plan
from echo_coordinator.trainer.schedule import learning_rate
from echo_coordinator.trainer.settings import TrainerConfig
from echo_coordinator.trainer.state import (
    ADAPTER_FILE,
    OPTIMIZER_FILE,
    PUBLISHED_FILE,
    WEIGHTS_FILE,
    Checkpoint,
    Checkpoints,
    TrainerState,
)
from echo_swarm.cgroups import cpu_count
from echo_swarm.codec import unpack_u32
from echo_swarm.errors import BackendFailed, MalformedMessage

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Trainer:
    """A model, its optimizer and where they stand."""

    def __init__(self, config: TrainerConfig, ranks: Ranks | None = None) -> None:
        """Load the model and the newest checkpoint; write version 0 in a fresh folder (rank 0).

        Raises:
            SettingsError: the model cannot be used.
            BackendFailed: there are checkpoints, but none that can be continued from.

        """
        self.config = config
        self.warnings: tuple[str, ...] = ()
        """What a person should hear about the checkpoint that was loaded."""
        self._ranks = ranks or Ranks()
        self._store = Checkpoints(config.checkpoint_folder)
        torch.set_num_threads(config.optimizer.threads or max(cpu_count() // self._ranks.world, 1))
        self.model = self._load(config.model_folder, config.optimizer.gradient_checkpointing)
        self._base_digest = ""
        if config.lora is not None:
            self._base_digest = fix_base(self.model, config.checkpoint_folder, config.publish_precision)
            add_adapter(self.model, config.lora, config.optimizer.seed)
        self._optimizer = make_optimizer(self.model, config)
        self._optimiser = Optimiser(self.model, self._optimizer, config, self._ranks, self._reference())
        self._vocabulary = int(self.model.get_input_embeddings().num_embeddings)
        self.state = TrainerState(seed=config.optimizer.seed, base_digest=self._base_digest)
        self.checkpoint = self._resume()
        """The one on disk that training continues from."""

    @property
    def parameters(self) -> int:
        """Number of trainable numbers; shared ones count once."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def train(self, batch: TrainingBatch) -> dict[str, Any]:
        """Apply one batch and return its metrics. `state` moves on by one update and one policy version.

        A batch without signal, or with non-finite gradients, leaves the weights as they are and is counted.

        Raises:
            MalformedMessage: this batch cannot be trained; nothing has changed.

        """
        self.check(batch)
        began = time.perf_counter()
        rate = learning_rate(self.config.optimizer, batch.update)
        planned = plan(batch, self.config.objective)
        done = self._optimiser.run(planned.rows, update=batch.update, learning_rate=rate)
        self._advance(batch, done, rate)
        metrics = report(batch, planned, done, learning_rate=rate, seconds=time.perf_counter() - began)
        return {**metrics, "skipped_total": self.state.skipped}

    def check(self, batch: TrainingBatch) -> None:
        """Raise MalformedMessage unless `batch` is the next one and its ids lie in the vocabulary."""
        expected = (self.state.update + 1, self.state.policy_version)
        if (batch.update, batch.policy_version) != expected:
            raise MalformedMessage(
                f"batch is for update {batch.update} on version {batch.policy_version}; the trainer's next is update "
                f"{expected[0]} on version {expected[1]}"
            )
        check(batch)
        for group in batch.groups:
            for member in group.members:
                largest = max(max(unpack_u32(member.prompt_ids)), max(unpack_u32(member.token_ids)))
                if largest >= self._vocabulary:
                    raise MalformedMessage(
                        f"group {group.group_id}: token id {largest} is outside the vocabulary of {self._vocabulary}"
                    )

    def save(self) -> Checkpoint:
        """Write the checkpoint of the present state, durably, and drop old ones. Only rank 0 may call this."""
        self.checkpoint = self._store.write(self.state, self._fill)
        self._store.prune(self.config.keep_checkpoints)
        return self.checkpoint

    @contextmanager
    def at(self, weights: Path | None) -> Generator[None]:
        """Let the model have the numbers of a published file for the length of the block; None: those of now.

        The numbers of now wait in main memory and come back bit by bit.

        Raises:
            BackendFailed: the file is damaged or of another model.

        """
        if weights is None:
            yield
            return
        lora = self.config.lora
        changing = tensors(self.model) if lora is None else adapter_tensors(self.model)
        kept = {name: tensor.detach().to("cpu", copy=True) for name, tensor in changing.items()}
        try:
            if lora is None:
                load_weights(self.model, weights)
            else:
                load_adapter(self.model, lora, weights)
            yield
        finally:
            with torch.no_grad():
                for name, tensor in changing.items():
                    tensor.copy_(kept[name])

    def _load(self, folder: Path, gradient_checkpointing: bool) -> Any:
        return load_model(
            folder,
            device=self._ranks.device,
            seed=self.config.optimizer.seed,
            gradient_checkpointing=gradient_checkpointing,
        )

    def _reference(self) -> Any:
        """Return the frozen model of the KL term; None where there is no such term."""
        if self.config.objective.kl_coefficient == 0:
            return None
        if self.config.lora is not None and self.config.reference_folder is None:
            return WithoutAdapter(self.model)
        return self._load(self.config.reference_folder or self.config.model_folder, False).requires_grad_(False)

    def _resume(self) -> Checkpoint:
        found = self._store.newest()
        self.warnings = found.warnings
        if self._ranks.rank == 0:
            self._store.sweep()
        if found.checkpoint is None:
            return self.save()
        self.state = found.checkpoint.state
        self._load_trained(found.checkpoint)
        self._load_optimizer(found.checkpoint.folder / OPTIMIZER_FILE)
        if self.state.policy_version >= self.config.published_version:
            return found.checkpoint
        issued = self.config.published_version + 1
        self.warnings += (
            f"version {self.config.published_version} was announced but the newest intact checkpoint is "
            f"{self.state.policy_version}: issuing that one again as version {issued}",
        )
        self.state = replace(self.state, policy_version=issued, rolled_back_to=None)
        return self.save()

    def _load_trained(self, checkpoint: Checkpoint) -> None:
        path = checkpoint.folder / checkpoint.state.weights_file
        if checkpoint.state.base_digest != self._base_digest:
            told = "over another model" if checkpoint.state.base_digest and self._base_digest else "with another [lora]"
            raise BackendFailed(
                f"checkpoint {checkpoint.folder} was trained {told}; a run keeps to what it began with. Write that "
                "back, or begin a new run from an export of this one"
            )
        if self.config.lora is not None:
            load_adapter(self.model, self.config.lora, path)
        else:
            load_weights(self.model, path)

    def _advance(self, batch: TrainingBatch, done: Optimised, rate: float) -> None:
        skipped = dict(self.state.skipped)
        if done.skipped:
            skipped[done.skipped] = skipped.get(done.skipped, 0) + 1
        self.state = TrainerState(
            update=batch.update,
            policy_version=batch.policy_version + 1,
            seed=self.config.optimizer.seed,
            learning_rate=rate,
            consumed_groups=tuple(group.group_id for group in batch.groups),
            data_position=dict(batch.data_position),
            skipped=skipped,
            base_digest=self._base_digest,
        )

    def _fill(self, folder: Path) -> None:
        save_tensors(self._optimizer_tensors(), folder / OPTIMIZER_FILE)
        if self.config.lora is not None:
            save_adapter(self.model, self.config.lora, folder / ADAPTER_FILE)
            return
        save_weights(self.model, folder / WEIGHTS_FILE)
        if self.config.publish_precision == "bfloat16":
            path = folder / PUBLISHED_FILE
            path.parent.mkdir()
            save_weights(self.model, path, torch.bfloat16)

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        return {
            f"{moment}/{name}": self._optimizer.state[parameter][moment]
            for name, parameter in self.model.named_parameters()
            for moment in _MOMENTS
            if moment in self._optimizer.state.get(parameter, {})
        }

    def _load_optimizer(self, path: Path) -> None:
        stored = load_tensors(path)
        for name, parameter in self.model.named_parameters():
            entries = {m: stored[f"{m}/{name}"] for m in _MOMENTS if f"{m}/{name}" in stored}
            if entries:
                # AdamW keeps its step counts on the CPU.
                self._optimizer.state[parameter] = {
                    m: tensor if m == "step" else tensor.to(parameter.device) for m, tensor in entries.items()
                }
