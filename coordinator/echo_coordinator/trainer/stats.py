"""Collects what each row's tokens looked like, across micro-batches, passes and ranks."""

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from echo_coordinator.trainer.metrics import RowStats
from echo_coordinator.trainer.objective.logprobs import TokenLogprobs
from echo_coordinator.trainer.objective.ratio import log_ratio
from echo_coordinator.trainer.packing import Packed
from echo_coordinator.trainer.ranks import Ranks
from echo_coordinator.trainer.rows import Row

_COLUMNS = {column.name: index for index, column in enumerate(fields(RowStats))}


class RowTable:
    """One line for each row of the batch; each line is filled by exactly one rank, so summing merges them."""

    def __init__(self, rows: int) -> None:
        self._table = torch.zeros(rows, len(_COLUMNS), dtype=torch.float64)

    @torch.no_grad()
    def record_start(self, rows: Sequence[Row], packed: Packed, start: TokenLogprobs) -> None:
        """Note how the trainer's policy at the start of the batch compares with the workers'."""
        difference = log_ratio(start.logprobs.detach(), packed.behaviour)
        ratio = difference.exp()
        self._set(rows, "tokens", torch.ones_like(ratio), packed)
        self._set(rows, "ratio_sum", ratio, packed)
        self._set(rows, "ratio_min", ratio, packed, "min")
        self._set(rows, "ratio_max", ratio, packed, "max")
        self._set(rows, "log_ratio_sum", difference, packed)
        self._set(rows, "gap_sum", difference.abs(), packed)
        self._set(rows, "entropy_sum", start.entropy, packed)

    @torch.no_grad()
    def record_pass(self, rows: Sequence[Row], packed: Packed, **values: Tensor) -> None:
        """Add one pass: `clipped`, `capped`, `kl_sum`, `loss`, each [tokens]."""
        self._set(rows, "passes", torch.ones_like(packed.behaviour), packed)
        for name, tensor in values.items():
            self._set(rows, name, tensor, packed)

    def merged(self, ranks: Ranks) -> tuple[RowStats, ...]:
        """Return all rows' figures, of every rank."""
        table = self._table.to(ranks.device)
        ranks.sum(table)
        return tuple(RowStats(**dict(zip(_COLUMNS, line, strict=True))) for line in table.tolist())

    def _set(self, rows: Sequence[Row], column: str, values: Tensor, packed: Packed, reduce: str = "sum") -> None:
        lengths = torch.tensor(packed.lengths, device=values.device)
        per_row = torch.segment_reduce(values.detach().double(), reduce, lengths=lengths).cpu()
        self._table[[row.index for row in rows], _COLUMNS[column]] += per_row
