"""Rows to tensors. Completions are laid end to end in flat tensors; only the model's input is padded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echo_coordinator.trainer.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One forward pass: n rows, padded width T, tokens = Σ completion lengths."""

    input_ids: Tensor
    """[n, T] int64, right-padded."""
    kept: int
    """Logits are needed for the last `kept` positions only."""
    predicts: Tensor
    """[n, kept] bool: the positions whose logits predict a completion token."""
    targets: Tensor
    """[tokens] int64."""
    behaviour: Tensor
    """[tokens] float32: the worker's log-probabilities."""
    advantage: Tensor
    """[tokens] float32."""
    lengths: list[int]
    """Completion tokens of each row."""


def pack(rows: Sequence[Row], device: torch.device) -> Packed:
    """Return the tensors of `rows` (at least one)."""
    width = max(len(row.tokens) for row in rows)
    first = min(row.prompt_length for row in rows) - 1
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    predicts = torch.zeros(len(rows), width - first, dtype=torch.bool)
    for index, row in enumerate(rows):
        input_ids[index, : len(row.tokens)] = torch.tensor(row.tokens.tolist())
        # The logits at position t predict the token at t + 1.
        start = row.prompt_length - 1 - first
        predicts[index, start : start + row.length] = True
    lengths = [row.length for row in rows]
    targets = [token for row in rows for token in row.tokens[row.prompt_length :]]
    behaviour = [value for row in rows for value in row.behaviour]
    return Packed(
        input_ids=input_ids.to(device),
        kept=width - first,
        predicts=predicts.to(device),
        targets=torch.tensor(targets, dtype=torch.int64, device=device),
        behaviour=torch.tensor(behaviour, dtype=torch.float32, device=device),
        advantage=per_token([row.advantage for row in rows], lengths, device),
        lengths=lengths,
    )


def per_token(values: Sequence[float], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Repeat each row's value for each of its tokens: [tokens] float32."""
    return torch.repeat_interleave(torch.tensor(values, dtype=torch.float32), torch.tensor(lengths)).to(device)
