"""The clipped policy-gradient term of one token.

Coupled (PPO, GRPO). The denominator is what the worker recorded, so staleness and the worker's arithmetic are both in
the ratio; recomputing it with the trainer's weights would silently cancel the correction:

    r = min(π / π_behave, C)
    term = -min( r·A,  clip(r, 1 - low, 1 + high)·A )

Decoupled (Hilton et al., arXiv 2110.00641; used for asynchronous training in arXiv 2505.24298). The clip is around the
trainer's own policy at the start of the batch; the worker is corrected for by a truncated weight without gradient:

    u = π / π_prox,   w = min(π_prox / π_behave, C)
    term = -w · min( u·A,  clip(u, 1 - low, 1 + high)·A )

C is `importance_cap`; None leaves r unbounded, and w at 1. low < high is DAPO's asymmetric clip (arXiv 2503.14476).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from echo_coordinator.trainer.objective.ratio import log_ratio, truncated_weight
from echo_coordinator.trainer.settings import ObjectiveSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerm:
    """All [tokens]."""

    loss: Tensor
    """To be weighted and summed; carries the gradient."""
    clipped: Tensor
    """bool: the clip is what the minimum chose, so the token gives no gradient."""
    capped: Tensor
    """bool: the importance weight was truncated."""


def policy_term(
    logprobs: Tensor, *, behaviour: Tensor, proximal: Tensor, advantage: Tensor, settings: ObjectiveSettings
) -> PolicyTerm:
    """Return the policy term. All inputs [tokens], float32.

    Args:
        logprobs: of the weights being trained; with gradient.
        behaviour: the worker's.
        proximal: the trainer's at the start of the batch; without gradient.
        advantage: that of each token's completion.
        settings: clip range, cap, coupled or decoupled.

    """
    cap = settings.importance_cap
    if settings.decoupled:
        weight = torch.ones_like(behaviour) if cap is None else truncated_weight(proximal, behaviour, cap)
        capped = torch.zeros_like(behaviour, dtype=torch.bool) if cap is None else weight >= cap
        ratio = torch.exp(log_ratio(logprobs, proximal))
    else:
        weight = torch.ones_like(behaviour)
        ratio = torch.exp(log_ratio(logprobs, behaviour))
        capped = torch.zeros_like(behaviour, dtype=torch.bool) if cap is None else ratio > cap
        ratio = ratio if cap is None else torch.clamp(ratio, max=cap)
    clipped_ratio = torch.clamp(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
    plain, clipped = ratio * advantage, clipped_ratio * advantage
    return PolicyTerm(loss=-weight * torch.minimum(plain, clipped), clipped=clipped < plain, capped=capped.detach())
