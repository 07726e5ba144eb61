"""Drawing with numpy by blocks, against torch's whole CDF and against the distribution itself."""

import math

import numpy as np
import pytest
import torch

from echo_node.backends.inverse_cdf import Drawer
from echo_node.backends.sampling import draw


def logits_of(rows: int, vocabulary: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocabulary)) * 3).astype(np.float32)


@pytest.mark.parametrize("vocabulary", [1, 61, 256, 257, 49_152])
def test_the_same_uniforms_give_the_ids_and_logprobs_of_the_whole_cdf(vocabulary: int) -> None:
    logits = logits_of(33, vocabulary + 3)  # three rows of padding, which must not be drawn
    generator = np.random.default_rng(1)
    temperatures = [float(t) for t in generator.choice([0.0, 0.6, 1.0], 33)]
    uniforms = generator.random(33).tolist()
    ids, logprobs = Drawer(vocabulary).draw(logits, temperatures, uniforms)
    expected_ids, expected = draw(torch.from_numpy(logits[:, :vocabulary].copy()), temperatures, uniforms)
    assert ids == expected_ids
    assert logprobs == pytest.approx(expected, abs=2e-5)


def test_logprobs_are_those_of_the_distribution_at_that_temperature() -> None:
    logits = logits_of(4, 300)
    for temperature in (0.6, 1.0):
        ids, logprobs = Drawer(300).draw(logits, [temperature] * 4, [0.3] * 4)
        scaled = logits.astype(np.float64) / temperature
        exact = scaled - np.log(np.exp(scaled).sum(axis=1, keepdims=True))
        assert logprobs == pytest.approx([exact[row, i] for row, i in enumerate(ids)], abs=1e-6)


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 300 ids in two blocks; 1e-6 of sound generators would fail."""
    probabilities = np.random.default_rng(2).dirichlet(np.full(300, 2.0))
    rows = 20_000
    logits = np.broadcast_to(np.log(probabilities).astype(np.float32), (rows, 300)).copy()
    ids, _ = Drawer(300).draw(logits, [1.0] * rows, np.random.default_rng(3).random(rows).tolist())
    expected = probabilities * rows
    chi_square = float((((np.bincount(ids, minlength=300) - expected) ** 2) / expected).sum())
    # Wilson and Hilferty's normal approximation with 299 degrees of freedom.
    z = ((chi_square / 299) ** (1 / 3) - (1 - 2 / (9 * 299))) / math.sqrt(2 / (9 * 299))
    assert z < 4.75


def test_an_id_without_probability_is_never_drawn() -> None:
    logits = np.full((3, 600), -np.inf, np.float32)
    logits[:, [5, 300, 301]] = 0.0
    ids, logprobs = Drawer(600).draw(logits, [1.0] * 3, [0.0, 0.5, 1.0 - 2.0**-53])
    assert ids == [5, 300, 301]
    assert logprobs == pytest.approx([-math.log(3)] * 3)


def test_a_row_that_is_not_finite_has_no_logprob_and_spoils_no_other() -> None:
    logits = logits_of(4, 61)
    logits[1, 5], logits[2, 7] = np.nan, np.inf
    for temperatures in ([1.0] * 4, [0.0] * 4):
        _, logprobs = Drawer(61).draw(logits, temperatures, [0.5] * 4)
        assert [math.isfinite(value) for value in logprobs] == [True, False, False, True]


def test_a_row_is_drawn_alike_whoever_shares_the_call() -> None:
    logits = logits_of(40, 2000)
    uniforms = np.random.default_rng(4).random(40).tolist()
    drawer = Drawer(2000)
    together = drawer.draw(logits, [0.8] * 40, uniforms)
    alone = [drawer.draw(logits[i : i + 1], [0.8], uniforms[i : i + 1]) for i in range(40)]
    assert together == ([ids[0] for ids, _ in alone], [logprobs[0] for _, logprobs in alone])
