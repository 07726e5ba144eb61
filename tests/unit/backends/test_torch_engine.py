"""The torch engine: batching, repetition, memory, and weights that it must refuse."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file

from echo_node.backends.base import Completion, FailedRequest, FailureCode, GenerationRequest, LoadRefused, Outcome
from echo_node.backends.conductor import Conductor
from echo_node.backends.kv_cache import RowCache
from echo_node.backends.options import TorchOptions
from echo_node.backends.sampling import draw
from echo_node.backends.torch_engine import TorchEngine
from tests.unit.backends.support import CONFIG, END, VOCABULARY, reference_model, request, write_policy

Bits = list[tuple[int, bytes, bytes]]


class Budget:
    """Room for `rows` sequences in one forward pass; counts the passes."""

    def __init__(self, rows: int = 1000) -> None:
        self.rows = rows
        self.passes: list[int] = []

    def __call__(self, rows: int) -> None:
        self.passes.append(rows)
        if rows > self.rows:
            raise torch.OutOfMemoryError(f"tried to allocate for {rows} rows")


def make(tmp_path: Path, *, budget: Budget | None = None, batch: int = 4, isolate: bool = False) -> TorchEngine:
    engine = TorchEngine(TorchOptions(batch=batch, threads=1, isolate=isolate), before_forward=budget)
    engine.load(write_policy(tmp_path / "policy"))
    return engine


def run(engine: TorchEngine) -> list[Outcome]:
    outcomes: list[Outcome] = []
    while engine.pending:
        outcomes += engine.step()
    return outcomes


def bits(outcomes: list[Outcome]) -> Bits:
    assert all(isinstance(outcome, Completion) for outcome in outcomes)
    return sorted((o.request_id, o.token_ids.tobytes(), o.logprobs.tobytes()) for o in outcomes)  # type: ignore[union-attr]


def plain_completion(asked: GenerationRequest) -> list[int]:
    """What a loop over whole sequences without any cache would sample."""
    model, uniforms, ids = reference_model(1), Random(asked.seed), list(asked.prompt_ids)
    while len(ids) - len(asked.prompt_ids) < asked.max_tokens:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[:, -1, :VOCABULARY]
        ids.append(draw(logits, [asked.temperature], [uniforms.random()])[0][0])
        if ids[-1] == END:
            break
    return ids[len(asked.prompt_ids) :]


def test_batched_sampling_gives_the_tokens_of_a_plain_loop(tmp_path: Path) -> None:
    asked = [request(i, prompt_ids=tuple(range(1, 2 + i % 9)), temperature=0.8) for i in range(10)]
    engine = make(tmp_path)
    engine.submit(asked)
    outcomes = {outcome.request_id: outcome for outcome in run(engine)}
    for one in asked:
        outcome = outcomes[one.request_id]
        assert isinstance(outcome, Completion)
        assert outcome.token_ids.tolist() == plain_completion(one)


def test_one_call_to_an_idle_engine_repeats_bit_for_bit(tmp_path: Path) -> None:
    engine, asked = make(tmp_path), [request(i, prompt_ids=(1 + i % 5, 2, 3)) for i in range(30)]
    engine.submit(asked)
    first = bits(run(engine))
    engine.submit(asked)
    assert bits(run(engine)) == first
    fresh = make(tmp_path)
    fresh.submit(asked)
    assert bits(run(fresh)) == first


def test_isolated_calls_do_not_depend_on_when_others_came(tmp_path: Path) -> None:
    calls = [[request(10 * c + i, prompt_ids=(1 + c, 2 + i % 2)) for i in range(6)] for c in range(3)]
    engine = make(tmp_path, isolate=True)
    alone: Bits = []
    for call in calls:
        engine.submit(call)
        alone += bits(run(engine))
    for call in calls:
        engine.submit(call)
        engine.step()
    assert bits(run(engine)) == alone


def test_a_group_shares_one_prefill_and_slots_are_refilled_at_once(tmp_path: Path) -> None:
    budget = Budget()
    engine = make(tmp_path, budget=budget, batch=4)
    engine.submit([request(i, max_tokens=2 + i % 3, temperature=0.0, prompt_ids=(1, 2, 60)) for i in range(8)])
    outcomes = run(engine)
    lengths = [len(outcome.token_ids) for outcome in outcomes if isinstance(outcome, Completion)]
    # A completion's first token comes from the prompt's pass; every later one takes a row of one pass.
    assert budget.passes[0] == 1
    assert sum(budget.passes[1:]) == sum(lengths) - len(lengths)
    assert max(budget.passes) == 4


def test_a_group_that_comes_in_parts_shares_one_prefill_while_the_engine_is_busy(tmp_path: Path) -> None:
    """As a node gets it: places become free one by one."""
    budget, prompt = Budget(), (1, 2, 60)
    engine = make(tmp_path, budget=budget, batch=4)
    prefills: list[int] = []
    for part in range(3):
        before, decoded = len(budget.passes), bool(engine.pending)
        engine.submit([request(part, prompt_ids=prompt, temperature=0.0, max_tokens=12)])
        engine.step()
        prefills.append(len(budget.passes) - before - decoded)
    assert prefills == [1, 0, 0]
    outcomes = run(engine)
    assert len({outcome.token_ids.tobytes() for outcome in outcomes if isinstance(outcome, Completion)}) == 1
    before = len(budget.passes)
    engine.submit([request(9, prompt_ids=prompt, temperature=0.0, max_tokens=1)])
    assert len(run(engine)) == 1 and len(budget.passes) == before + 1


def test_isolated_calls_share_no_prefill_either(tmp_path: Path) -> None:
    budget = Budget()
    engine = make(tmp_path, budget=budget, isolate=True)
    for call in range(2):
        engine.submit([request(call, prompt_ids=(1, 2, 60), temperature=0.0, max_tokens=2)])
    assert len(run(engine)) == 2
    assert budget.passes == [1, 1, 1, 1]


def test_padding_rows_of_the_embedding_are_never_sampled(tmp_path: Path) -> None:
    engine = make(tmp_path)
    engine.load(write_policy(tmp_path / "small", vocabulary_size=10))
    engine.submit([request(i, temperature=5.0, max_tokens=30) for i in range(20)])
    for outcome in run(engine):
        assert isinstance(outcome, Completion)
        assert max(outcome.token_ids) < 10


def test_running_out_of_memory_shrinks_the_batch_and_loses_nothing(tmp_path: Path) -> None:
    """Field case 51."""
    budget = Budget(rows=3)
    engine = make(tmp_path, budget=budget, batch=8)
    asked = [request(i, prompt_ids=(1 + i, 2)) for i in range(12)]
    engine.submit(asked)
    outcomes = run(engine)
    assert engine.report().batch == 2
    expected = {one.request_id: plain_completion(one) for one in asked}
    assert {o.request_id: o.token_ids.tolist() for o in outcomes if isinstance(o, Completion)} == expected


class CrampedCache(RowCache):
    """Room for the keys and values of so many rows."""

    rows = 3

    def _reserve(self, rows: int, columns: int) -> None:
        if rows > self.rows:
            raise torch.OutOfMemoryError(f"tried to allocate {rows} rows")
        super()._reserve(rows, columns)


def test_a_cache_that_cannot_grow_shrinks_the_batch_and_loses_nothing(tmp_path: Path) -> None:
    """On a GPU, most allocations fail there: the cache grows by copying."""
    engine = make(tmp_path, batch=8)
    engine._cache = CrampedCache()
    asked = [request(i, prompt_ids=(1 + i, 2)) for i in range(12)]
    engine.submit(asked)
    outcomes = run(engine)
    assert engine.report().batch == 2
    expected = {one.request_id: plain_completion(one) for one in asked}
    assert {o.request_id: o.token_ids.tolist() for o in outcomes if isinstance(o, Completion)} == expected


def test_a_request_that_does_not_fit_alone_fails_and_the_engine_lives(tmp_path: Path) -> None:
    budget = Budget(rows=0)
    engine = make(tmp_path, budget=budget, batch=2)
    engine.submit([request(0), request(1)])
    outcomes = run(engine)
    assert [outcome.code for outcome in outcomes if isinstance(outcome, FailedRequest)] == (
        [FailureCode.OUT_OF_MEMORY] * 2
    )
    budget.rows = 1
    engine.submit([request(2)])
    assert isinstance(run(engine)[0], Completion)


def test_weights_that_give_nan_are_caught_by_the_self_test(tmp_path: Path) -> None:
    """Field case 78."""
    policy = write_policy(tmp_path / "nan")
    tensors = load_file(policy.artifact)
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, policy.artifact)
    conductor = Conductor(TorchEngine(TorchOptions(threads=1)))
    conductor.load(0, policy)
    (result,) = conductor.advance()
    assert "self-test: version 0 gives a log-probability of nan" in str(result)
    conductor.load(1, write_policy(tmp_path / "good"))
    (result,) = conductor.advance()
    assert getattr(result, "reason", "") is None


def test_a_nan_row_does_not_poison_its_neighbours_or_its_successor(tmp_path: Path) -> None:
    policy = write_policy(tmp_path / "embedding")
    tensors = load_file(policy.artifact)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.embed_tokens.weight"][5] = float("nan")
    save_file(tensors, policy.artifact)
    untied = json.dumps({**CONFIG, "tie_word_embeddings": False})
    engine = TorchEngine(TorchOptions(batch=2, threads=1))
    engine.load(replace(policy, model_config_json=untied))
    poisoned = request(0, prompt_ids=(1, 5, 2))
    engine.submit([poisoned, *(request(i, prompt_ids=(1, 2, 3), temperature=0.0, max_tokens=4) for i in (1, 2, 3))])
    outcomes = {outcome.request_id: outcome for outcome in run(engine)}
    failed = outcomes.pop(0)
    assert isinstance(failed, FailedRequest) and failed.code is FailureCode.NON_FINITE
    assert all(isinstance(outcome, Completion) for outcome in outcomes.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"lacks 1 tensor\(s\), such as model.layers.1.mlp.up"),
        (lambda t: t.update({"backdoor": torch.zeros(1)}), r"has unknown 1 tensor\(s\), such as backdoor"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(31)}), r"model.norm.weight has shape \(31,\)"),
    ],
)
def test_a_file_with_other_tensors_is_refused_before_any_is_copied(
    tmp_path: Path, change: object, message: str
) -> None:
    engine = make(tmp_path)
    engine.submit([request(0)])
    before = bits(run(engine))
    policy = write_policy(tmp_path / "changed", seed=5)
    tensors = load_file(policy.artifact)
    change(tensors)  # type: ignore[operator]
    save_file(tensors, policy.artifact)
    with pytest.raises(LoadRefused, match=message):
        engine.load(policy)
    engine.load(write_policy(tmp_path / "policy"))
    engine.submit([request(0)])
    assert bits(run(engine)) == before


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "no_such_model"}, "cannot build the model"),
        ({"hidden_size": "large"}, "cannot build the model"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"max_position_embeddings": 64}, "the run allows 96 tokens, the model's context is 64"),
        (
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
            "sliding window of 16 is shorter",
        ),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_with_the_reason(
    tmp_path: Path, config: dict[str, object], message: str
) -> None:
    engine = TorchEngine(TorchOptions(threads=1))
    policy = write_policy(tmp_path, model_config_json=json.dumps({**CONFIG, **config}))
    with pytest.raises(LoadRefused, match=message):
        engine.load(policy)


def test_code_named_by_a_config_is_not_looked_at(tmp_path: Path) -> None:
    config = {**CONFIG, "auto_map": {"AutoModelForCausalLM": "evil--repo.Model"}}
    engine = TorchEngine(TorchOptions(threads=1))
    engine.load(write_policy(tmp_path, model_config_json=json.dumps(config)))
    engine.submit([request(0)])
    assert isinstance(run(engine)[0], Completion)


def test_a_vocabulary_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    engine = TorchEngine(TorchOptions(threads=1))
    with pytest.raises(LoadRefused, match="vocabulary of 65 is larger"):
        engine.load(write_policy(tmp_path, vocabulary_size=65))
