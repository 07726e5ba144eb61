"""Makes versions for `benchmarks.deltas`: real AdamW steps of a language model, each published precision as a file.

Run in a process of its own, so that the trainer's memory is gone before anything is measured:

    python -m benchmarks._delta_versions '{"model": F, "out": F, "lr": 1e-6, "versions": 11, "precision": "bfloat16"}'

Prints a line for each version that is there.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

ROWS, TOKENS = 2, 128
"""Of the batch of a step."""
CLIP = 1.0


def main() -> None:
    """Train on made-up ids with a pattern in them; write version n before step n."""
    asked = json.loads(sys.argv[1])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=asked["lr"], weight_decay=0.0)
    precision = getattr(torch, asked["precision"])
    vocabulary = model.config.vocab_size
    for version in range(asked["versions"]):
        tensors = {name: p.detach().to(precision).contiguous() for name, p in model.named_parameters()}
        save_file(tensors, Path(asked["out"]) / f"{version}.safetensors")
        print(version, flush=True)
        # Ids that repeat with a short period: something to learn, with a gradient for every weight.
        start = torch.randint(0, vocabulary, (ROWS, 1))
        ids = (start + torch.arange(TOKENS) % 7 * torch.randint(1, 50, (ROWS, 1))) % vocabulary
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()


if __name__ == "__main__":
    main()
