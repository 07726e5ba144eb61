"""How nodes lie. Each kind changes what an honest node would sign, or what it does with it."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from echo_coordinator.simulate.scenario import LiarKind
from echo_coordinator.simulate.truth import Truth, artifact, completion
from echo_swarm import codec
from echo_swarm.envelope import seal
from echo_swarm.identity import Identity
from echo_swarm.trajectory import Submission, Trajectory
from echo_swarm.work import Lease

NEVER_ACCEPTED: frozenset[LiarKind] = frozenset({"future", "wrong_prompt", "wrong_seed"})
"""What these sign is a lie whenever it is pushed."""
_OVERHEARD = 64


@dataclass(slots=True, kw_only=True)
class Behaviour:
    """One node's way. With kind None it is honest."""

    kind: LiarKind | None
    max_staleness: int
    truth: Truth
    draws: random.Random
    overheard: deque[Lease] = field(default_factory=lambda: deque(maxlen=_OVERHEARD))
    """Leases of other nodes, shared by all thieves."""

    @property
    def samples(self) -> bool:
        """Whether it does any of the work that it takes."""
        return self.kind != "hoarder"

    @property
    def boast(self) -> float:
        """Factor on what it claims to be able to do."""
        return 1000.0 if self.kind == "hoarder" else 1.0

    def length(self, tokens: int, lease: Lease) -> int:
        """Return how long a completion is made that would honestly be so long."""
        return min(tokens, 3) if self.kind == "early" and lease.sampling.temperature else tokens

    def sign(self, fields: dict[str, Any], lease: Lease) -> dict[str, Any]:
        """Return the fields of a trajectory as this node signs them."""
        policy = fields["policy"]
        if self.kind == "stale" and (old := policy.oldest_version - self.max_staleness - 1) >= 0:
            changes = {"oldest_version": old, "newest_version": old, "artifact_digest": artifact(old)}
            return {**fields, "policy": policy.model_copy(update=changes)}
        if self.kind == "future":
            new = policy.newest_version + 1000
            changes = {"oldest_version": new, "newest_version": new, "artifact_digest": artifact(new)}
            return {**fields, "policy": policy.model_copy(update=changes)}
        if self.kind == "wrong_prompt":
            return {**fields, "prompt_digest": bytes(32)}
        if self.kind == "wrong_seed":
            return {**fields, "seed": fields["seed"] ^ 1}
        if self.kind == "wrong_model" and fields["temperature"]:
            tokens = len(fields["logprobs"]) // 4
            return {**fields, "logprobs": codec.pack_f32([-2.0]) * tokens}
        if self.kind == "early" and fields["temperature"]:
            self.truth.improbable.add(fields["token_ids"])
        if self.kind == "thief" and self.overheard:
            stolen = self.draws.choice(self.overheard)
            member = stolen.members[0]
            changes = {"lease_id": stolen.lease_id, "group_id": stolen.group_id, "member": member.member}
            return {**fields, **changes, "seed": member.seed}
        return fields

    def lies_in(self, ripe: Sequence[tuple[Trajectory, Lease]]) -> frozenset[int]:
        """Return the places of trajectories that must never be accepted, beside the leases they were made for."""
        return frozenset(place for place, (made, lease) in enumerate(ripe) if self._is_lie(made, lease))

    def _is_lie(self, made: Trajectory, lease: Lease) -> bool:
        if self.kind == "thief":
            return made.lease_id != lease.lease_id
        if self.kind == "stale":
            return made.policy.oldest_version < lease.min_version
        return self.kind in NEVER_ACCEPTED

    def pushes_beside(self, identity: Identity, run_id: str, sent: Submission, envelope: bytes) -> list[bytes]:
        """Return what else it pushes after all of `sent` was accepted."""
        if self.kind == "garbage":
            return [self.draws.randbytes(200) for _ in range(3)]
        if self.kind != "replay":
            return []
        changed = [
            made.model_copy(
                update={
                    "token_ids": completion(
                        len(made.token_ids) // 4, self.draws.getrandbits(40), ended=_has_ended(made)
                    )
                }
            )
            for made in sent.trajectories
        ]
        other = seal(identity, Submission(run_id=run_id, trajectories=tuple(changed)))
        different = (i for i, made in enumerate(changed) if made.token_ids != sent.trajectories[i].token_ids)
        self.truth.tell(other, frozenset(different))
        return [envelope, other, envelope]


def _has_ended(made: Trajectory) -> bool:
    return cast(str, made.finish_reason) == "stop"
