"""The loss, term by term, on numbers that can be checked by hand."""

import math

import pytest
import torch

from echo_coordinator.trainer.objective.aggregation import row_weights
from echo_coordinator.trainer.objective.kl import kl_term
from echo_coordinator.trainer.objective.logprobs import from_logits
from echo_coordinator.trainer.objective.policy import policy_term
from echo_coordinator.trainer.objective.ratio import log_ratio
from echo_coordinator.trainer.settings import ObjectiveSettings


def term(ratio: float, advantage: float, *, proximal: float | None = None, **settings: object):
    """The term of one token with π/π_behave = `ratio` (and π_prox/π_behave = `proximal`), and its gradient in log π."""
    logprobs = torch.tensor([math.log(ratio) - 30.0], dtype=torch.float64, requires_grad=True)
    prox = logprobs.detach() if proximal is None else torch.tensor([math.log(proximal) - 30.0], dtype=torch.float64)
    result = policy_term(
        logprobs,
        behaviour=torch.full_like(prox, -30.0),
        proximal=prox,
        advantage=torch.full_like(prox, advantage),
        settings=ObjectiveSettings.model_validate(settings),
    )
    result.loss.sum().backward()
    assert logprobs.grad is not None
    return result, float(logprobs.grad)


@pytest.mark.parametrize(("aggregation", "expected"), [("token", 10 / 3), ("sequence", 6.0), ("constant", 2.0)])
def test_rows_of_five_and_one_tokens_have_the_documented_means(aggregation, expected):
    weights = row_weights([5, 1], aggregation, constant_length=5)
    assert weights[0] * 5 * 2 + weights[1] * 10 == pytest.approx(expected)


def test_constant_aggregation_without_a_length_is_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="constant_length"):
        row_weights([1], "constant")


def test_the_ratio_uses_the_workers_numbers():
    result, gradient = term(1.25, 2.0)
    assert result.loss.item() == pytest.approx(-2.5)
    assert gradient == pytest.approx(-2.5)


def test_the_clip_is_asymmetric_and_only_cuts_what_would_go_further():
    assert term(1.27, 1.0)[1] == pytest.approx(-1.27)
    above, gradient = term(1.5, 1.0)
    assert (above.loss.item(), gradient, above.clipped.item()) == (pytest.approx(-1.28), 0.0, True)
    below, gradient = term(0.5, -1.0)
    assert (below.loss.item(), gradient, below.clipped.item()) == (pytest.approx(0.8), 0.0, True)
    back, gradient = term(0.5, 1.0)
    assert (back.clipped.item(), gradient) == (False, pytest.approx(-0.5))


def test_the_cap_bounds_a_ratio_that_the_clip_leaves_open():
    capped, gradient = term(50.0, -1.0, importance_cap=4.0)
    assert (capped.loss.item(), gradient, capped.capped.item()) == (pytest.approx(4.0), 0.0, True)
    assert term(50.0, -1.0, importance_cap=None)[1] == pytest.approx(50.0)


def test_the_decoupled_term_clips_around_the_trainer_and_weighs_by_the_worker():
    first, gradient = term(3.0, 1.0, proximal=3.0, decoupled=True, importance_cap=2.0)
    assert (first.loss.item(), gradient) == (pytest.approx(-2.0), pytest.approx(-2.0))
    assert first.capped.item() and not first.clipped.item()
    later, gradient = term(3.0, 1.0, proximal=1.5, decoupled=True, importance_cap=2.0)
    assert (later.loss.item(), gradient, later.clipped.item()) == (pytest.approx(-1.5 * 1.28), 0.0, True)
    uncorrected, _ = term(3.0, 1.0, proximal=3.0, decoupled=True, importance_cap=None)
    assert uncorrected.loss.item() == pytest.approx(-1.0)


def test_absurd_log_probabilities_stay_finite():
    difference = log_ratio(torch.tensor([0.0, -1e9]), torch.tensor([-math.inf, 0.0]))
    assert difference.tolist() == [20.0, -20.0]
    assert torch.isfinite(difference.exp()).all()


def test_the_kl_estimate_is_zero_at_agreement_and_positive_elsewhere():
    values = kl_term(torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -2.0, 0.0]))
    assert values.tolist() == pytest.approx([0.0, math.exp(-1.0), math.e - 2])


def test_the_mean_log_ratio_on_policy_is_zero_and_not_the_mass_that_top_p_would_cut():
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    targets = torch.tensor([0, 1, 2, 3])
    # What a worker records: the full softmax at the training temperature.
    recorded = torch.log_softmax(probabilities.log() / 0.7, dim=-1)
    mine = from_logits(probabilities.log().expand(4, 4), targets, temperature=0.7)
    assert (mine.logprobs - recorded).mean().item() == pytest.approx(0.0, abs=1e-6)
    at_another_temperature = from_logits(probabilities.log().expand(4, 4), targets, temperature=1.0)
    assert (at_another_temperature.logprobs - recorded).abs().max().item() > 0.1
    # top_p 0.8 keeps 0.5 and 0.3: renormalised numbers would shift every ratio by log 0.8.
    kept = mine.logprobs.new_tensor([0.5, 0.3])
    full = from_logits(probabilities.log().expand(2, 4), targets[:2], temperature=1.0)
    assert (full.logprobs - (kept / kept.sum()).log()).mean().item() == pytest.approx(math.log(0.8), abs=1e-6)


def test_entropy_is_that_of_the_distribution_even_where_a_probability_is_zero():
    logits = torch.tensor([[0.0, 0.0, -math.inf, -math.inf]])
    assert from_logits(logits, torch.tensor([0]), 1.0).entropy.item() == pytest.approx(math.log(2))
