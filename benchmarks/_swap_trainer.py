"""What stands in for the trainer and the environment of the version swap benchmark: made-up versions, one when asked.

next_version() ─► (an update waits for it) ─► new weights ─► durable checkpoint ─► the coordinator publishes
"""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import anyio
import torch
from anyio import to_thread
from safetensors.torch import load_file, save_file

from benchmarks._made_up_session import MadeUpSession
from echo_coordinator.scoring.items import Prompt
from echo_coordinator.trainer.settings import LoraSettings, TrainerConfig
from echo_coordinator.trainer.state import (
    ADAPTER_FILE,
    OPTIMIZER_FILE,
    WEIGHTS_FILE,
    Checkpoint,
    Checkpoints,
    TrainerState,
)
from echo_swarm.checkpoint.adapter_file import CONFIG_KEY, adapter_config, tensor_names
from echo_swarm.checkpoint.read_back import file_digest
from echo_swarm.codec import pack_u32
from tests.swarm.support.stand_ins import StandInScorers, weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NOISE = 1e-3
"""Share by which each row of a matrix is scaled from version to version: every piece of the file is another."""
KEPT = 2


class Versions:
    """Makes the files of one run's versions from a model folder.

    Args:
        model: Hugging Face folder.
        precision: of the published whole model.
        lora: of the adapter; None for versions of all weights.

    """

    def __init__(self, model: Path, *, precision: str, lora: LoraSettings | None) -> None:
        self.lora = lora
        loaded = load_file(model / "model.safetensors")
        self._tensors = {name: tensor.to(DTYPES[precision]) for name, tensor in loaded.items()}

    def write_base(self, path: Path) -> None:
        """Write the model itself."""
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(self._tensors, path, metadata={"format": "pt"})

    def write(self, version: int, path: Path) -> None:
        """Write a version: all weights, or an adapter."""
        generator = torch.Generator().manual_seed(version)
        if self.lora is not None:
            return self._write_adapter(self.lora, generator, path)
        changed: dict[str, torch.Tensor] = {}
        for name, tensor in self._tensors.items():
            noise = torch.randn(len(tensor), *[1] * (tensor.ndim - 1), generator=generator)
            changed[name] = tensor * (1 + NOISE * noise).to(tensor.dtype)
        save_file(changed, path, metadata={"format": "pt"})

    def _write_adapter(self, lora: LoraSettings, generator: torch.Generator, path: Path) -> None:
        content: dict[str, torch.Tensor] = {}
        for name, tensor in self._tensors.items():
            layer = name.removesuffix(".weight")
            if layer.rpartition(".")[2] in lora.targets:
                first, second = tensor_names(layer)
                content[first] = 0.02 * torch.randn(lora.rank, tensor.shape[1], generator=generator)
                content[second] = 0.02 * torch.randn(tensor.shape[0], lora.rank, generator=generator)
        config = adapter_config(rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
        save_file(content, path, metadata={CONFIG_KEY: json.dumps(config, sort_keys=True)})


class SwapTrainer:
    """A trainer whose updates wait until the benchmark asks for the next version."""

    def __init__(self, versions: Versions) -> None:
        self.versions = versions
        self._asked = anyio.Semaphore(0)

    def next_version(self) -> None:
        """Let the next update end."""
        self._asked.release()

    @asynccontextmanager
    async def open(self, config: TrainerConfig) -> AsyncGenerator[MadeUpSession]:
        """Begin with version 0 (an `OpenTrainer`)."""
        checkpoints = Checkpoints(config.checkpoint_folder)
        base_digest = ""
        if self.versions.lora is not None:
            base = config.checkpoint_folder / "base" / WEIGHTS_FILE
            await to_thread.run_sync(self.versions.write_base, base)
            base_digest = (await to_thread.run_sync(file_digest, base)).hex()
        state = TrainerState(base_digest=base_digest)
        first = await to_thread.run_sync(_write, checkpoints, self.versions, state)

        async def following(state: TrainerState) -> Checkpoint:
            await self._asked.acquire()
            return await to_thread.run_sync(_write, checkpoints, self.versions, state)

        yield MadeUpSession(following, first)


class MadeUpPrompts(StandInScorers):
    """Random prompts of one length, and rewards by the toss of a coin."""

    def __init__(self, *, tokens: int, vocabulary: int) -> None:
        super().__init__()
        self._tokens = tokens
        self._vocabulary = vocabulary

    async def prompts(self, split: str, start: int, count: int) -> list[Prompt]:
        made: list[Prompt] = []
        for index in range(start, start + count):
            random = Random(index)
            ids = [random.randrange(self._vocabulary // 2, self._vocabulary) for _ in range(self._tokens)]
            made.append(Prompt(index=index, prompt_ids=pack_u32(ids), text=""))
        return made


def _write(checkpoints: Checkpoints, versions: Versions, state: TrainerState) -> Checkpoint:
    def fill(folder: Path) -> None:
        versions.write(state.policy_version, folder / (ADAPTER_FILE if versions.lora else WEIGHTS_FILE))
        (folder / OPTIMIZER_FILE).write_bytes(weights(0, 8))

    checkpoint = checkpoints.write(state, fill)
    checkpoints.prune(KEPT)
    return checkpoint
