"""GGUF files written by hand, right ones and wrong ones."""

import struct
from collections.abc import Sequence

SIZES = {
    "block_count": 1,
    "context_length": 64,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 2,
    "vocab_size": 8,
}
TENSORS = (("token_embd.weight", (32, 8), 8, 8 * 34), ("output_norm.weight", (32,), 0, 128))
"""(name, dimensions in GGUF's order, type, bytes)."""


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str | bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def standard_keys(architecture: str = "llama") -> list[bytes]:
    return [
        key("general.architecture", 8, text(architecture)),
        key("tokenizer.ggml.model", 8, text("no_vocab")),
        *[key(f"{architecture}.{name}", 4, struct.pack("<I", value)) for name, value in SIZES.items()],
    ]


def tensor(name: str | bytes, dimensions: Sequence[int], kind: int, begin: int) -> bytes:
    sizes = struct.pack(f"<{len(dimensions)}Q", *dimensions)
    return text(name) + struct.pack("<I", len(dimensions)) + sizes + struct.pack("<IQ", kind, begin)


def standard_tensors() -> list[bytes]:
    found, begin = [], 0
    for name, dimensions, kind, size in TENSORS:
        found.append(tensor(name, dimensions, kind, begin))
        begin += -(-size // 32) * 32
    return found


def gguf_bytes(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    keys: Sequence[bytes] | None = None,
    tensors: Sequence[bytes] | None = None,
    key_count: int | None = None,
    tensor_count: int | None = None,
    data: bytes | None = None,
    seed: int = 0,
) -> bytes:
    """Return a whole file; the standard one unless told otherwise. `seed` changes its numbers."""
    keys = standard_keys() if keys is None else keys
    tensors = standard_tensors() if tensors is None else tensors
    counts = (
        len(tensors) if tensor_count is None else tensor_count,
        len(keys) if key_count is None else key_count,
    )
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)
    if data is None:
        data = bytes([seed]) * sum(-(-size // 32) * 32 for *_, size in TENSORS)
    return header + bytes(-len(header) % 32) + data
