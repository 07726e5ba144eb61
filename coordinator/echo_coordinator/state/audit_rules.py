"""Which completions are audited, and what the trainer's recomputation of them shows. Pure.

A share is what one peer contributed to one group. Whether it is audited is drawn when the group is complete:

    HMAC(secret, group, peer, what it delivered) < rate      rate = 1 until FREE clean ones in a row, then 1/2, 1/3, ...

so that nobody, the peer included, can know beforehand, and a restart draws the same. What is compared, token by token,
with the very file that the completion names and the temperature of training:

    delta     = claimed log p - recomputed log p                     does it compute what it says?
    surprise  = recomputed log p - its mean over all tokens there    was it drawn from the policy at all?
    stray    = from the seed's uniform to where that token is drawn  was it drawn with the lease's seed?

Honest arithmetic differs by what its class does, and by more where tokens are unlikely. Honest draws have surprises of
mean 0 and known variance, whatever the model. Four tests, thresholds in docs/adr/0011-audits.md:

1. `far`        the mean of |delta| is above what the class may have, with room for short shares; looked at in the
   share alone, and in all audits of the peer together
2. `outlier`    too many tokens are further off than OUTLIER times that: a few numbers were made up
3. `not_drawn`  the sum of the surprises is further from 0 than chance explains: other text, another temperature,
   greedy. Looked at in both ways, too: small cheats add up.
4. `other_seed` the strays are more than the class's arithmetic moves draws: other seeds, of which the best was chosen,
   or somebody else's completions. Of backends that draw by DRAW_BY_SEED only; looked at as `not_drawn` is.
"""

import hashlib
import hmac
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

FREE = 16
"""Clean shares of a newcomer after which its audits become rarer."""
RAREST = 1 / 256
"""However long a peer was clean."""
SHORT = 8
"""Tokens. The mean of so many may be twice as far off as the mean of many."""
OUTLIER = 12.0
"""Times the allowed mean gap that single tokens may be off."""
OUTLIERS = (2, 0.03)
"""Tokens that may be further off than that, and their share of all that may be so beside them."""
SIGMAS = 6.0
"""Standard deviations of the summed surprise."""
SLACK_DOWN = 12.0
"""Nats. What a few very improbable tokens, honestly drawn, may take from the sum."""
SLACK_UP = 3.0
"""Nats. Likely tokens can add far less: at most the entropy each."""
MOST_MOVED = 0.5
"""Share of all draws that arithmetic may move at most, however coarse."""


class AuditVerdict(StrEnum):
    """What an audit showed."""

    CLEAN = "clean"
    FAR = "far"
    """Its log-probabilities are not those of the version it names."""
    OUTLIER = "outlier"
    """Some of its log-probabilities are not."""
    NOT_DRAWN = "not_drawn"
    """Its tokens were not sampled from that version at the run's temperature."""
    OTHER_SEED = "other_seed"
    """Its tokens were not sampled with the seeds of their leases."""
    NOT_AUDITED = "not_audited"
    """The training side could not: no fault of the peer, and nothing in its favour."""


AGAINST = (AuditVerdict.FAR, AuditVerdict.OUTLIER, AuditVerdict.NOT_DRAWN, AuditVerdict.OTHER_SEED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputed:
    """One completion, as claimed and as the trainer has it; arrays of one length, nats."""

    claimed: "array[float]"
    logprobs: "array[float]"
    expected: "array[float]"
    variance: "array[float]"
    below: "array[float]" = field(default_factory=lambda: array("f"))
    """Probability of all ids below each token's. Empty, as the next: the seed cannot be followed."""
    uniforms: "array[float]" = field(default_factory=lambda: array("d"))
    """Of the lease's seed, see `uniforms_of`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Summed surprises and gaps of many tokens."""

    tokens: int = 0
    surprise: float = 0.0
    """Nats."""
    variance: float = 0.0
    """Of the sum if all was drawn honestly."""
    gap: float = 0.0
    """Sum of |delta|, each as a share of what its class might have on average."""

    def __add__(self, other: "Drift") -> "Drift":
        """Return both together."""
        return Drift(
            tokens=self.tokens + other.tokens,
            surprise=self.surprise + other.surprise,
            variance=self.variance + other.variance,
            gap=self.gap + other.gap,
        )

    def is_chance(self, allowed: float) -> bool:
        """Whether honest draws of a class with that mean gap explain it."""
        room = SIGMAS * math.sqrt(self.variance) + allowed * self.tokens
        return -room - SLACK_DOWN <= self.surprise <= room + SLACK_UP


NOTHING = Drift()
"""Of no tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strays:
    """Summed strays of many tokens, in probability: how far each uniform lies outside its token's interval."""

    sum: float = 0.0
    room: float = 0.0
    """What it would be on average if the class's arithmetic moved as many draws as it may."""
    variance: float = 0.0
    """Of that."""

    def __add__(self, other: "Strays") -> "Strays":
        """Return both together."""
        return Strays(sum=self.sum + other.sum, room=self.room + other.room, variance=self.variance + other.variance)

    @property
    def limit(self) -> float:
        """The most that is chance."""
        return self.room + SIGMAS * math.sqrt(self.variance)


NO_STRAYS = Strays()
"""Of no tokens, or where seeds cannot be followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What an audit showed, with its figures."""

    verdict: AuditVerdict
    detail: str
    gap: float = 0.0
    """Mean |delta|, nats a token."""
    bias: float = 0.0
    """Mean delta: above 0, the peer claims more than the trainer finds."""
    drift: Drift = NOTHING
    """Of these tokens."""
    strays: Strays = NO_STRAYS
    """Of these tokens."""


def follow(by_version: Sequence[Recomputed]) -> Recomputed:
    """Return one completion as recomputed with the version that made each token, where weights changed in its middle.

    Nobody says where. So versions, in their order, are laid over the tokens such that what is claimed fits best; they
    never go back. A peer that makes its values up gains little: it is compared with the nearest of a few versions.

    Args:
        by_version: the same completion, whole, with each version that it may have been made with, the oldest first.

    """
    if len(by_version) == 1:
        return by_version[0]
    claimed, costs = by_version[0].claimed, [0.0] * len(by_version)
    came_from: list[list[int]] = []
    for place, said in enumerate(claimed):
        best, sources = 0, list[int]()
        for version in range(len(by_version)):
            best = version if costs[version] < costs[best] else best
            sources.append(best)
        came_from.append(sources)
        costs = [costs[s] + abs(said - by_version[v].logprobs[place]) for v, s in enumerate(sources)]
    version = min(range(len(costs)), key=costs.__getitem__)
    chosen = [0] * len(claimed)
    for place in range(len(claimed) - 1, -1, -1):
        chosen[place], version = version, came_from[place][version]
    return Recomputed(
        claimed=claimed,
        logprobs=array("f", (by_version[v].logprobs[place] for place, v in enumerate(chosen))),
        expected=array("f", (by_version[v].expected[place] for place, v in enumerate(chosen))),
        variance=array("f", (by_version[v].variance[place] for place, v in enumerate(chosen))),
        below=array("f", (by_version[v].below[place] for place, v in enumerate(chosen) if by_version[v].below)),
        uniforms=by_version[0].uniforms,
    )


def uniforms_of(seed: int, count: int) -> "array[float]":
    """Return array('d') of what the first `count` tokens of a completion are drawn with (`DRAW_BY_SEED`)."""
    source = Random(seed)
    return array("d", (source.random() for _ in range(count)))


def strays_of(completions: Sequence[Recomputed], allowed: float) -> Strays:
    """Return how far the seeds' uniforms are from the tokens.

    A uniform that has nothing to do with its token lies b²/2 + t²/2 outside its interval on average, where b and t are
    the probabilities below and above; the square of that is b³/3 + t³/3 on average. Arithmetic that changes a
    log-probability by g moves a boundary by about g times a probability, so a draw across it with a probability of
    that order, and then by no more than that: the sum is of the order of g². A share of `allowed` of all draws, moved
    anywhere, is far more.
    """
    moved = min(MOST_MOVED, allowed)
    strayed = room = variance = 0.0
    for made in completions:
        for below, logprob, uniform in zip(made.below, made.logprobs, made.uniforms, strict=False):
            upto = below + math.exp(logprob)
            above = max(0.0, 1.0 - upto)
            strayed += max(0.0, below - uniform, uniform - upto)
            room += moved * (below**2 + above**2) / 2
            variance += moved * (below**3 + above**3) / 3
    return Strays(sum=strayed, room=room, variance=variance)


def rate(clean: int) -> float:
    """Return the share of a peer's work to audit after so many clean audits in a row."""
    return max(RAREST, 1 / max(1, clean - FREE + 1))


def is_chosen(secret: bytes, group_id: int, peer: str, work: Sequence[bytes], share: float) -> bool:
    """Draw whether a peer's completions of a group are audited.

    Args:
        secret: the run's, known to the coordinator alone.
        group_id: the group.
        peer: who made them.
        work: digests of what it delivered, in the order of the members.
        share: of all draws that are to come out true.

    """
    said = f"{group_id} {peer} ".encode() + b"".join(work)
    drawn = int.from_bytes(hmac.digest(secret, said, hashlib.sha256)[:8], "big")
    return drawn < share * 2**64


def find(
    completions: Sequence[Recomputed], allowed: float, before: Drift, strays_before: Strays = NO_STRAYS
) -> Finding:
    """Judge what one peer claimed.

    Args:
        completions: of one group and one class; at least one token in all.
        allowed: mean gap that the peer's class may have, see `probe_rules.allowed_gap`.
        before: of the peer's clean audits so far.
        strays_before: likewise.

    """
    deltas = [c - r for made in completions for c, r in zip(made.claimed, made.logprobs, strict=True)]
    drift = Drift(
        tokens=len(deltas),
        surprise=math.fsum(r - e for made in completions for r, e in zip(made.logprobs, made.expected, strict=True)),
        variance=math.fsum(v for made in completions for v in made.variance),
        gap=math.fsum(abs(delta) / allowed for delta in deltas),
    )
    gap = math.fsum(map(abs, deltas)) / len(deltas)
    verdict, detail = _verdict(deltas, gap, allowed, drift, before)
    strays = strays_of(completions, allowed)
    if verdict is AuditVerdict.CLEAN and (strayed := _strayed(strays, strays_before)):
        verdict, detail = AuditVerdict.OTHER_SEED, strayed
    bias = math.fsum(deltas) / len(deltas)
    return Finding(verdict=verdict, detail=detail, gap=gap, bias=bias, drift=drift, strays=strays)


def _strayed(strays: Strays, before: Strays) -> str:
    for seen, what in ((strays, "its tokens"), (strays + before, "the tokens of its audits together")):
        if not seen.sum <= seen.limit:
            return (
                f"{what} were not drawn with the seeds of their leases: off by {seen.sum:.3g}, chance {seen.limit:.2g}"
            )
    return ""


def _verdict(
    deltas: Sequence[float], gap: float, allowed: float, drift: Drift, before: Drift
) -> tuple[AuditVerdict, str]:
    count, most = len(deltas), allowed * (1 + SHORT / len(deltas))
    if not gap <= most:
        return AuditVerdict.FAR, f"log-probabilities {gap:.2g} nats a token off over {count} tokens, allowed {most:.2g}"
    together = drift + before
    if not together.gap <= together.tokens + SHORT:
        times = together.gap / together.tokens
        return (
            AuditVerdict.FAR,
            f"its audits together, {together.tokens} tokens: {times:.3g} times as far off as allowed",
        )
    off = sum(not abs(delta) <= OUTLIER * allowed for delta in deltas)
    if off > OUTLIERS[0] + OUTLIERS[1] * count:
        return AuditVerdict.OUTLIER, f"{off} of {count} log-probabilities more than {OUTLIER * allowed:.2g} nats off"
    for seen, what in ((drift, "its tokens"), (together, "the tokens of its audits together")):
        if not seen.is_chance(allowed):
            return AuditVerdict.NOT_DRAWN, (
                f"{what} are {'likelier' if seen.surprise > 0 else 'less likely'} than drawn ones: by "
                f"{abs(seen.surprise):.3g} nats over {seen.tokens}, chance explains {math.sqrt(seen.variance):.2g}"
            )
    return AuditVerdict.CLEAN, f"log-probabilities {gap:.2g} nats a token off over {count} tokens"
