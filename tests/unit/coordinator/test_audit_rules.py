"""Who is drawn for an audit, and what honest and dishonest completions look like to it."""

import math
import random
from array import array
from collections.abc import Callable

import pytest

from echo_coordinator.state.audit_budget import AuditBudget
from echo_coordinator.state.audit_rules import (
    FREE,
    RAREST,
    AuditVerdict,
    Drift,
    Finding,
    Recomputed,
    find,
    follow,
    is_chosen,
    rate,
)
from echo_coordinator.state.audit_settings import AuditSettings

ALLOWED = 0.01
"""Mean gap of a float16 class."""
DISTRIBUTION = (0.6, 0.2, 0.1, 0.05, 0.03, 0.02)
LOGS = [math.log(p) for p in DISTRIBUTION]
MEAN = sum(p * log for p, log in zip(DISTRIBUTION, LOGS, strict=True))
VARIANCE = sum(p * (log - MEAN) ** 2 for p, log in zip(DISTRIBUTION, LOGS, strict=True))
Claim = Callable[[random.Random, float], float]


def rounded(draw: random.Random, logprob: float) -> float:
    """As arithmetic of 16 bits has it."""
    return min(0.0, logprob + draw.gauss(0, 0.005))


def drawn(
    seed: int, tokens: int = 32, count: int = 4, claim: Claim = rounded, weights: tuple[float, ...] = DISTRIBUTION
) -> list[Recomputed]:
    """Completions of tokens drawn with `weights`, as the trainer and the peer have them."""
    draw = random.Random(seed)
    made: list[Recomputed] = []
    for _ in range(count):
        logprobs = draw.choices(LOGS, weights, k=tokens)
        made.append(
            Recomputed(
                claimed=array("f", (claim(draw, value) for value in logprobs)),
                logprobs=array("f", logprobs),
                expected=array("f", [MEAN] * tokens),
                variance=array("f", [VARIANCE] * tokens),
            )
        )
    return made


def judged(completions: list[Recomputed], before: Drift = Drift()) -> Finding:  # noqa: B008 - frozen
    return find(completions, ALLOWED, before)


def test_honest_completions_are_clean_however_short_and_however_many_audits_came_before() -> None:
    for tokens in (1, 2, 5, 32, 256):
        drift = Drift()
        for seed in range(300):
            found = judged(drawn(seed, tokens, count=1 + seed % 4), drift)
            assert found.verdict is AuditVerdict.CLEAN, (tokens, seed, found)
            drift += found.drift
        assert abs(drift.surprise) < 5 * math.sqrt(drift.variance)


@pytest.mark.parametrize(
    ("claim", "verdict"),
    [
        (lambda _, value: value + 0.05 if value < -0.1 else value - 0.05, AuditVerdict.FAR),
        (lambda _, value: -0.5, AuditVerdict.FAR),
        (lambda _, value: 0.0, AuditVerdict.FAR),
        (lambda _, value: 0.5 * value, AuditVerdict.FAR),
        (lambda draw, value: value - (0.15 if draw.random() < 0.06 else 0.0), AuditVerdict.OUTLIER),
    ],
    ids=["another version", "made up", "all certain", "another temperature", "a few"],
)
def test_log_probabilities_that_were_not_computed_with_the_version_named_are_found(
    claim: Claim, verdict: AuditVerdict
) -> None:
    found = judged(drawn(1, tokens=256, claim=claim))
    assert found.verdict is verdict, found
    assert found.detail


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ((1.0, 0.0, 0.0, 0.0, 0.0, 0.0), "likelier"),
        ((0.85, 0.15, 0.0, 0.0, 0.0, 0.0), "likelier"),
        ((1 / 6,) * 6, "less likely"),
    ],
    ids=["greedy", "colder", "other text"],
)
def test_tokens_that_were_not_drawn_from_the_policy_are_found_though_their_probabilities_are_right(
    weights: tuple[float, ...], words: str
) -> None:
    found = judged(drawn(2, tokens=256, weights=weights))
    assert found.verdict is AuditVerdict.NOT_DRAWN
    assert words in found.detail


def test_answers_cut_short_by_an_end_token_that_was_not_drawn_are_found() -> None:
    """A peer that ends each answer after 16 tokens with an end token that had one chance in 3,000 there."""
    drift, verdicts = Drift(), list[AuditVerdict]()
    for seed in range(20):
        share = drawn(seed, tokens=17, count=4)
        for made in share:
            made.claimed[-1] = made.logprobs[-1] = -8.0
        found = judged(share, drift)
        verdicts.append(found.verdict)
        drift += found.drift
    assert AuditVerdict.NOT_DRAWN in verdicts[:10]


def test_a_small_cheat_that_no_single_audit_shows_adds_up() -> None:
    colder = tuple(p**1.3 for p in DISTRIBUTION)
    drift, verdicts = Drift(), list[AuditVerdict]()
    for seed in range(200):
        share = drawn(seed, tokens=32, count=2, weights=colder)
        assert judged(share).verdict is AuditVerdict.CLEAN
        found = judged(share, drift)
        verdicts.append(found.verdict)
        drift += found.drift
    assert AuditVerdict.NOT_DRAWN in verdicts[:100]


def test_numbers_that_are_none_are_never_clean() -> None:
    broken = drawn(1, claim=lambda _, value: math.nan)
    assert judged(broken).verdict is AuditVerdict.FAR


def test_newcomers_are_always_audited_and_clean_peers_ever_less() -> None:
    rates = [rate(clean) for clean in range(1000)]
    assert rates[: FREE + 1] == [1.0] * (FREE + 1)
    assert rates == sorted(rates, reverse=True)
    assert rates[FREE + 9] == 0.1 and rates[-1] == RAREST


def test_the_draw_needs_the_secret_and_comes_out_as_often_as_it_should() -> None:
    work = [b"w" * 16]
    for share in (1.0, 0.5, 1 / 16):
        hits = sum(is_chosen(b"secret", group, "peer", work, share) for group in range(4000))
        assert hits == pytest.approx(4000 * share, abs=4 * math.sqrt(4000 * share * (1 - share)) + 1e-9)
    one = [is_chosen(b"secret", group, "peer", work, 0.5) for group in range(64)]
    assert one == [is_chosen(b"secret", group, "peer", work, 0.5) for group in range(64)]
    assert one != [is_chosen(b"other", group, "peer", work, 0.5) for group in range(64)]
    assert one != [is_chosen(b"secret", group, "peer", [b"x" * 16], 0.5) for group in range(64)], "only after delivery"


def test_audits_take_their_share_of_the_trainers_time_and_no_more() -> None:
    budget = AuditBudget(AuditSettings(share=0.02, burst_s=10), now=0.0)
    now, spent, idle = 0.0, 0.0, 0.0
    while now < 10_000:
        if budget.allows(now):
            now += 0.7
            spent += 0.7
            budget.spend(0.7, now, free=False)
        else:
            now += 5.0
            idle += 1.0
            budget.spend(1.0, now, free=True)
    assert spent <= 0.02 * now + 10 + 0.7
    assert spent >= 0.018 * now
    assert budget.share_spent(now) == pytest.approx(spent / now)
    assert budget.free_s == idle
    assert not AuditBudget(AuditSettings(share=0), now=0.0).allows(100.0)


def with_other_weights(made: Recomputed, seed: int) -> Recomputed:
    """The same completion under another version, whose log-probabilities differ by half a nat."""
    draw = random.Random(seed)
    other = array("f", (min(0.0, value + draw.choice((-0.5, 0.5))) for value in made.logprobs))
    return Recomputed(claimed=made.claimed, logprobs=other, expected=made.expected, variance=made.variance)


@pytest.mark.parametrize("swap", [0, 1, 20, 63, 64])
def test_weights_that_change_in_the_middle_are_followed(swap: int):
    (old,) = drawn(1, tokens=64, count=1)
    new = with_other_weights(old, 2)
    values = [*old.claimed[:swap], *new.logprobs[swap:]]
    claimed = array("f", values)
    as_old = Recomputed(claimed=claimed, logprobs=old.logprobs, expected=old.expected, variance=old.variance)
    as_new = Recomputed(claimed=claimed, logprobs=new.logprobs, expected=new.expected, variance=new.variance)
    merged = follow([as_old, as_new])
    assert [*merged.logprobs] == pytest.approx([*old.logprobs[:swap], *new.logprobs[swap:]])
    assert judged([merged]).gap < ALLOWED
    # The other way round no version fits: they never go back.
    if swap == 20:
        assert judged([follow([as_new, as_old])]).verdict is AuditVerdict.FAR


def test_made_up_values_fit_no_order_of_versions():
    (old,) = drawn(3, tokens=64, count=1, claim=lambda draw, value: -0.5)
    assert judged([follow([old, with_other_weights(old, 4), with_other_weights(old, 5)])]).verdict is AuditVerdict.FAR


def test_a_coarser_class_that_hides_in_short_shares_adds_up() -> None:
    # Twice as far off as allowed on average, in shares so short that each alone may be.
    drift, verdicts = Drift(), list[AuditVerdict]()
    for seed in range(12):
        share = drawn(seed, tokens=4, count=1, claim=lambda draw, value: min(0.0, value + draw.choice((-0.02, 0.02))))
        assert judged(share).verdict is AuditVerdict.CLEAN
        verdicts.append((found := judged(share, drift)).verdict)
        drift += found.drift
    assert AuditVerdict.FAR in verdicts[:4]
