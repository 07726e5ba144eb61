"""Looks at completions that fit their lease: what hardly any honest sampler delivers (docs/adr/0017-plausibility.md).

    copied      refused   the very tokens were accepted before, though they say themselves that this cannot be chance
    certain     audited   claims that every token was all but sure
    constant    audited   claims the same probability for each token
    loop        audited   ends in a short phrase over and over
    known       audited   the tokens were accepted before as improbable ones, and are claimed to be probable now

Only `copied` is a verdict, since its chance is bounded without knowing any model. The other signs happen to honest
models too: they make an audit certain, and the audit decides. All are pure functions but for the bounded memory.
"""

import hashlib
from collections import OrderedDict
from typing import Any

import numpy as np

from echo_coordinator.state.counters import WORK, Counters
from echo_coordinator.state.intake_rules import ACCEPTED, Judgement
from echo_swarm.trajectory import Reason, Trajectory

MEMORY = 65_536
"""Completions whose tokens are remembered, and as many signs."""
COPY_NATS = 32.0
"""A draw is one of MEMORY given texts, each of a probability below exp(-32), with probability 8e-10 at most."""
CERTAIN_TOKENS = 32
CERTAIN_NATS = 1e-6
"""A token: less than float32 can tell from a probability of 1 by much."""
CONSTANT_TOKENS = 8
LOOP_TOKENS = 64
LOOP_PERIOD = 16

F32 = np.ndarray[Any, np.dtype[np.float32]]
U32 = np.ndarray[Any, np.dtype[np.uint32]]


def nats(logprobs: F32) -> float:
    """Return how improbable a completion calls itself: minus the sum of its log-probabilities.

    By its own word: whoever makes up the values chooses this. That they are true is for an audit to show.
    """
    return -float(logprobs.sum(dtype=np.float64))


def is_certain(logprobs: F32) -> bool:
    """Whether at least CERTAIN_TOKENS tokens are all claimed to have been sure: a greedy sampler, or values left out.

    Says nothing of a model that has learnt one answer by heart: such a one is as sure, honestly.
    """
    return len(logprobs) >= CERTAIN_TOKENS and float(logprobs.min()) >= -CERTAIN_NATS


def is_constant(logprobs: F32) -> bool:
    """Whether at least CONSTANT_TOKENS tokens are claimed to be equally likely, to the last bit, and not sure.

    Distributions that differ give such values by chance hardly ever. Says nothing of made-up values that vary.
    """
    highest = float(logprobs.max())
    return len(logprobs) >= CONSTANT_TOKENS and highest < -CERTAIN_NATS and highest == float(logprobs.min())


def is_loop(ids: U32) -> bool:
    """Whether the last LOOP_TOKENS tokens repeat a phrase of at most LOOP_PERIOD.

    The cheapest long completion there is; small models fall into such loops honestly, too.
    """
    if len(ids) < LOOP_TOKENS:
        return False
    tail = ids[-LOOP_TOKENS:]
    last = int(tail[-1])
    return any(
        int(tail[-1 - period]) == last and bool((tail[period:] == tail[:-period]).all())
        for period in range(1, LOOP_PERIOD + 1)
    )


class Plausibility:
    """Looks at what is accepted for training, and remembers the newest of it. Forgotten at a restart."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._seen: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """Digest of improbable token ids → group and member that they were first delivered for.

        Who delivers them for the same one again is no copier: what could not be stored is drawn again with its seed.
        """
        self._signs: OrderedDict[tuple[int, int], str] = OrderedDict()

    def look(self, made: Trajectory) -> Judgement:
        """Return ACCEPTED, or that this is a copy; note what makes an audit certain."""
        logprobs = np.frombuffer(made.logprobs, dtype="<f4")
        ids = np.frombuffer(made.token_ids, dtype="<u4")
        digest, place = hashlib.sha256(made.token_ids).digest()[:16], (made.group_id, made.member)
        improbable = nats(logprobs)
        known = self._seen.get(digest, place) != place
        if known and improbable > COPY_NATS:
            detail = f"these {len(ids)} tokens were delivered before; by their own log-probabilities that is no chance"
            return Judgement(reason=Reason.COPIED, detail=detail)
        if improbable > COPY_NATS:
            _keep(self._seen, digest, place)
        if sign := "known" if known else self._sign(logprobs, ids):
            _keep(self._signs, (made.group_id, made.member), sign)
            self._counters.add(WORK, f"sign_{sign}")
        return ACCEPTED

    def forget(self, tokens_digest: bytes) -> None:
        """Let others deliver these tokens (`Work.tokens_digest`): whoever did so first was found out."""
        self._seen.pop(tokens_digest, None)

    def is_suspicious(self, group_id: int, member: int) -> bool:
        """Whether a completion bears a sign that asks for an audit."""
        return (group_id, member) in self._signs

    def _sign(self, logprobs: F32, ids: U32) -> str:
        if is_certain(logprobs):
            return "certain"
        if is_constant(logprobs):
            return "constant"
        return "loop" if is_loop(ids) else ""


def _keep(memory: "OrderedDict[Any, Any]", key: object, value: object) -> None:
    memory[key] = value
    if len(memory) > MEMORY:
        memory.popitem(last=False)
