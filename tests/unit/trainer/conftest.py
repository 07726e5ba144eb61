"""A tiny real model, and builders for batches."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echo_coordinator.trainer.batch import Group, Member, TrainingBatch
from echo_coordinator.trainer.settings import TrainerConfig
from echo_swarm.codec import pack_f32, pack_u32

VOCABULARY = 32
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "attention_dropout": 0.1,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration and no weights: they are drawn from the seed."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture
def config(model_folder: Path, tmp_path: Path) -> Callable[..., TrainerConfig]:
    """Builds a configuration; `objective` and `optimizer` are dicts."""

    def build(*, optimizer: dict[str, Any] | None = None, folder: str = "checkpoints", **values: Any) -> TrainerConfig:
        tuned = {"learning_rate": 1e-3, "threads": 1, "device": "cpu", **(optimizer or {})}
        return TrainerConfig.model_validate(
            {"model_folder": model_folder, "checkpoint_folder": tmp_path / folder, "optimizer": tuned, **values}
        )

    return build


@pytest.fixture
def member() -> Callable[..., Member]:
    """Builds a member of `length` tokens that follow from `start`."""

    def build(
        reward: float | None = 0.0,
        *,
        length: int = 4,
        start: int = 5,
        logprob: float = -3.0,
        version: int = 0,
        **values: Any,
    ) -> Member:
        given: dict[str, Any] = {
            "prompt_ids": pack_u32([1, 2, 3]),
            "token_ids": pack_u32([(start + 3 * index) % VOCABULARY for index in range(length)]),
            "logprobs": pack_f32([logprob] * length),
            "reward": reward,
            "oldest_version": version,
            "newest_version": version,
            "backend": "torch",
            "precision": "float32",
            "peer_id": "peer-1",
            "finish_reason": "stop",
        }
        return Member(**{**given, **values})

    return build


@pytest.fixture
def batch() -> Callable[..., TrainingBatch]:
    """Builds a batch out of groups, each a list of members."""

    def build(*groups: list[Member], update: int = 1, version: int | None = None, **values: Any) -> TrainingBatch:
        return TrainingBatch(
            update=update,
            policy_version=update - 1 if version is None else version,
            groups=tuple(Group(group_id=100 * update + index, members=tuple(g)) for index, g in enumerate(groups)),
            **values,
        )

    return build
