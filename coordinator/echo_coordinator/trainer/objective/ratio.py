"""Ratios of token probabilities, from differences of log-probabilities that are clamped first."""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""e^20 is 5e8: far beyond any clip, and safely inside float32, so one absurd log-probability makes no infinity."""


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return log π_a - log π_b, token by token, clamped to ±20 (no gradient beyond)."""
    return torch.clamp(numerator - denominator, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def truncated_weight(proximal: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    """Return min(π_prox / π_behave, cap) without gradient: truncated importance sampling (Espeholt et al., V-trace)."""
    return torch.clamp(torch.exp(log_ratio(proximal, behaviour)).detach(), max=cap)
