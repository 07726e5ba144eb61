"""Small random models of the architectures that runs use, as files and as transformers has them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from echo_node.backends.base import Backend, Completion, GenerationRequest, Outcome, PolicyFiles
from echo_swarm.manifest import sha256
from tests.unit.backends.support import request

BATCH = 8
END = 7
"""Models: one with tied embeddings and 64 rows, one with a head of its own and 61, which vLLM pads to 64."""
VOCABULARY = 61
"""Below the 64 rows of the embedding: the rest is padding and must never be sampled."""
_COMMON = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True, **_COMMON},
    "llama": {"model_type": "llama", "tie_word_embeddings": False, **_COMMON, "vocab_size": 61},
}


@cache
def reference_model(kind: str, seed: int) -> Any:
    """The model as transformers builds it, its logits spread out so that mistakes show."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[kind]), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.2, generator=generator)
    return model


def write_policy(folder: Path, kind: str = "qwen3", *, version: int = 0, seed: int = 1, **changes: Any) -> PolicyFiles:
    """Write the file of `reference_model(kind, seed)`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.safetensors"
    parameters = reference_model(kind, seed).named_parameters()
    save_file({name: tensor.detach().clone() for name, tensor in parameters}, path)
    fields = {
        "policy_version": version,
        "artifact": path,
        "artifact_digest": sha256(path.read_bytes()),
        "model_config_json": json.dumps(CONFIGS[kind]),
        "end_token_ids": (END,),
        "vocabulary_size": VOCABULARY,
        "max_prompt_tokens": 96,
        "max_completion_tokens": 64,
    }
    return PolicyFiles(**{**fields, **changes})


def greedy_completion(kind: str, seed: int, prompt: tuple[int, ...], tokens: int) -> list[int]:
    """What transformers' arg max continues with, the end token included."""
    ids = list(prompt)
    while len(ids) < len(prompt) + tokens and END not in ids[len(prompt) :]:
        with torch.no_grad():
            logits = reference_model(kind, seed)(torch.tensor([ids])).logits[0, -1, :VOCABULARY]
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def expected_logprobs(kind: str, seed: int, prompt: tuple[int, ...], ids: "list[int]", temperature: float) -> Any:
    """transformers' float32 log-probabilities of a completion, ids beyond the vocabulary left out."""
    tokens = torch.tensor([[*prompt, *ids]])
    with torch.no_grad():
        logits = reference_model(kind, seed)(tokens).logits[0, len(prompt) - 1 : -1, :VOCABULARY]
    return torch.log_softmax(logits / temperature, -1).gather(1, tokens[0, len(prompt) :, None]).squeeze(1)


async def run(backend: Backend, requests: "list[GenerationRequest]") -> dict[int, Outcome]:
    await backend.submit(requests)
    outcomes = [await backend.next_outcome() for _ in requests]
    return {outcome.request_id: outcome for outcome in outcomes}


async def complete(backend: Backend, requests: "list[GenerationRequest]") -> dict[int, Completion]:
    outcomes = await run(backend, requests)
    assert all(isinstance(outcome, Completion) for outcome in outcomes.values()), outcomes
    return outcomes  # type: ignore[return-value]


__all__ = ["request"]
