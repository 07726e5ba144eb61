"""Drawing tokens: the distribution, its edges, and what is recorded."""

import math

import torch

from echo_node.backends.sampling import draw

LOGITS = torch.tensor([2.0, 0.5, -1.0, 3.0, float("-inf")])


def draw_many(temperature: float, count: int) -> tuple[list[int], list[float]]:
    uniforms = [(i + 0.5) / count for i in range(count)]
    return draw(LOGITS.repeat(count, 1), [temperature] * count, uniforms)


def test_evenly_spread_uniforms_give_each_token_its_probability() -> None:
    for temperature in (0.6, 1.0, 2.5):
        ids, logprobs = draw_many(temperature, 20_000)
        expected = torch.log_softmax(LOGITS / temperature, -1)
        for token, logprob in zip(ids, logprobs, strict=True):
            assert abs(logprob - expected[token].item()) < 1e-6
        for token in range(5):
            assert abs(ids.count(token) / len(ids) - expected[token].exp().item()) < 1e-3


def test_an_impossible_token_is_never_drawn_even_at_the_ends() -> None:
    first_and_last_impossible = torch.tensor([[float("-inf"), 1.0, 1.0, float("-inf")]])
    assert draw(first_and_last_impossible, [1.0], [0.0])[0] == [1]
    assert draw(first_and_last_impossible, [1.0], [math.nextafter(1.0, 0.0)])[0] == [2]


def test_rows_have_their_own_temperatures() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(3, 1)
    ids, logprobs = draw(logits, [0.0, 0.5, 1.0], [0.1, 0.99, 0.99])
    assert ids == [2, 2, 2]
    assert logprobs[0] == 0
    assert math.isclose(logprobs[1], torch.log_softmax(logits[0] / 0.5, -1)[2].item(), rel_tol=1e-6)
    assert math.isclose(logprobs[2], torch.log_softmax(logits[0], -1)[2].item(), rel_tol=1e-6)


def test_a_row_with_nan_has_a_nan_logprob_and_leaves_the_others_alone() -> None:
    logits = torch.tensor([[1.0, float("nan")], [1.0, 1.0]])
    for temperature in (0.0, 1.0):
        ids, logprobs = draw(logits, [temperature, 1.0], [0.5, 0.6])
        assert math.isnan(logprobs[0])
        assert ids[1] == 1 and math.isclose(logprobs[1], math.log(0.5), rel_tol=1e-6)


def test_half_precision_logits_are_normalised_in_float32() -> None:
    logits = torch.linspace(-3, 3, 200).to(torch.bfloat16).unsqueeze(0)
    ids, logprobs = draw(logits, [1.0], [0.3])
    assert math.isclose(logprobs[0], torch.log_softmax(logits.float(), -1)[0, ids[0]].item(), rel_tol=1e-6)
