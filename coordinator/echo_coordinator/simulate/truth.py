"""What only the simulation knows: which artifact belongs to a version, and what of what was pushed is a lie."""

import hashlib
from dataclasses import dataclass, field

import numpy as np

from echo_swarm import codec

VOCABULARY = 1000
END = 3
USUAL_LOGPROB = -1.0
"""Of every honestly drawn token, and the mean of the distribution it is drawn from."""
_IDS = 1 << 18
_TABLE = np.random.default_rng(0).integers(10, 910, _IDS, dtype="<u4").tobytes()
"""Where completions have their tokens from."""
_END = codec.pack_u32([END])
_USUAL = codec.pack_f32([USUAL_LOGPROB - 1e-4, USUAL_LOGPROB + 1e-4])
_ZERO = codec.pack_f32([0.0])


def artifact(version: int) -> bytes:
    """Return the digest of a version's only file."""
    return hashlib.sha256(b"artifact %d" % version).digest()


def completion(tokens: int, seed: int, *, ended: bool) -> bytes:
    """Return packed token ids that follow from the seed, none of them in a loop, and the end token if it `ended`."""
    first = codec.pack_u32([10 + seed // 900**place % 900 for place in range(4)])
    start = 4 * (seed % (_IDS // 2))
    body = (first + _TABLE[start : start + 4 * tokens])[: 4 * tokens]
    return body[: 4 * (tokens - 1)] + _END if ended else body


def logprobs(tokens: int, *, greedy: bool) -> bytes:
    """Return packed log-probabilities as an honest node has them: close to the trainer's, and not all the same."""
    return _ZERO * tokens if greedy else (_USUAL * (tokens // 2 + 1))[: 4 * tokens]


@dataclass(slots=True)
class Truth:
    """Kept by those who lie, read by those who check."""

    lies: dict[bytes, frozenset[int]] = field(default_factory=dict[bytes, frozenset[int]])
    """By sha256 of the envelope: places in it of trajectories that must never be accepted."""
    improbable: set[bytes] = field(default_factory=set[bytes])
    """Packed token ids whose last token was not drawn from any policy."""

    def tell(self, envelope: bytes, places: frozenset[int]) -> None:
        """Note lies in an envelope."""
        self.lies[hashlib.sha256(envelope).digest()] = places

    def lies_in(self, envelope: bytes) -> frozenset[int]:
        """Return the places of lies in an envelope."""
        return self.lies.get(hashlib.sha256(envelope).digest(), frozenset()) if self.lies else frozenset()
