"""Log-probabilities of the sampled tokens under a model, as the sampler defines them.

log π(token) = log softmax(logits / temperature)[token]       in float32, over the whole vocabulary
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from echo_coordinator.trainer.packing import Packed

_ENTROPY_TOKENS = 512
"""Computed piece by piece: with a large vocabulary, each further copy of all logits is gigabytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Of the completion tokens of the packed rows, in order; both [tokens], float32."""

    logprobs: Tensor
    entropy: Tensor
    """Of the distribution each token was drawn from, in nats; without gradient."""


def token_logprobs(model: torch.nn.Module, packed: Packed, temperature: float, *, autocast: bool) -> TokenLogprobs:
    """Run the model over `packed` and return what it gives to the completion tokens."""
    with torch.autocast(packed.input_ids.device.type, dtype=torch.bfloat16, enabled=autocast):
        # Rows are padded on the right, where a causal model's earlier positions never look: no mask is needed.
        logits = model(input_ids=packed.input_ids, use_cache=False, logits_to_keep=packed.kept).logits
    return from_logits(logits[packed.predicts], packed.targets, temperature)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpread:
    """How likely the completion tokens are, and how likely drawn ones would be; all [tokens], float32."""

    logprobs: Tensor
    expected: Tensor
    """Mean of the log-probability of a token drawn there: minus the entropy."""
    variance: Tensor
    """Of the same."""
    below: Tensor
    """Probability of all ids below that token's: where inverse-CDF sampling draws it from, up to its probability."""


@torch.no_grad()
def token_spread(model: torch.nn.Module, packed: Packed, temperature: float, *, autocast: bool) -> TokenSpread:
    """Run the model over `packed` as `token_logprobs` does, for audits."""
    with torch.autocast(packed.input_ids.device.type, dtype=torch.bfloat16, enabled=autocast):
        logits = model(input_ids=packed.input_ids, use_cache=False, logits_to_keep=packed.kept).logits
    found: list[tuple[Tensor, ...]] = []
    pieces = zip(logits[packed.predicts].split(_ENTROPY_TOKENS), packed.targets.split(_ENTROPY_TOKENS), strict=True)
    for piece, targets in pieces:
        log_softmax = torch.log_softmax(piece.float() / temperature, dim=-1)
        chosen = log_softmax.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        probabilities = log_softmax.exp()
        # What cannot be drawn counts nothing: 0 x -infinity is no number.
        finite = log_softmax.masked_fill(probabilities == 0, 0.0)
        mean = (probabilities * finite).sum(-1)
        variance = (probabilities * (finite - mean.unsqueeze(-1)) ** 2).sum(-1)
        ids = torch.arange(piece.shape[-1], device=piece.device)
        below = probabilities.masked_fill(ids >= targets.unsqueeze(-1), 0.0).sum(-1)
        found.append((chosen, mean, variance, below))
    logprobs, expected, variance, below = (torch.cat(column) for column in zip(*found, strict=True))
    return TokenSpread(logprobs=logprobs, expected=expected, variance=variance, below=below)


def from_logits(logits: Tensor, targets: Tensor, temperature: float) -> TokenLogprobs:
    """Return log-probabilities and entropy. `logits`: [tokens, vocabulary]; `targets`: [tokens] int64."""
    log_softmax = torch.log_softmax(logits.float() / temperature, dim=-1)
    chosen = log_softmax.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        pieces = log_softmax.detach().split(_ENTROPY_TOKENS)
        entropy = torch.cat([torch.special.entr(piece.exp()).sum(-1) for piece in pieces])
    return TokenLogprobs(logprobs=chosen, entropy=entropy)
