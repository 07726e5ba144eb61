"""Draw one token a row, and its log-probability under exactly the distribution that it was drawn from.

For logits z [rows, vocabulary] and temperature T > 0:

    log p = log_softmax(z / T)            float32
    id    = the first i with  sum_{j<=i} p_j  >  u * sum_j p_j,   u uniform in [0, 1)     (inverse CDF)

The sums are in float64, so that the tail of a large vocabulary is not lost to rounding. T = 0 is greedy: the arg max,
log-probability 0. No top-k or top-p: they would change the distribution without changing what is recorded.
"""

from collections.abc import Sequence

import torch

_BELOW_ONE = 1.0 - 2.0**-52
"""A uniform next to 1, times the sum of all probabilities, could round up to the sum itself, beyond which is no id."""


def draw(
    logits: torch.Tensor, temperatures: Sequence[float], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """Draw a token for each row.

    Args:
        logits: [rows, vocabulary], any float type; ids that must not be sampled have been cut off.
        temperatures: one a row, 0 for greedy.
        uniforms: one a row, in [0, 1); ignored for greedy rows.

    Returns:
        Ids and log-probabilities, one a row. A row with NaN or infinite logits has a NaN log-probability.

    """
    logits = logits.float()
    greedy = [t == 0 for t in temperatures]
    if all(greedy):
        return _greedy(logits)
    if len(set(temperatures)) == 1:
        scaled = logits if temperatures[0] == 1 else logits / temperatures[0]
    else:
        scaled = logits / torch.tensor([[t or 1.0] for t in temperatures], device=logits.device)
    logp = torch.log_softmax(scaled, dim=-1)
    cdf = logp.exp().cumsum(dim=-1, dtype=torch.float64)
    u = torch.tensor([value * _BELOW_ONE for value in uniforms], dtype=torch.float64, device=logits.device)
    # Clamped for rows of NaN only.
    ids = torch.searchsorted(cdf, u.unsqueeze(1) * cdf[:, -1:], right=True).clamp_(max=logits.shape[-1] - 1)
    chosen = logp.gather(1, ids).squeeze(1)
    drawn, logprobs = ids.squeeze(1).tolist(), chosen.clamp_(max=0).tolist()
    if any(greedy):
        best, zeros = _greedy(logits)
        for row, is_greedy in enumerate(greedy):
            if is_greedy:
                drawn[row], logprobs[row] = best[row], zeros[row]
    return drawn, logprobs


def token_logprobs(logits: torch.Tensor, ids: Sequence[int], temperature: float) -> list[float]:
    """Return what `draw` would record had it drawn `ids`, one from each row of `logits` [len(ids), vocabulary]."""
    logits = logits.float()
    logp = torch.log_softmax(logits if temperature == 1 else logits / temperature, dim=-1)
    chosen = logp.gather(1, torch.tensor(ids, device=logits.device).unsqueeze(1)).squeeze(1)
    return chosen.clamp_(max=0).tolist()


def _greedy(logits: torch.Tensor) -> tuple[list[int], list[float]]:
    best, ids = logits.max(dim=-1)
    # 0 where the largest logit is finite, NaN (inf - inf) where it is not.
    return ids.tolist(), (best - best).tolist()
