"""KL divergence to a frozen reference model, estimated from the sampled token (Schulman's k3).

    k3 = exp(d) - d - 1,   d = log π_ref - log π        (>= 0; 0 when both agree)

It acts on every trained token, whatever its advantage: a group without signal is still pulled towards the reference.
"""

import torch
from torch import Tensor

from echo_coordinator.trainer.objective.ratio import log_ratio


def kl_term(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return k3 of each token, [tokens], with gradient through `logprobs`."""
    difference = log_ratio(reference, logprobs)
    return torch.exp(difference) - difference - 1
