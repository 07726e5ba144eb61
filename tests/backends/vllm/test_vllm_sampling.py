"""What the vLLM backend samples, against transformers in float32."""

import math
from pathlib import Path

import pytest
import torch

from echo_node.backends.base import FailedRequest, FailureCode
from echo_node.backends.child import ChildBackend
from echo_swarm.trajectory import FinishReason
from tests.backends.vllm.support import (
    BATCH,
    END,
    VOCABULARY,
    complete,
    expected_logprobs,
    greedy_completion,
    request,
    run,
    write_policy,
)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("patiently")]

TOLERANCE = 1e-3
PROMPTS = {0: (3, 1, 4, 1, 5), 1: (2,), 2: (9, 8, 2, 6) * 20}
"""The last one fills whole blocks of the cache, so that a group shares them."""


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
async def test_logprobs_are_those_of_the_distribution_sampled_from(
    backend: ChildBackend, folder: Path, kind: str, temperature: float
) -> None:
    """Shifted by one, without temperature, without the end token, or with padding ids: each would fail."""
    await backend.load(write_policy(folder / kind, kind))
    requests = [request(i, prompt_ids=PROMPTS[i % 3], temperature=temperature, max_tokens=40) for i in range(3 * BATCH)]
    done = await complete(backend, requests)
    worst, stopped = 0.0, 0
    for i, completion in done.items():
        ids = completion.token_ids.tolist()
        expected = expected_logprobs(kind, 1, PROMPTS[i % 3], ids, temperature)
        difference = (torch.tensor(completion.logprobs) - expected).abs()
        worst = max(worst, difference.max().item())
        stopped += completion.finish_reason is FinishReason.STOP
        # What mistakes would look like; the distributions are spread out, so that each stands out.
        if len(ids) > 5:
            plain = expected_logprobs(kind, 1, PROMPTS[i % 3], ids, 1.0)
            assert temperature == 1.0 or (plain - expected).abs().max() > 10 * TOLERANCE
            assert (expected[1:] - expected[:-1]).abs().max() > 10 * TOLERANCE
    print(f"largest difference, {kind}, temperature {temperature}: {worst:.2e}; {stopped} stopped")
    assert worst <= TOLERANCE
    assert stopped


async def test_completions_are_well_formed_and_name_their_policy(backend: ChildBackend, folder: Path) -> None:
    """Field case 39: the end token comes last, with its log-probability, and only when stopped."""
    policy = write_policy(folder / "qwen3")
    await backend.load(policy)
    done = await complete(backend, [request(i, max_tokens=1 + i % 30) for i in range(60)])
    assert sorted(done) == list(range(60))
    assert {completion.finish_reason for completion in done.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    for i, completion in done.items():
        ids = completion.token_ids
        assert 1 <= len(ids) == len(completion.logprobs) <= 1 + i % 30
        assert max(ids) < VOCABULARY and END not in ids[:-1]
        assert all(math.isfinite(value) and value <= 0 for value in completion.logprobs)
        assert (ids[-1] == END) == (completion.finish_reason is FinishReason.STOP)
        assert completion.artifact_digest == policy.artifact_digest


async def test_sampled_tokens_follow_the_probabilities(backend: ChildBackend, folder: Path) -> None:
    """First tokens of 4,000 seeds, against transformers' distribution: a sampler without its temperature fails."""
    await backend.load(write_policy(folder / "qwen3"))
    count = 4000
    done = await complete(backend, [request(i, max_tokens=1, temperature=0.6) for i in range(count)])
    seen = torch.zeros(VOCABULARY)
    for completion in done.values():
        seen[completion.token_ids[0]] += 1
    prompt = request(0).prompt_ids
    logprobs = torch.cat([expected_logprobs("qwen3", 1, prompt, [i], 0.6) for i in range(VOCABULARY)])
    distance = (seen / count - logprobs.exp()).abs().sum().item() / 2
    print(f"total variation distance: {distance:.3f}")
    assert distance < 0.06


async def test_a_seed_reproduces_and_two_seeds_differ(backend: ChildBackend, folder: Path) -> None:
    """Field cases 80 and 81."""
    await backend.load(write_policy(folder / "qwen3"))
    requests = [request(i, seed=10 + i) for i in range(6)]
    first, again = await complete(backend, requests), await complete(backend, requests)
    assert [first[i].token_ids for i in range(6)] == [again[i].token_ids for i in range(6)]
    assert len({completion.token_ids.tobytes() for completion in first.values()}) > 1
    large = await complete(backend, [request(0, seed=2**63 - 1), request(1, seed=2**63 - 2)])
    assert large[0].token_ids != large[1].token_ids


async def test_greedy_is_the_arg_max_and_records_zeros(backend: ChildBackend, folder: Path) -> None:
    await backend.load(write_policy(folder / "llama", "llama"))
    requests = [request(i, temperature=0.0, prompt_ids=PROMPTS[i], max_tokens=16) for i in range(3)]
    # Beside sampled ones, which vLLM computes in the same pass.
    done = await complete(backend, [*requests, *(request(10 + i) for i in range(3))])
    for i, prompt in PROMPTS.items():
        assert done[i].token_ids.tolist() == greedy_completion("llama", 1, prompt, 16)
        assert not any(done[i].logprobs)


async def test_what_cannot_be_sampled_fails_alone(backend: ChildBackend, folder: Path) -> None:
    """Field case 83, and a temperature that vLLM would silently raise."""
    await backend.load(write_policy(folder / "qwen3"))
    outcomes = await run(
        backend,
        [
            request(0, prompt_ids=(1,) * 97),
            request(1, prompt_ids=(VOCABULARY,)),
            request(2, temperature=0.001),
            request(3, prompt_ids=(1,) * 96, max_tokens=64),
        ],
    )
    failed = [outcomes[i] for i in range(3)]
    assert all(isinstance(outcome, FailedRequest) for outcome in failed)
    codes = [outcome.code for outcome in failed if isinstance(outcome, FailedRequest)]
    assert codes == [FailureCode.TOO_LONG, FailureCode.BAD_REQUEST, FailureCode.BAD_REQUEST]
    assert "vLLM samples at 0 or from 0.01 on" in failed[2].reason  # type: ignore[union-attr]
    assert not isinstance(outcomes[3], FailedRequest)


async def test_the_report_says_what_samples(backend: ChildBackend) -> None:
    report = backend.report
    assert (report.backend, report.precision, report.batch) == ("vllm", "float32", BATCH)
    assert report.build.startswith("vllm 0.")
