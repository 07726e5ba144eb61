"""What an answer to a probe shows. Pure: log-probabilities in, a judgement out.

    gap = mean over all probe tokens of |log p_node - log p_trainer|        nats a token, both at the same version

An answer is compared with the trainer's values at the version that it names and at all others that are kept:

1. another version fits three times better     other_version    it computes with that one, whatever it says
2. the gap is above what its class may have      far
3. else                                          matches

`confirmed` says whether the values single the version out: each different version fits at least three times worse.
With coarse arithmetic and small updates they cannot, and then nothing is held against the node.

What a class may have follows from its precision (`BOUNDS`, [usual, most]). While fewer than three other peers of the
class were measured: the most. From then on four times their median, but no less than usual and no more than the most,
so that neither a class of two nor a crowd of liars moves the bounds out of sight.
"""

import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from echo_swarm.probe import ProbeVerdict

BOUNDS: dict[str, tuple[float, float]] = {
    "float32": (0.002, 0.02),
    "f32": (0.002, 0.02),
    "float16": (0.01, 0.1),
    "f16": (0.01, 0.1),
    "bfloat16": (0.06, 0.3),
    "bf16": (0.06, 0.3),
    "q8_0": (0.12, 0.5),
    "q4_0": (0.8, 3.0),
}
"""Mean gaps by precision, nats a token. Small models and improbable tokens have the largest; what was measured is in
docs/adr/0007-probes.md. The rest is room for models that amplify rounding."""
UNKNOWN_BOUND = (0.8, 3.0)
"""Of a precision without a line of its own."""
FITS_BETTER = 3.0
"""How many times nearer a version has to be to be told apart."""
RESOLUTION = 2e-5
"""Nats a token. Smaller differences are rounding, not versions: an update without signal changes nothing."""
BASELINE_PEERS = 3
OVER_BASELINE = 4.0
ABOVE_ZERO = 1e-4
"""A log-probability may be that much above 0 by rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How far two sets of log-probabilities of the same tokens are apart, in nats."""

    mean: float
    """Of the absolute differences."""
    most: float
    """The largest absolute difference."""
    bias: float
    """Mean of node - trainer: above 0, the node thinks the tokens likelier than the trainer does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeJudgement:
    """What one answer showed."""

    verdict: ProbeVerdict
    detail: str
    """For people."""
    gap: Gap | None = None
    """To the trainer at the version that it names."""
    confirmed: bool = False
    """The version is the one it names, and could be told from the others."""


def measure(answer: "array[float]", reference: "array[float]") -> Gap:
    """Return the gap of two arrays of one length, at least 1."""
    differences = [a - r for a, r in zip(answer, reference, strict=True)]
    return Gap(
        mean=math.fsum(map(abs, differences)) / len(differences),
        most=max(map(abs, differences)),
        bias=math.fsum(differences) / len(differences),
    )


def fault_in(answer: "array[float]", expected: int) -> str | None:
    """Return what makes an answer unusable, or None."""
    if len(answer) != expected:
        return f"{len(answer)} log-probabilities for {expected} tokens"
    if bad := [value for value in answer if not (math.isfinite(value) and value <= ABOVE_ZERO)]:
        return f"a log-probability of {bad[0]}"
    return None


def usual_gap(precisions: Collection[str], tolerance: float = 1.0) -> float:
    """Return the mean gap above which a class is worth a warning; arguments as of `allowed_gap`."""
    return tolerance * max(BOUNDS.get(precision, UNKNOWN_BOUND)[0] for precision in precisions)


def allowed_gap(precisions: Collection[str], others: Sequence[float], tolerance: float = 1.0) -> float:
    """Return the largest mean gap that a peer may have.

    Args:
        precisions: of its arithmetic, of the published weights and of the trainer's passes: the coarsest counts.
        others: the mean gaps of other peers of its class.
        tolerance: factor on the bounds.

    """
    known = [BOUNDS.get(precision, UNKNOWN_BOUND) for precision in precisions]
    usual, most = (tolerance * max(bounds[i] for bounds in known) for i in (0, 1))
    if len(others) < BASELINE_PEERS:
        return most
    return min(most, max(usual, OVER_BASELINE * median(others)))


def judge_answer(
    answer: "array[float]", version: int, references: Mapping[int, "array[float]"], allowed: float
) -> ProbeJudgement:
    """Return what `answer` shows of a peer that names `version`.

    Args:
        answer: checked by `fault_in`.
        version: it has to be among the references.
        references: the trainer's values by version.
        allowed: see `allowed_gap`.

    """
    gap = measure(answer, references[version])
    others = {v: measure(answer, reference).mean for v, reference in references.items() if v != version}
    nearest = min(others, key=lambda v: (others[v], abs(v - version)), default=None)
    if nearest is not None and others[nearest] * FITS_BETTER <= gap.mean and gap.mean > RESOLUTION:
        detail = (
            f"it says version {version} and computes with version {nearest}: mean gap {gap.mean:.2g} to what it says, "
            f"{others[nearest]:.2g} to that one"
        )
        return ProbeJudgement(verdict=ProbeVerdict.OTHER_VERSION, detail=detail, gap=gap)
    if gap.mean > allowed:
        detail = f"mean gap to the trainer {gap.mean:.2g} nats a token (largest {gap.most:.2g}), allowed {allowed:.2g}"
        return ProbeJudgement(verdict=ProbeVerdict.FAR, detail=detail, gap=gap)
    different = [v for v in others if measure(references[v], references[version]).mean > RESOLUTION]
    confirmed = all(gap.mean * FITS_BETTER <= others[v] for v in different)
    return ProbeJudgement(
        verdict=ProbeVerdict.MATCHES,
        detail=f"mean gap to the trainer {gap.mean:.2g} nats a token",
        gap=gap,
        confirmed=confirmed and bool(different),
    )
