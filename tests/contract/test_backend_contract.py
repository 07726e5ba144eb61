"""What holds for every backend: each engine inside this process and inside a child.

Engines whose libraries are not installed everywhere have a module of their own in tests/backends, which imports these
tests and replaces the fixtures `running` and `write`.
"""

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest
import torch

from echo_node.backends.base import (
    Backend,
    CannotScore,
    Completion,
    FailedRequest,
    FailureCode,
    LoadRefused,
    Outcome,
    PolicyFiles,
    ScoreRequest,
    Scores,
)
from echo_node.backends.child import start_backend
from echo_node.backends.inline import InlineBackend
from echo_node.backends.options import OPTIONS, ScriptedOptions, TorchOptions
from echo_node.backends.scripted import ScriptedEngine
from echo_node.backends.torch_engine import TorchEngine
from echo_swarm.trajectory import FinishReason
from tests.unit.backends.support import END, VOCABULARY, reference_model, request, write_policy

pytestmark = pytest.mark.anyio

Write = Callable[..., PolicyFiles]
BATCH = 4
SCRIPTED = ScriptedOptions(batch=BATCH, length=8, length_sigma=1.0, scores=True)
TORCH = TorchOptions(batch=BATCH, threads=1)


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Both event loops, each kept for the whole module, since starting a torch child takes seconds."""
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("backends")


@pytest.fixture(scope="module")
def write() -> Write:
    """Write the reference model of a seed in the form that the engine loads."""
    return write_policy


@pytest.fixture(scope="module")
def policy(folder: Path, write: Write) -> PolicyFiles:
    return write(folder / "0", version=0, seed=1)


@pytest.fixture(scope="module")
def newer(folder: Path, write: Write) -> PolicyFiles:
    return write(folder / "1", version=1, seed=2)


@pytest.fixture(scope="module", params=["scripted", "torch", "scripted child", "torch child"])
async def running(request: pytest.FixtureRequest, folder: Path) -> AsyncGenerator[Backend]:
    match request.param:
        case "scripted":
            yield InlineBackend(ScriptedEngine(SCRIPTED))
        case "torch":
            yield InlineBackend(TorchEngine(TORCH))
        case name:
            options = SCRIPTED if name.startswith("scripted") else TORCH
            async with start_backend(options, log_path=folder / "child.log", nice=0) as backend:
                yield backend


@pytest.fixture
async def backend(running: Backend, policy: PolicyFiles) -> Backend:
    with anyio.fail_after(120):
        await running.load(policy)
    return running


async def collect(backend: Backend, count: int) -> dict[int, Outcome]:
    with anyio.fail_after(120):
        outcomes = [await backend.next_outcome() for _ in range(count)]
    return {outcome.request_id: outcome for outcome in outcomes}


async def complete(backend: Backend, requests: Sequence[object]) -> dict[int, Completion]:
    await backend.submit(requests)  # type: ignore[arg-type]
    outcomes = await collect(backend, len(requests))
    assert all(isinstance(outcome, Completion) for outcome in outcomes.values()), outcomes
    return outcomes  # type: ignore[return-value]


async def let_others_run(backend: Backend) -> None:
    if isinstance(backend, InlineBackend):
        # It works whenever it is waited for, so that its tasks are never all blocked.
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
    else:
        await anyio.wait_all_tasks_blocked()


def content(completions: dict[int, Completion]) -> list[tuple[int, list[int], list[float]]]:
    return sorted((i, c.token_ids.tolist(), c.logprobs.tolist()) for i, c in completions.items())


async def test_every_completion_is_well_formed_and_names_its_policy(backend: Backend, policy: PolicyFiles) -> None:
    done = await complete(backend, [request(i, max_tokens=1 + i % 12) for i in range(40)])
    assert sorted(done) == list(range(40))
    for i, completion in done.items():
        ids, logprobs = completion.token_ids, completion.logprobs
        assert 1 <= len(ids) == len(logprobs) <= 1 + i % 12
        assert max(ids) < VOCABULARY
        assert all(math.isfinite(value) and value <= 0 for value in logprobs)
        assert (completion.oldest_version, completion.newest_version) == (0, 0)
        assert completion.artifact_digest == policy.artifact_digest


async def test_an_end_token_comes_last_with_its_logprob_and_only_when_stopped(backend: Backend) -> None:
    """Field case 39."""
    done = await complete(backend, [request(i, max_tokens=20) for i in range(60)])
    reasons = {completion.finish_reason for completion in done.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    for completion in done.values():
        stopped = completion.finish_reason is FinishReason.STOP
        assert (completion.token_ids[-1] == END) == stopped
        assert END not in completion.token_ids[:-1]
        assert stopped or len(completion.token_ids) == 20


async def test_a_seed_reproduces_and_two_seeds_differ(backend: Backend) -> None:
    """Field cases 80 and 81."""
    requests = [request(i, seed=10 + i) for i in range(6)]
    first, again = await complete(backend, requests), await complete(backend, requests)
    assert content(first) == content(again)
    assert len({completion.token_ids.tobytes() for completion in first.values()}) > 1
    large = await complete(backend, [request(0, seed=2**63 - 1), request(1, seed=2**63 - 2)])
    assert large[0].token_ids != large[1].token_ids


async def test_greedy_ignores_the_seed_and_records_zeros(backend: Backend) -> None:
    done = await complete(backend, [request(i, temperature=0.0, seed=i) for i in range(3)])
    assert len({completion.token_ids.tobytes() for completion in done.values()}) == 1
    assert all(not any(completion.logprobs) for completion in done.values())


async def test_running_sequences_finish_on_the_old_weights_and_later_ones_wait(
    backend: Backend, policy: PolicyFiles, newer: PolicyFiles
) -> None:
    expected = content(await complete(backend, [request(i) for i in range(10)]))
    async with anyio.create_task_group() as tasks:
        await backend.submit([request(i) for i in range(10)])
        tasks.start_soon(backend.load, newer)
        await let_others_run(backend)
        await backend.submit([request(100 + i, seed=i) for i in range(10)])
        outcomes = await collect(backend, 20)
    old = {i: outcome for i, outcome in outcomes.items() if i < 100}
    new = [outcome for i, outcome in outcomes.items() if i >= 100]
    assert content(old) == expected  # type: ignore[arg-type]
    assert {(c.oldest_version, c.newest_version, c.artifact_digest) for c in new} == {(1, 1, newer.artifact_digest)}


async def test_a_request_that_does_not_fit_is_refused_and_the_next_one_served(backend: Backend) -> None:
    """Field case 83: refused with the figures, never cut, never shifted."""
    await backend.submit([request(0, prompt_ids=(1,) * 33), request(1, max_tokens=65), request(2)])
    outcomes = await collect(backend, 3)
    for i in (0, 1):
        failed = outcomes[i]
        assert isinstance(failed, FailedRequest) and failed.code is FailureCode.TOO_LONG
        assert "32 and 64" in failed.reason
    assert isinstance(outcomes[2], Completion)


@pytest.mark.parametrize(
    "wrong", [{"prompt_ids": ()}, {"max_tokens": 0}, {"temperature": -1.0}, {"prompt_ids": (VOCABULARY,)}]
)
async def test_a_senseless_request_fails_alone(backend: Backend, wrong: dict[str, object]) -> None:
    await backend.submit([request(0, **wrong), request(1)])
    outcomes = await collect(backend, 2)
    assert isinstance(outcomes[0], FailedRequest) and outcomes[0].code is FailureCode.BAD_REQUEST
    assert isinstance(outcomes[1], Completion)


async def test_a_load_says_how_long_it_took(backend: Backend, policy: PolicyFiles) -> None:
    times = await backend.load(policy)
    assert min(times.load_s, times.first_token_s, times.rest_s) >= 0 < times.total_s
    if backend.report.backend != "scripted" and not isinstance(backend, InlineBackend):
        assert times.first_token_s > 0, "the self-test samples"


async def test_a_refused_version_leaves_the_backend_alive(
    backend: Backend, policy: PolicyFiles, folder: Path, write: Write
) -> None:
    missing = write(folder / "missing", version=9)
    missing.artifact.unlink()
    with pytest.raises(LoadRefused, match=rf"version 9: .*{missing.artifact.name}"):
        await backend.load(missing)
    await backend.submit([request(0)])
    failed = (await collect(backend, 1))[0]
    assert isinstance(failed, FailedRequest) and failed.code is FailureCode.NO_POLICY
    await backend.load(policy)
    await complete(backend, [request(0)])


@pytest.mark.parametrize("temperature", [0.6, 1.0])
async def test_logprobs_are_those_of_the_distribution_sampled_from(backend: Backend, temperature: float) -> None:
    """Against transformers' own forward pass over prompt and completion, ids beyond the vocabulary left out."""
    if backend.report.backend == "scripted":
        pytest.skip("the scripted engine has no model")
    prompts = {0: (3, 1, 4, 1, 5), 1: (2, 7, 1), 2: (9,) * 20}
    requests = [request(i, prompt_ids=prompts[i % 3], temperature=temperature) for i in range(12)]
    done = await complete(backend, requests)
    model = reference_model(1)
    for i, completion in done.items():
        prompt = prompts[i % 3]
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1, :VOCABULARY]
        expected = torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)
        assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


async def score(backend: Backend, asked: ScoreRequest) -> Scores:
    try:
        with anyio.fail_after(120):
            return await backend.score(asked)
    except CannotScore as e:
        if "cannot score" in str(e):
            pytest.skip(str(e))
        raise


@pytest.mark.parametrize("temperature", [0.6, 1.0])
async def test_scoring_a_completion_gives_what_sampling_it_recorded(
    backend: Backend, policy: PolicyFiles, temperature: float
) -> None:
    prompts = {0: (3, 1, 4, 1, 5), 1: (2, 7, 1), 2: (9,) * 20}
    requests = [request(i, prompt_ids=prompts[i % 3], temperature=temperature, max_tokens=40) for i in range(60)]
    done = await complete(backend, requests)
    assert FinishReason.STOP in {completion.finish_reason for completion in done.values()}
    items = tuple((prompts[i % 3], tuple(completion.token_ids)) for i, completion in done.items())
    scores = await score(backend, ScoreRequest(items=items, temperature=temperature))
    assert (scores.policy_version, scores.artifact_digest) == (policy.policy_version, policy.artifact_digest)
    for completion, scored in zip(done.values(), scores.logprobs, strict=True):
        assert list(scored) == pytest.approx(list(completion.logprobs), abs=1e-4)


async def test_scoring_waits_for_what_runs_and_a_load_waits_for_it(
    backend: Backend, policy: PolicyFiles, newer: PolicyFiles
) -> None:
    asked = ScoreRequest(items=(((3, 1, 4), (1, 5, 9)),), temperature=1.0)
    before = await score(backend, asked)
    found: list[Scores] = []

    async def note() -> None:
        found.append(await score(backend, asked))

    async with anyio.create_task_group() as tasks:
        await backend.submit([request(i) for i in range(10)])
        tasks.start_soon(note)
        tasks.start_soon(backend.load, newer)
        await let_others_run(backend)
        await backend.submit([request(100 + i) for i in range(10)])
        outcomes = await collect(backend, 20)
    assert all(isinstance(outcome, Completion) for outcome in outcomes.values())
    # Either before the swap or after it, and with the values of just that version.
    after = await score(backend, asked)
    assert found[0] in (before, after) and before.logprobs != after.logprobs
    assert (before.policy_version, after.policy_version) == (policy.policy_version, newer.policy_version)


async def test_what_cannot_be_scored_is_refused_and_the_next_request_served(backend: Backend) -> None:
    await score(backend, ScoreRequest(items=(((1,), (2,)),), temperature=1.0))
    too_long, outside = ((1,) * 90, (2,) * 90), ((1,), (VOCABULARY,))
    for item, temperature in ((too_long, 1.0), (outside, 1.0), (((1,), ()), 1.0), (((1,), (2,)), 0.0)):
        with pytest.raises(CannotScore):
            await backend.score(ScoreRequest(items=(item,), temperature=temperature))
    await complete(backend, [request(0)])


async def test_the_report_says_what_samples(backend: Backend) -> None:
    report = backend.report
    assert report.backend in OPTIONS
    assert report.precision in ("float32", "f32") and report.batch == BATCH
    assert report.build.startswith(report.backend)
