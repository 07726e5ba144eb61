"""Tensors of a safetensors file as blocks of float32 rows, without a tensor library: memory stays at one block."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from echo_coordinator.publisher.gguf.shape import NotConvertible
from echo_swarm.checkpoint.safetensors_file import TensorSpec, read_header

BLOCK_VALUES = 1 << 20
"""Values in a block (4 MiB as float32); a longer row makes a block of its own."""

_STORED = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


class SafetensorsSource:
    """A file opened for reading. Raises MalformedMessage, OSError."""

    def __init__(self, path: Path) -> None:
        header = read_header(path)
        self._tensors = {tensor.name: tensor for tensor in header.tensors}
        self._data = np.memmap(path, dtype=np.uint8, mode="r", offset=0)[header.data_start :]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def blocks(self, name: str, interleaved_heads: int) -> Iterator[NDArray[np.float32]]:
        """Yield a tensor's rows in order, finite, as float32 of shape (rows, columns) or (length,).

        Raises:
            NotConvertible: numbers of another type, or some that are not finite.

        """
        tensor = self._tensors[name]
        rows = self._rows(tensor)
        order = None if not interleaved_heads else interleaved(len(rows), interleaved_heads)
        step = max(1, BLOCK_VALUES // max(1, rows[0].size))
        for start in range(0, len(rows), step):
            chosen = rows[start : start + step] if order is None else rows[order[start : start + step]]
            block = _as_float32(chosen, tensor.dtype)
            if not np.isfinite(block).all():
                raise NotConvertible(f"tensor {name!r} holds numbers that are not finite")
            yield block

    def _rows(self, tensor: TensorSpec) -> NDArray[np.generic]:
        if tensor.dtype not in _STORED:
            raise NotConvertible(f"tensor {tensor.name!r} is {tensor.dtype}; F32, F16 and BF16 are read")
        return self._data[tensor.begin : tensor.end].view(_STORED[tensor.dtype]).reshape(tensor.shape)


def interleaved(rows: int, heads: int) -> NDArray[np.intp]:
    """Return the order that makes the two halves of each head neighbours: 0, d/2, 1, d/2 + 1, ... (d rows a head)."""
    return np.arange(rows).reshape(heads, 2, rows // heads // 2).swapaxes(1, 2).ravel()


def _as_float32(values: NDArray[np.generic], dtype: str) -> NDArray[np.float32]:
    if dtype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)
