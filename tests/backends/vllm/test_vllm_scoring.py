"""Log-probabilities of completions that vLLM did not make."""

from pathlib import Path

import pytest
import torch

from echo_node.backends.base import ScoreRequest
from echo_node.backends.child import ChildBackend
from tests.backends.vllm.support import END, complete, expected_logprobs, request, write_policy

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("patiently")]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
async def test_scores_are_transformers_log_probabilities_also_after_a_swap(
    backend: ChildBackend, folder: Path, temperature: float
) -> None:
    items = (((9, 8, 2, 6) * 9, (4, 40, 41, 3, END)), ((2,), (60,)), ((9, 8, 2, 6) * 9, (5, 5, 5)))
    for seed in (1, 2):
        await backend.load(write_policy(folder / f"score-{seed}", seed=seed, version=seed))
        scores = await backend.score(ScoreRequest(items=items, temperature=temperature))
        assert scores.policy_version == seed
        for (prompt, completion), found in zip(items, scores.logprobs, strict=True):
            expected = expected_logprobs("qwen3", seed, prompt, list(completion), temperature)
            assert (torch.tensor(found) - expected).abs().max() <= 1e-3


async def test_scoring_a_completion_gives_what_sampling_it_recorded(backend: ChildBackend, folder: Path) -> None:
    await backend.load(write_policy(folder / "score-again"))
    done = (await complete(backend, [request(0, max_tokens=20)]))[0]
    item = (request(0).prompt_ids, tuple(done.token_ids))
    scores = await backend.score(ScoreRequest(items=(item,), temperature=1.0))
    assert scores.logprobs[0].tolist() == pytest.approx(done.logprobs.tolist(), abs=1e-4)
