"""A tiny random Qwen3 model on disk, and keyword builders, for all tests of backends."""

import json
from copy import deepcopy
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from echo_node.backends.base import GenerationRequest, PolicyFiles
from echo_swarm.manifest import sha256

VOCABULARY = 61
PADDED_ROWS = 64
END = 7
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": PADDED_ROWS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


@cache
def _architecture() -> torch.nn.Module:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG), dtype=torch.float32).eval()


def reference_model(seed: int) -> torch.nn.Module:
    """The model as transformers itself builds it; its logits are spread out, so that mistakes show."""
    model = deepcopy(_architecture())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.3, generator=generator)
    return model


def write_policy(folder: Path, *, version: int = 0, seed: int = 1, **overrides: object) -> PolicyFiles:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    save_file({name: tensor.detach().clone() for name, tensor in reference_model(seed).named_parameters()}, path)
    return PolicyFiles(
        **{
            "policy_version": version,
            "artifact": path,
            "artifact_digest": sha256(path.read_bytes()),
            "model_config_json": json.dumps(CONFIG),
            "end_token_ids": (END,),
            "vocabulary_size": VOCABULARY,
            "max_prompt_tokens": 32,
            "max_completion_tokens": 64,
            **overrides,
        }
    )


def request(request_id: int, **overrides: object) -> GenerationRequest:
    return GenerationRequest(
        **{
            "request_id": request_id,
            "prompt_ids": (3, 1, 4, 1, 5),
            "max_tokens": 12,
            "temperature": 1.0,
            "seed": request_id,
            **overrides,
        }
    )
