"""Small random models for the checks of devices, and what transformers computes for them in float32 on the CPU.

Their logits are spread out, so that a mistake (old weights, a shifted position, a forgotten temperature) stands out
from rounding.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from echo_node.backends.base import PolicyFiles
from echo_swarm.manifest import sha256

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
LARGE: dict[str, Any] = {
    **SMALL,
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
"""The shape of SmolLM2-135M, for figures of speed: they do not depend on what the weights are."""


@cache
def reference(seed: int) -> Any:
    """Return the small model of a seed, float32 on the CPU."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SMALL), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.15, generator=generator)
    return model


def expected_logprobs(seed: int, prompt: Sequence[int], completion: Sequence[int], temperature: float) -> torch.Tensor:
    """Return log-probabilities [len(completion)] of a completion under the model of a seed."""
    ids = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        logits = reference(seed)(ids).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)


def write_folder(folder: Path, seed: int) -> Path:
    """Write the small model as a model folder for the trainer."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SMALL), encoding="utf-8")
    _save(reference(seed), folder / "model.safetensors")
    return folder


def write_policy(folder: Path, seed: int, version: int) -> PolicyFiles:
    """Write the small model of a seed as a version for backends. Its last id ends a completion."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    _save(reference(seed), path)
    return _policy(path, SMALL, version, max_prompt_tokens=96)


def write_large(folder: Path) -> PolicyFiles:
    """Write a model of LARGE with random weights, as a folder for the trainer and a version for backends at once."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LARGE), encoding="utf-8")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LARGE), dtype=torch.float32)
    _save(model, folder / "model.safetensors")
    return _policy(folder / "model.safetensors", LARGE, 0, max_prompt_tokens=256)


def _save(model: Any, path: Path) -> None:
    save_file({name: tensor.detach().clone() for name, tensor in model.named_parameters()}, path)


def _policy(path: Path, config: dict[str, Any], version: int, *, max_prompt_tokens: int) -> PolicyFiles:
    return PolicyFiles(
        policy_version=version,
        artifact=path,
        artifact_digest=sha256(path.read_bytes()),
        model_config_json=json.dumps(config),
        end_token_ids=(config["vocab_size"] - 1,),
        vocabulary_size=config["vocab_size"],
        max_prompt_tokens=max_prompt_tokens,
        max_completion_tokens=64 if config is SMALL else 256,
    )
