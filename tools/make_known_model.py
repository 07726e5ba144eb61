"""Write node/echo_node/backends/known_model/: `python tools/make_known_model.py`. Needs the extra `coordinator`.

A model of 20,000 numbers from a seed, as safetensors and as GGUF, and the logits that transformers computes for it in
float32. Every backend is compared with them before it takes part in a run (see `echo_node.backends.self_test`). The
numbers are of 16 bits (bfloat16), so that each file holds exactly the same ones, except the quantised file.

`expected.bin` holds float32, little endian: for each prompt 1 + VOCABULARY rows of VOCABULARY logits: after the prompt,
and after the prompt and one more id, for every id. So whatever an engine samples first and second can be compared.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from echo_coordinator.publisher.gguf.write import write_gguf

FOLDER = Path(__file__).resolve().parent.parent / "node" / "echo_node" / "backends" / "known_model"
SEED = 20_261_129
VOCABULARY = 61
"""Below the 64 rows of the embedding: the rest is padding, which must have no share of the mass."""
PROMPTS = ([3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2])
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
}
GGUF_PRECISIONS = ("f32", "q8_0")


def make_model() -> Any:
    """Return the model in float32, its logits spread out so that mistakes show."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * spread if "norm" in name else 0.3 * spread)
            parameter.copy_(parameter.to(torch.bfloat16))
    return model


def logits_after(model: Any, prompt: list[int]) -> torch.Tensor:
    """Return [1 + VOCABULARY, VOCABULARY]: after the prompt, then after the prompt and each id."""
    with torch.no_grad():
        first = model(torch.tensor([prompt])).logits[:, -1, :VOCABULARY]
        second = model(torch.tensor([[*prompt, i] for i in range(VOCABULARY)])).logits[:, -1, :VOCABULARY]
    return torch.cat([first, second])


def write(folder: Path) -> None:
    """Write all files."""
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model()
    weights = folder / "model.safetensors"
    save_file({name: p.detach().to(torch.bfloat16) for name, p in model.named_parameters()}, weights)
    weights.chmod(0o644)
    full_config = AutoConfig.for_model(**CONFIG).to_json_string()
    for precision in GGUF_PRECISIONS:
        write_gguf(weights, full_config, folder / f"model-{precision}.gguf", precision)
    logits = [logits_after(model, prompt) for prompt in PROMPTS]
    (folder / "expected.bin").write_bytes(torch.cat(logits).float().numpy().astype("<f4").tobytes())
    # So likely after the first prompt that some of a handful of completions end with it.
    end = int(logits[0][0].argmax())
    description = {"config": CONFIG, "vocabulary": VOCABULARY, "end_token_id": end, "prompts": PROMPTS}
    (folder / "known_model.json").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Write the files into the package, or elsewhere to compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    write(parser.parse_args().folder)


if __name__ == "__main__":
    main()
