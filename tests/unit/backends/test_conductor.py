"""Swap barrier and self-test, on scripted engines and on engines with one fault each."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from echo_node.backends.base import (
    Completion,
    FailedRequest,
    GenerationRequest,
    LoadTimes,
    Outcome,
    PolicyFiles,
    ScoreRequest,
)
from echo_node.backends.conductor import SCORE_PATIENCE_STEPS, Conductor, Event, LoadResult, ScoreResult
from echo_node.backends.options import ScriptedOptions
from echo_node.backends.scripted import ScriptedEngine
from echo_swarm.clock import ManualClock
from tests.unit.backends.support import request


@pytest.fixture
def policy(tmp_path: Path) -> PolicyFiles:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"never read")
    return PolicyFiles(
        policy_version=0,
        artifact=path,
        artifact_digest=bytes(32),
        model_config_json="{}",
        end_token_ids=(7,),
        vocabulary_size=61,
        max_prompt_tokens=32,
        max_completion_tokens=64,
    )


def slow(clock: ManualClock) -> Conductor:
    options = ScriptedOptions(batch=2, mean_s=1.0, sigma=0.0)
    return Conductor(ScriptedEngine(options, now=clock.monotonic_s), with_self_test=False)


def versions(events: Sequence[object]) -> list[tuple[int, int]]:
    return sorted((e.request_id, e.newest_version) for e in events if isinstance(e, Completion))


def test_a_load_waits_for_what_runs_and_holds_back_what_comes_later(policy: PolicyFiles) -> None:
    clock = ManualClock()
    conductor = slow(clock)
    conductor.load(0, policy)
    assert conductor.advance() == [LoadResult(load_id=0, reason=None)]
    conductor.submit([request(0), request(1), request(2)])
    conductor.load(1, replace(policy, policy_version=1))
    conductor.submit([request(3)])
    conductor.submit([request(4)])
    assert conductor.advance() == []
    clock.advance(1)
    assert versions(conductor.advance()) == [(0, 0), (1, 0)]
    conductor.advance()
    clock.advance(1)
    assert versions(conductor.advance()) == [(2, 0)]
    assert conductor.advance() == [LoadResult(load_id=1, reason=None)]
    conductor.advance()
    clock.advance(1)
    assert versions(conductor.advance()) == [(3, 1), (4, 1)]
    assert conductor.pending == 0


def test_waiting_time_follows_what_there_is_to_do(policy: PolicyFiles) -> None:
    clock = ManualClock()
    conductor = slow(clock)
    assert conductor.wait_s(idle_s=2.0) == 2.0
    conductor.load(0, policy)
    assert conductor.wait_s(idle_s=2.0) == 0.0
    conductor.advance()
    conductor.submit([request(0)])
    assert conductor.wait_s(idle_s=2.0) == pytest.approx(1.0)
    assert conductor.wait_s(idle_s=0.5) == 0.5


def test_requests_before_any_weights_are_answered(policy: PolicyFiles) -> None:
    conductor = slow(ManualClock())
    conductor.submit([request(0)])
    (failed,) = conductor.advance()
    assert isinstance(failed, FailedRequest) and failed.code == "no_policy"
    assert conductor.pending == 0


class Faulty(ScriptedEngine):
    """Changes each completion on its way out."""

    def __init__(self, change: dict[str, object]) -> None:
        super().__init__(ScriptedOptions(length=8, length_sigma=0.0))
        self._change = change

    def step(self) -> list[Outcome]:
        return [replace(outcome, **self._change) for outcome in super().step()]  # type: ignore[arg-type]


class Silent(ScriptedEngine):
    """Takes requests and forgets them."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        del requests


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": None}, "no log-probabilities for 8 tokens"),
        ({"logprobs": array("f", [-1.0] * 7)}, "7 log-probabilities for 8 tokens"),
        ({"logprobs": array("f", [-1.0] * 7 + [float("nan")])}, "a log-probability of nan"),
        ({"logprobs": array("f", [0.5] * 8)}, "a log-probability of 0.5"),
        ({"token_ids": array("I", [61] * 8)}, "token id 61 outside the vocabulary of 61"),
        ({"token_ids": array("I"), "logprobs": array("f")}, "a completion without tokens"),
    ],
)
def test_an_engine_with_a_fault_is_refused_with_the_reason(
    policy: PolicyFiles, change: dict[str, object], message: str
) -> None:
    """Field case 78."""
    conductor = Conductor(Faulty(change))
    conductor.load(0, policy)
    assert conductor.advance() == [LoadResult(load_id=0, reason=f"self-test: {message}")]


class Timed(ScriptedEngine):
    """Takes 3 s to load, 1 s a step, and 2 s more for a completion."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(ScriptedOptions(mean_s=2.0, sigma=0.0), now=clock.monotonic_s)
        self._clock = clock

    def load(self, policy: PolicyFiles) -> None:
        self._clock.advance(3)
        super().load(policy)

    def step(self) -> list[Outcome]:
        self._clock.advance(1)
        return super().step()


def test_a_load_is_timed_without_what_ran_before_it(policy: PolicyFiles) -> None:
    clock = ManualClock()
    conductor = Conductor(Timed(clock), now=clock.monotonic_s)
    for load_id in range(2):
        conductor.submit([request(0)])
        conductor.load(load_id, policy)
        events: list[Event] = []
        while conductor.pending:
            events += conductor.advance()
        (result,) = (event for event in events if isinstance(event, LoadResult))
        assert result.times == LoadTimes(load_s=3, first_token_s=1, rest_s=2) and result.times.total_s == 6


def test_an_engine_that_loses_requests_is_refused(policy: PolicyFiles) -> None:
    conductor = Conductor(Silent())
    conductor.load(0, policy)
    assert conductor.advance() == [LoadResult(load_id=0, reason="self-test: 0 of 2 completions came back")]


def test_scoring_holds_nothing_up_until_its_patience_ends(policy: PolicyFiles) -> None:
    clock = ManualClock()
    options = ScriptedOptions(batch=2, mean_s=1.0, sigma=0.0, scores=True)
    conductor = Conductor(ScriptedEngine(options, now=clock.monotonic_s), with_self_test=False)
    conductor.load(0, policy)
    conductor.advance()
    ids = iter(range(10**6))
    conductor.score(7, ScoreRequest(items=(((1, 2), (3,)),), temperature=1.0))
    for _ in range(SCORE_PATIENCE_STEPS):
        # The engine never runs empty: two requests come for each two that end.
        conductor.submit([request(next(ids)), request(next(ids))])
        clock.advance(1)
        assert not any(isinstance(event, ScoreResult) for event in conductor.advance())
    conductor.submit([request(next(ids))])
    events: list[object] = []
    while not any(isinstance(event, ScoreResult) for event in events):
        clock.advance(1)
        events = [*conductor.advance()]
    assert conductor.engine.pending == 1, "what came meanwhile runs now"


def test_an_engine_that_cannot_score_says_so(policy: PolicyFiles) -> None:
    conductor = Conductor(ScriptedEngine(), with_self_test=False)
    asked = ScoreRequest(items=(((1, 2), (3,)),), temperature=1.0)
    conductor.score(0, asked)
    assert "no weights" in str(conductor.advance())
    conductor.load(0, policy)
    conductor.advance()
    conductor.score(1, asked)
    assert conductor.wait_s(9.0) == 0.0
    (result,) = conductor.advance()
    assert isinstance(result, ScoreResult) and "no model" in str(result.scores)
