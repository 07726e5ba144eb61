"""Made-up versions of a model: safetensors files of one layout, of random bfloat16 numbers."""

import json
import struct
from pathlib import Path

import numpy as np

TENSOR_BYTES = 1_000_000
CHANGED_SHARE = 0.01
"""Of the numbers in a version with a small delta; each by its last bit."""


def write_version(path: Path, *, megabytes: int, seed: int) -> None:
    """Write a version that has nothing in common with those of other seeds."""
    count = megabytes * 1_000_000 // TENSOR_BYTES
    random = np.random.default_rng(seed)
    with path.open("wb") as file:
        file.write(_header(count))
        for _ in range(count):
            file.write(random.bytes(TENSOR_BYTES))


def write_similar(path: Path, like: Path, *, seed: int) -> None:
    """Write a version in which a small share of another's numbers is changed."""
    content = bytearray(like.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    numbers = np.frombuffer(content, dtype="<u2", offset=8 + length)
    random = np.random.default_rng(seed)
    changed = random.choice(len(numbers), size=int(CHANGED_SHARE * len(numbers)), replace=False)
    numbers[changed] ^= 1
    path.write_bytes(content)


def _header(count: int) -> bytes:
    tensors = {
        f"layer.{i}": {
            "dtype": "BF16",
            "shape": [TENSOR_BYTES // 2],
            "data_offsets": [i * TENSOR_BYTES, (i + 1) * TENSOR_BYTES],
        }
        for i in range(count)
    }
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
