"""What an answer to a probe shows."""

from array import array
from collections.abc import Callable
from itertools import count

import pytest

from echo_coordinator.state.probe_classes import KEPT_VERSIONS, MAX_CLASSES, MAX_PEERS, ClassTable
from echo_coordinator.state.probe_rules import BOUNDS, Gap, allowed_gap, fault_in, judge_answer, measure
from echo_swarm.identity import PeerId
from echo_swarm.probe import ProbeVerdict

TOKENS = 64


def logprobs(of: Callable[[int], float]) -> "array[float]":
    return array("f", map(of, range(TOKENS)))


def reference(version: int, step: float = 0.05) -> "array[float]":
    """Each version moves every token a little, in a direction of its own."""
    return logprobs(lambda i: -2.0 + sum(step * (1 if (i * 7 + v * v) % 3 else -1) for v in range(version)))


def noisy(values: "array[float]", by: float) -> "array[float]":
    return logprobs(lambda i: values[i] + (by if i % 2 else -by))


REFERENCES = {version: reference(version) for version in range(5)}


def test_a_gap_has_a_mean_a_largest_and_a_sign() -> None:
    gap = measure(array("f", [-1.0, -2.0, -3.0]), array("f", [-1.5, -2.0, -2.75]))
    assert (gap.mean, gap.most, gap.bias) == pytest.approx((0.25, 0.5, (0.5 - 0.25) / 3))


def test_the_same_arithmetic_matches_and_confirms_the_version() -> None:
    judgement = judge_answer(noisy(REFERENCES[3], 1e-6), 3, REFERENCES, 0.02)
    assert (judgement.verdict, judgement.confirmed) == (ProbeVerdict.MATCHES, True)
    assert judgement.gap is not None and judgement.gap.mean == pytest.approx(1e-6, rel=0.5)


@pytest.mark.parametrize("real", [0, 1, 2, 4])
def test_who_computes_with_another_version_is_told_which(real: int) -> None:
    judgement = judge_answer(noisy(REFERENCES[real], 1e-3), 3, REFERENCES, 1.0)
    assert judgement.verdict is ProbeVerdict.OTHER_VERSION
    assert f"computes with version {real}" in judgement.detail
    assert not judgement.confirmed


def test_coarse_arithmetic_and_small_updates_are_not_held_against_anybody() -> None:
    references = {version: reference(version, step=0.001) for version in range(5)}
    for real in (2, 3):
        judgement = judge_answer(noisy(references[real], 0.05), 3, references, 0.2)
        assert (judgement.verdict, judgement.confirmed) == (ProbeVerdict.MATCHES, False)


def test_versions_with_the_same_weights_are_not_told_apart() -> None:
    """An update without signal changes nothing."""
    references = {1: reference(1), 2: reference(1), 3: reference(2)}
    assert judge_answer(noisy(reference(1), 1e-6), 2, references, 0.02).verdict is ProbeVerdict.MATCHES
    assert judge_answer(noisy(reference(1), 1e-6), 2, references, 0.02).confirmed
    exact = judge_answer(reference(1), 2, references, 0.02)
    assert (exact.verdict, exact.confirmed) == (ProbeVerdict.MATCHES, True)


def test_a_lone_version_confirms_nothing() -> None:
    judgement = judge_answer(reference(0), 0, {0: reference(0)}, 0.02)
    assert (judgement.verdict, judgement.confirmed) == (ProbeVerdict.MATCHES, False)


def test_a_missing_temperature_or_a_shift_by_one_is_far() -> None:
    spread = {0: logprobs(lambda i: -0.5 - (i % 7))}
    hot = logprobs(lambda i: spread[0][i] * 0.6)
    shifted = logprobs(lambda i: spread[0][(i + 1) % TOKENS])
    for answer in (hot, shifted):
        judgement = judge_answer(answer, 0, spread, BOUNDS["q8_0"][1])
        assert judgement.verdict is ProbeVerdict.FAR
        assert "allowed 0.5" in judgement.detail


def test_unusable_answers_are_told_from_far_ones() -> None:
    good = reference(0)
    assert fault_in(good, TOKENS) is None
    assert fault_in(good[:-1], TOKENS) == f"{TOKENS - 1} log-probabilities for {TOKENS} tokens"
    for bad in (float("nan"), float("-inf"), 0.1):
        assert "a log-probability of" in (fault_in(array("f", [*good[:-1], bad]), TOKENS) or "")


def test_bounds_follow_from_the_coarsest_precision_of_all() -> None:
    assert allowed_gap(["float32", "float32"], []) == BOUNDS["float32"][1]
    assert allowed_gap(["float32", "bfloat16"], []) == BOUNDS["bfloat16"][1]
    assert allowed_gap(["float32", "something new"], []) == BOUNDS["q4_0"][1]
    assert allowed_gap(["float32"], [], tolerance=3.0) == pytest.approx(3 * BOUNDS["float32"][1])


def test_a_class_with_enough_peers_has_bounds_of_its_own_within_those_of_its_precision() -> None:
    usual, most = BOUNDS["q8_0"]
    assert allowed_gap(["q8_0"], [0.02, 0.02]) == most
    assert allowed_gap(["q8_0"], [0.05, 0.05, 0.9]) == pytest.approx(0.2)
    assert allowed_gap(["q8_0"], [1e-4] * 5) == usual
    assert allowed_gap(["q8_0"], [5.0] * 50) == most


def test_a_class_keeps_what_it_needs_and_no_more() -> None:
    table, names = ClassTable(), (PeerId(f"peer-{n}") for n in count())
    gap = Gap(mean=0.1, most=0.2, bias=0.0)
    for version in range(3 * KEPT_VERSIONS):
        table.add(("torch", "float32"), PeerId("one"), version, gap)
    record = table.records["torch", "float32"]
    assert min(record.by_version) == 2 * KEPT_VERSIONS
    assert record.probes == 3 * KEPT_VERSIONS
    assert record.trend(2) == [(3 * KEPT_VERSIONS - 2, 0.1), (3 * KEPT_VERSIONS - 1, 0.1)]
    assert table.others(("torch", "float32"), PeerId("one")) == []
    for name, _ in zip(names, range(2 * MAX_PEERS), strict=False):
        table.add(("torch", "float32"), name, 1000, gap)
    assert len(record.newest) == len(record.by_version[1000]) == MAX_PEERS
    for n in range(2 * MAX_CLASSES):
        table.add(("made up", str(n)), PeerId("one"), 0, gap)
    assert len(table.records) == MAX_CLASSES
