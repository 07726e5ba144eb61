"""A small random Qwen3 over the demo's characters, as a folder that `init` takes."""

from pathlib import Path
from typing import Any

CONTEXT_TOKENS = 64


def write_model(folder: Path, *, seed: int = 0, **changes: Any) -> None:
    """Write config, weights, generation config and a fast tokenizer: about 20,000 parameters.

    `changes` are fields of the config.
    """
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    from echo_coordinator.demo.tokenizer import BOS_ID, EOS_ID, PAD_ID, VOCABULARY, save_tokenizer

    torch.manual_seed(seed)
    fields: dict[str, Any] = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**{**fields, **changes}))
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    save_tokenizer(folder)
