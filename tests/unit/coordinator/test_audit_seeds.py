"""What audits make of seeds: tokens that were not drawn with the seed of their lease, however honest their values."""

import math
import random
from array import array
from collections.abc import Callable
from itertools import accumulate

import numpy as np
import pytest
import torch

from echo_coordinator.state.audit_rules import (
    NO_STRAYS,
    NOTHING,
    AuditVerdict,
    Finding,
    Recomputed,
    find,
    follow,
    strays_of,
    uniforms_of,
)
from echo_node.backends.base import GenerationRequest
from echo_node.backends.inverse_cdf import Drawer
from echo_node.backends.rows import Row
from echo_node.backends.sampling import draw as draw_with_torch

VOCABULARY = 24
CLASSES = {"float32": (1e-6, 0.002), "f16": (0.003, 0.01), "bfloat16": (0.05, 0.06), "q8_0": (0.1, 0.12)}
"""Mean gap of the class's arithmetic as measured, and the least that it may ever have; nats a token."""


def distribution(draw: random.Random) -> list[float]:
    """Log-probabilities of a place: now flat, now sure."""
    logits = [draw.gauss(0, 1) * draw.choice((0.5, 2.0, 5.0)) for _ in range(VOCABULARY)]
    total = math.log(sum(map(math.exp, logits)))
    return [value - total for value in logits]


def completion(seed: int, *, tokens: int, gap: float, drawn_with: int | None = None) -> Recomputed:
    """One completion of a peer whose arithmetic is off by `gap`, drawn with a seed that may be another one."""
    noise = random.Random(f"places {seed}")
    uniforms = uniforms_of(seed, tokens)
    drawn = uniforms if drawn_with is None else uniforms_of(drawn_with, tokens)
    fields: dict[str, list[float]] = {name: [] for name in ("claimed", "logprobs", "expected", "variance", "below")}
    for uniform in drawn:
        true = distribution(noise)
        own = [value + noise.gauss(0, gap * math.sqrt(math.pi / 2)) for value in true]
        weights = [math.exp(value) for value in own]
        token = next(
            i for i, sum_ in enumerate(accumulate(weights)) if sum_ > uniform * sum(weights) or i + 1 == VOCABULARY
        )
        mean = sum(math.exp(value) * value for value in true)
        fields["claimed"].append(min(0.0, own[token] - math.log(sum(weights))))
        fields["logprobs"].append(true[token])
        fields["expected"].append(mean)
        fields["variance"].append(sum(math.exp(value) * (value - mean) ** 2 for value in true))
        fields["below"].append(sum(math.exp(value) for value in true[:token]))
    return Recomputed(**{name: array("f", values) for name, values in fields.items()}, uniforms=uniforms)


def audits(made: Callable[[int], list[Recomputed]], allowed: float, count: int) -> list[Finding]:
    """Audit one share after the other, as of one peer."""
    found: list[Finding] = []
    drift, strays = NOTHING, NO_STRAYS
    for number in range(count):
        found.append(find(made(number), allowed, drift, strays))
        drift, strays = drift + found[-1].drift, strays + found[-1].strays
    return found


@pytest.mark.parametrize("kind", CLASSES)
def test_honest_draws_stay_far_from_the_limit_in_every_class(kind: str) -> None:
    gap, allowed = CLASSES[kind]
    found = audits(
        lambda n: [completion(10 * n + i, tokens=1 + n % 16, gap=gap) for i in range(1 + n % 4)], allowed, 120
    )
    assert {finding.verdict for finding in found} == {AuditVerdict.CLEAN}
    strayed, room = sum(f.strays.sum for f in found), sum(f.strays.room for f in found)
    assert strayed < room / 2


@pytest.mark.parametrize("kind", CLASSES)
def test_whoever_draws_four_times_and_picks_one_is_found_in_a_few_audits(kind: str) -> None:
    gap, allowed = CLASSES[kind]
    pick = random.Random(3)

    def share(number: int) -> list[Recomputed]:
        seeds = range(100 * number, 100 * number + 4)
        picked = [(seed, pick.choice((None, seed + 10_000, seed + 20_000, seed + 30_000))) for seed in seeds]
        return [completion(seed, tokens=12, gap=gap, drawn_with=other) for seed, other in picked]

    verdicts = [finding.verdict for finding in audits(share, allowed, 12)]
    assert AuditVerdict.OTHER_SEED in verdicts
    assert set(verdicts) <= {AuditVerdict.CLEAN, AuditVerdict.OTHER_SEED}


def test_seeds_that_cannot_be_followed_are_held_against_nobody() -> None:
    made = completion(1, tokens=64, gap=0.0, drawn_with=2)
    unknown = Recomputed(claimed=made.claimed, logprobs=made.logprobs, expected=made.expected, variance=made.variance)
    assert find([made], 0.002, NOTHING).verdict is AuditVerdict.OTHER_SEED
    assert find([unknown], 0.002, NOTHING).verdict is AuditVerdict.CLEAN
    assert strays_of([unknown], 0.002) == NO_STRAYS
    assert strays_of([follow([made, made])], 0.002) == strays_of([made], 0.002)


def test_both_engines_draw_as_audits_believe() -> None:
    source = np.random.default_rng(5)
    logits = source.normal(0, 3, (200, VOCABULARY)).astype(np.float32)
    for seed in (0, 1, 2**62 - 1):
        row = Row.start(GenerationRequest(request_id=0, prompt_ids=(1,), max_tokens=1, temperature=1.0, seed=seed), 0)
        uniforms = uniforms_of(seed, len(logits))
        assert [row.uniforms.random() for _ in uniforms] == [*uniforms]
        temperatures = [1.0] * len(logits)
        by_numpy, _ = Drawer(VOCABULARY).draw(logits, temperatures, [*uniforms])
        by_torch, _ = draw_with_torch(torch.from_numpy(logits), temperatures, [*uniforms])
        upto = np.exp(logits.astype(np.float64)).cumsum(axis=1)
        upto /= upto[:, -1:]
        for ids in (by_numpy, by_torch):
            for place, token in enumerate(ids):
                below = upto[place, token - 1] if token else 0.0
                assert below - 1e-6 <= uniforms[place] < upto[place, token] + 1e-6
