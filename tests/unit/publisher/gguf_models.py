"""Small random models of each architecture that can be written as GGUF."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 50_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_THETA = {"rope_type": "default", "rope_theta": 50_000.0}
_LARGE_HEADS = {"head_dim": 32}
_BIASES = {"attention_bias": True, "mlp_bias": True}

MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _THETA}),
    "llama, tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama, biases, large heads": (LlamaForCausalLM, LlamaConfig, {**_BIASES, **_LARGE_HEADS}),
    "llama, llama3 rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"rope_parameters": _THETA}),
    "qwen2, tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"rope_parameters": _THETA, **_LARGE_HEADS}),
    "qwen3, tied": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True, "head_dim": 16}),
}
"""Name → (class, config class, what differs from SIZES)."""


def save_model(name: str, folder: Path, *, dtype: torch.dtype = torch.float32, **changes: object) -> torch.nn.Module:
    """Save the model of that name into `folder`, every tensor random (biases and norms too), and return it."""
    model_class, config_class, differences = MODELS[name]
    generator = torch.Generator().manual_seed(7)
    model = model_class(config_class(**{**SIZES, **differences, **changes}))
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            spread = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * spread if "norm" in path else 0.15 * spread)
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    return model
