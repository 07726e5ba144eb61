"""The keys and values of a running batch: one row a sequence, each row filled from column 0 to its own length.

    kv      [layers, 2, rows, kv_heads, columns, head_dim]     0: keys, 1: values
    lengths rows → tokens stored

A decoding step writes one column a row, each at its own place, and attends to columns < length under a mask. So rows
of different lengths need no common padding, a finished row is replaced by copying one prompt over it, and nothing is
concatenated. Rows are kept dense (0 .. rows-1): the last one moves into a hole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from transformers.cache_utils import Cache

COLUMN_STEP = 64
"""Columns are added in multiples of this, by at least a half, so that growing costs little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptState:
    """A prompt after its forward pass, ready to be copied into any number of rows."""

    kv: torch.Tensor
    """[layers, 2, kv_heads, length, head_dim]"""
    logits: torch.Tensor
    """[vocabulary], for the token after the prompt."""

    def alone(self) -> Self:
        """Return the same in memory of its own: as it was made, it keeps its whole forward pass in memory."""
        if self.kv.untyped_storage().nbytes() == self.kv.numel() * self.kv.element_size():
            return self
        return replace(self, kv=self.kv.clone(), logits=self.logits.clone())


class RowCache(Cache):
    """What the model sees as its cache during a decoding step."""

    def __init__(self) -> None:
        # The base class's constructor builds per-layer objects; here one tensor holds all layers.
        self.layers = []
        self.layer_class_to_replicate = None
        self.offloading = False
        self.lengths: list[int] = []
        self._kv: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._row_index: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None
        self._columns: torch.Tensor | None = None
        self._window = 0

    # What the model calls.

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store one column a row ([rows, kv_heads, 1, head_dim]) and return all columns that any row can see."""
        assert self._kv is not None
        keys, values = self._kv[layer_idx, 0], self._kv[layer_idx, 1]
        keys[self._row_index, :, self._positions] = key_states[:, :, 0]
        values[self._row_index, :, self._positions] = value_states[:, :, 0]
        rows = len(self.lengths)
        return keys[:rows, :, : self._window], values[:rows, :, : self._window]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before this step's. Positions and mask are always given, so that no model derives them from it."""
        return self._window - 1

    # What the engine calls.

    def begin_step(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Prepare a step for all rows.

        Returns:
            Position ids [rows, 1] and mask [rows, 1, 1, columns], True where a column is seen.

        """
        self._window = max(self.lengths) + 1
        self._reserve(len(self.lengths), self._window)
        assert self._rows is not None and self._columns is not None
        self._positions = torch.tensor(self.lengths, device=device)
        self._row_index = self._rows[: len(self.lengths)]
        positions = self._positions.unsqueeze(1)
        mask = self._columns[: self._window] <= positions
        return positions, mask[:, None, None, :]

    def end_step(self) -> None:
        """Count the column that the step wrote. Not called when the step failed: it can then be repeated."""
        self.lengths = [length + 1 for length in self.lengths]

    def add(self, prompt: PromptState) -> int:
        """Copy a prompt into a new last row and return its index."""
        length = prompt.kv.shape[3]
        row = len(self.lengths)
        self._like(prompt.kv)
        self._reserve(row + 1, length + 1)
        assert self._kv is not None
        self._kv[:, :, row, :, :length] = prompt.kv
        self.lengths.append(length)
        return row

    def remove(self, row: int, *, scrub: bool = False) -> int:
        """Drop a row; the last row takes its place. Returns the index that the moved row had.

        `scrub` a row that holds NaN: masked columns still enter a product with weight 0, and 0 * NaN is NaN.
        """
        assert self._kv is not None
        last = len(self.lengths) - 1
        if scrub:
            self._kv[:, :, row] = 0
        if row != last:
            length = self.lengths[last]
            self._kv[:, :, row, :, :length] = self._kv[:, :, last, :, :length]
            self.lengths[row] = length
        self.lengths.pop()
        return last

    def clear(self) -> None:
        """Drop all rows and give the memory back."""
        self.lengths = []
        self._kv = self._positions = self._row_index = self._rows = self._columns = None

    def _like(self, kv: torch.Tensor) -> None:
        if self._kv is None:
            layers, two, heads, _, dim = kv.shape
            self._kv = kv.new_zeros((layers, two, 0, heads, 0, dim))

    def _reserve(self, rows: int, columns: int) -> None:
        assert self._kv is not None
        layers, two, had_rows, heads, had_columns, dim = self._kv.shape
        if rows <= had_rows and columns <= had_columns:
            return
        if columns > had_columns:
            columns = max(columns, had_columns + had_columns // 2)
            columns = -(-columns // COLUMN_STEP) * COLUMN_STEP
        if rows > had_rows:
            rows = max(rows, 2 * had_rows)
        # Zeros, not garbage, for the reason given in `remove`.
        grown = self._kv.new_zeros((layers, two, max(rows, had_rows), heads, max(columns, had_columns), dim))
        grown[:, :, :had_rows, :, :had_columns] = self._kv
        self._kv = grown
        self._rows = torch.arange(grown.shape[2], device=grown.device)
        self._columns = torch.arange(grown.shape[4], device=grown.device)


def split_prompts(
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]], logits: torch.Tensor, lengths: Sequence[int]
) -> list[PromptState]:
    """Cut a forward pass over right-padded prompts into one state a prompt.

    Args:
        layers: keys and values [prompts, kv_heads, padded, head_dim] of each layer.
        logits: [prompts, vocabulary], already taken at each prompt's last token.
        lengths: tokens of each prompt.

    """
    stacked = torch.stack([torch.stack(pair) for pair in layers])
    return [PromptState(kv=stacked[:, :, i, :, :length], logits=logits[i]) for i, length in enumerate(lengths)]
