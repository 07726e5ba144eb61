"""New weights in a running vLLM: in place, completely, and never answered by what was cached before."""

import json
from pathlib import Path

import anyio
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from echo_node.backends.base import Completion, FailedRequest, FailureCode, LoadRefused, PolicyFiles
from echo_node.backends.child import ChildBackend
from tests.backends.vllm.support import (
    CONFIGS,
    complete,
    expected_logprobs,
    greedy_completion,
    request,
    run,
    write_policy,
)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("patiently")]

PROMPT = (9, 8, 2, 6) * 20
"""Two and a half blocks of the CPU's cache: the second completion of a group reads the first two from it."""


def greedy(request_id: int) -> object:
    return request(request_id, prompt_ids=PROMPT, temperature=0.0, max_tokens=12)


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
async def test_each_of_several_swaps_takes_and_the_cache_of_old_weights_never_answers(
    backend: ChildBackend, folder: Path, kind: str
) -> None:
    """The same prompt before and after: keys and values of old weights would change the log-probabilities."""
    worst, answers, sizes = 0.0, [], []
    for version in range(6):
        policy = write_policy(folder / f"{kind}-{version}", kind, version=version, seed=1 + version % 3)
        await backend.load(policy)
        done = await complete(backend, [greedy(0), *(request(i, prompt_ids=PROMPT, max_tokens=8) for i in range(1, 9))])
        assert done[0].token_ids.tolist() == greedy_completion(kind, 1 + version % 3, PROMPT, 12)
        answers.append(done[0].token_ids.tobytes())
        for i in range(1, 9):
            expected = expected_logprobs(kind, 1 + version % 3, PROMPT, done[i].token_ids.tolist(), 1.0)
            worst = max(worst, (torch.tensor(done[i].logprobs) - expected).abs().max().item())
            assert (done[i].oldest_version, done[i].newest_version) == (version, version)
        sizes.append(psutil.Process(backend.pid).memory_info().rss)
    print(f"largest difference over swaps, {kind}: {worst:.2e}; resident MiB {[size >> 20 for size in sizes]}")
    assert worst <= 1e-3
    assert answers[:3] == answers[3:] and len(set(answers)) == 3
    # Field case 53.
    assert sizes[-1] <= 1.1 * sizes[1]


async def test_running_completions_finish_on_the_old_weights(backend: ChildBackend, folder: Path) -> None:
    old = write_policy(folder / "old", version=10)
    new = write_policy(folder / "new", version=11, seed=2)
    await backend.load(old)
    expected = await complete(backend, [request(i, max_tokens=40) for i in range(20)])
    async with anyio.create_task_group() as tasks:
        await backend.submit([request(i, max_tokens=40) for i in range(20)])
        tasks.start_soon(backend.load, new)
        await anyio.wait_all_tasks_blocked()
        await backend.submit([request(100 + i) for i in range(5)])
        outcomes = [await backend.next_outcome() for _ in range(25)]
    for outcome in outcomes:
        assert isinstance(outcome, Completion)
        if outcome.request_id < 100:
            assert outcome.newest_version == 10
            assert outcome.token_ids == expected[outcome.request_id].token_ids
        else:
            assert (outcome.oldest_version, outcome.artifact_digest) == (11, new.artifact_digest)


async def test_another_architecture_starts_vllm_anew_in_the_same_child(backend: ChildBackend, folder: Path) -> None:
    pid = backend.pid
    for kind in ("llama", "qwen3", "llama"):
        await backend.load(write_policy(folder / f"{kind}-again", kind))
        done = await complete(backend, [greedy(0)])
        assert done[0].token_ids.tolist() == greedy_completion(kind, 1, PROMPT, 12)
    assert backend.pid == pid


def without(policy: PolicyFiles) -> None:
    tensors = load_file(policy.artifact)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, policy.artifact)


def misshapen(policy: PolicyFiles) -> None:
    tensors = load_file(policy.artifact)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 63)
    save_file(tensors, policy.artifact)


def cut_short(policy: PolicyFiles) -> None:
    policy.artifact.write_bytes(policy.artifact.read_bytes()[:-100])


def poisoned(policy: PolicyFiles) -> None:
    tensors = load_file(policy.artifact)
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, policy.artifact)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without, "the file lacks 1 tensor.*model.layers.1.self_attn.k_proj.weight"),
        (misshapen, r"model.layers.0.mlp.up_proj.weight has shape \(96, 63\), the model wants \(96, 64\)"),
        (cut_short, r"cannot read model\.safetensors"),
        (poisoned, "self-test: .*log-probability of nan"),
    ],
)
async def test_bad_weights_are_refused_with_the_reason_and_good_ones_follow(
    backend: ChildBackend, folder: Path, damage: object, message: str
) -> None:
    """Without our own check vLLM would keep the old key projection, fused into one tensor with its neighbours."""
    await backend.load(write_policy(folder / "good", version=20))
    bad = write_policy(folder / f"bad-{message[:8]}", version=21)
    damage(bad)  # type: ignore[operator]
    with pytest.raises(LoadRefused, match=f"version 21: .*{message}"):
        await backend.load(bad)
    outcome = (await run(backend, [request(0)]))[0]
    assert isinstance(outcome, FailedRequest) and outcome.code is FailureCode.NO_POLICY
    await backend.load(write_policy(folder / "good", version=22))
    done = await complete(backend, [greedy(0)])
    assert done[0].token_ids.tolist() == greedy_completion("qwen3", 1, PROMPT, 12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_prompt_tokens": 250}, "the run allows 314 tokens, the model's context is 256"),
        ({"vocabulary_size": 65}, "vocabulary of 65 is larger than the model's 64"),
        ({"model_config_json": json.dumps({**CONFIGS["qwen3"], "model_type": "nonesuch"})}, "nonesuch"),
        ({"model_config_json": json.dumps({**CONFIGS["qwen3"], "quantization_config": {"a": 1}})}, "quantised"),
        ({"model_config_json": json.dumps({**CONFIGS["qwen3"], "architectures": ["Nonesuch"]})}, "Nonesuch"),
    ],
)
async def test_a_policy_that_does_not_fit_the_engine_is_refused(
    backend: ChildBackend, folder: Path, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(LoadRefused, match=message):
        await backend.load(write_policy(folder / "odd", version=30, **changes))
