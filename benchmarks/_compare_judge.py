"""Held-out accuracy of saved weights, by one code for every side of `compare_trl`: transformers' greedy decoding.

    python -m benchmarks._compare_judge JOB.json

The job names the model folder, the prompts, the environment and, by version, the file of its weights; the answer goes
to JOB's folder as accuracy.json. Neither TRL's nor the swarm's sampling code takes part.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from echo_coordinator.environments.base import Split
from echo_coordinator.environments.registry import open_environment
from echo_coordinator.model_folder import read_facts
from echo_coordinator.scoring.tokenizer import PromptTokenizer
from echo_coordinator.trainer.model import load_model, load_weights

AT_ONCE = 256
"""Prompts decoded together."""


def main() -> None:
    """Judge every version of the job named on the command line."""
    path = Path(sys.argv[1])
    job: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    folder = Path(job["model"])
    facts = read_facts(folder)
    tokenizer = PromptTokenizer(folder, facts.end_token_ids)
    environment = open_environment(job["environment"]["name"], job["environment"]["settings"])
    rows = [json.loads(line) for line in Path(job["held_out"]).read_text(encoding="utf-8").splitlines()]
    model = load_model(folder, device=torch.device("cpu"), seed=0)
    accuracy: dict[str, float] = {}
    for version, weights in job["weights"].items():
        load_weights(model, Path(weights))
        completions = _greedy(model, [row["prompt_ids"] for row in rows], job["max_tokens"], facts.end_token_ids)
        rewards = [
            environment.reward(Split.EVAL, row["index"], tokenizer.decode(ids))
            for row, ids in zip(rows, completions, strict=True)
        ]
        accuracy[version] = sum(rewards) / len(rewards)
    (path.parent / "accuracy.json").write_text(json.dumps(accuracy), encoding="utf-8")


@torch.no_grad()
def _greedy(model: Any, prompts: list[list[int]], max_tokens: int, end_ids: tuple[int, ...]) -> list[list[int]]:
    """Return each prompt's greedy completion, the end token and padding behind it left out."""
    found: list[list[int]] = []
    for start in range(0, len(prompts), AT_ONCE):
        piece = prompts[start : start + AT_ONCE]
        width = max(len(ids) for ids in piece)
        padding = [[end_ids[0]] * (width - len(ids)) for ids in piece]
        tokens = torch.tensor([pad + ids for pad, ids in zip(padding, piece, strict=True)])
        mask = torch.tensor([[0] * len(pad) + [1] * len(ids) for pad, ids in zip(padding, piece, strict=True)])
        output = model.generate(
            input_ids=tokens,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=list(end_ids),
            pad_token_id=end_ids[0],
        )
        found += [_until_end(row, end_ids) for row in output[:, width:].tolist()]
    return found


def _until_end(ids: list[int], end_ids: tuple[int, ...]) -> list[int]:
    end = next((place for place, token in enumerate(ids) if token in end_ids), len(ids))
    return ids[:end]


if __name__ == "__main__":
    main()
