"""Log-probabilities against transformers' own forward pass over the same ids, for each precision of the file."""

import json
import os
from pathlib import Path

import pytest
import torch

from echo_node.backends.base import Completion
from echo_node.backends.llama_cpp_engine import LlamaCppEngine
from echo_node.backends.options import LlamaCppOptions
from tests.backends.llama_cpp.support import complete, write_gguf_policy
from tests.unit.backends.support import END, VOCABULARY, reference_model, request

PROMPTS = {0: (3, 1, 4, 1, 5), 1: (2, 7, 1), 2: (9,) * 20}
LARGEST = {"f32": 1e-3, "f16": 6e-2, "bf16": 6e-1, "q8_0": 8e-1, "q4_0": 1e1}
"""Absolute, of any token. The reference has logits spread over ±20, which magnifies what rounding does to weights."""


def expected(prompt: tuple[int, ...], completion: Completion, temperature: float) -> torch.Tensor:
    """Return log-probabilities [completion, vocabulary] at `temperature`."""
    ids = torch.tensor([[*prompt, *completion.token_ids]])
    with torch.no_grad():
        logits = reference_model(1)(ids).logits[0, len(prompt) - 1 : -1, :VOCABULARY]
    return torch.log_softmax(logits.double() / temperature, -1)


def sample(folder: Path, precision: str, temperature: float, **options: object) -> dict[int, Completion]:
    engine = LlamaCppEngine(LlamaCppOptions.model_validate({"batch": 8, "threads": 1, **options}))
    engine.load(write_gguf_policy(folder, precision=precision))
    requests = [request(i, prompt_ids=PROMPTS[i % 3], temperature=temperature, max_tokens=40) for i in range(48)]
    done = complete(engine, requests)
    engine.close()
    return done


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("precision", ["f32", "f16", "bf16", "q8_0", "q4_0"])
def test_logprobs_are_those_of_transformers(tmp_path: Path, precision: str, temperature: float) -> None:
    differences: list[float] = []
    for i, completion in sample(tmp_path, precision, temperature).items():
        logp = expected(PROMPTS[i % 3], completion, temperature)
        chosen = logp.gather(1, torch.tensor(completion.token_ids.tolist())[:, None]).squeeze(1)
        differences += (torch.tensor(completion.logprobs.tolist(), dtype=torch.float64) - chosen).abs().tolist()
    largest, mean = max(differences), sum(differences) / len(differences)
    print(f"{precision}, temperature {temperature}: largest {largest:.2e}, mean {mean:.2e}, {len(differences)} tokens")
    if folder := os.environ.get("ECHO_RECORD_DIFFERENCES"):
        path = Path(folder) / f"{precision}-{temperature}.json"
        path.write_text(json.dumps({"largest": largest, "mean": mean, "tokens": len(differences)}) + "\n")
    assert largest <= LARGEST[precision]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_that_comparison_would_see_the_usual_mistakes(tmp_path: Path, temperature: float) -> None:
    """Field case 78: a shift by one, a temperature left out, an end token without its log-probability."""
    shifted: list[float] = []
    other_temperature: list[float] = []
    ends = 0
    for i, completion in sample(tmp_path, "f32", temperature).items():
        ids = torch.tensor(completion.token_ids.tolist())[:, None]
        given = torch.tensor(completion.logprobs.tolist(), dtype=torch.float64)
        logp = expected(PROMPTS[i % 3], completion, temperature).gather(1, ids).squeeze(1)
        shifted += (given[1:] - logp[:-1]).abs().tolist()
        wrong = 1.0 if temperature != 1.0 else 0.6
        other = expected(PROMPTS[i % 3], completion, wrong).gather(1, ids).squeeze(1)
        other_temperature += (given - other).abs().tolist()
        if completion.token_ids[-1] == END:
            ends += 1
            assert given[-1] < 0 and abs(given[-1] - logp[-1]) <= 1e-3
    assert max(shifted) > 1.0 and max(other_temperature) > 0.1
    assert ends > 5


def test_a_quantised_key_value_memory_is_near_and_says_nothing_wrong(tmp_path: Path) -> None:
    done = sample(tmp_path, "f32", 1.0, kv="f16")
    for i, completion in done.items():
        logp = expected(PROMPTS[i % 3], completion, 1.0)
        chosen = logp.gather(1, torch.tensor(completion.token_ids.tolist())[:, None]).squeeze(1)
        assert completion.logprobs.tolist() == pytest.approx(chosen.tolist(), abs=5e-2)
