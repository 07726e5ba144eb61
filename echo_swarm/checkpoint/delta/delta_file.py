"""The file of a delta: how one artifact follows from another of the same length, block by block.

    8 bytes  magic                      ECHODLT1
    32       sha256 of the base file
    32       sha256 of the target file
    u64      length of both, in bytes
    u32      bytes of a block, the last may be shorter; a power of two
    u32 x blocks   length of each block's encoding, 0 where base and target are equal
    the encodings, see `block`

Integers are little-endian. The encodings stand alone, so that blocks can be made and applied by several threads, and a
chain of deltas applied to a block at a time: what lies between the first base and the last target is never written.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

from echo_swarm.checkpoint.delta.block import BlockCodec
from echo_swarm.checkpoint.files import read_range
from echo_swarm.errors import LocalFault, MalformedMessage
from echo_swarm.manifest import MAX_ARTIFACT_BYTES, MAX_PIECE_BYTES, Artifact

MAGIC = b"ECHODLT1"
MIN_BLOCK_BYTES = 1 << 16
MAX_BLOCK_BYTES = MAX_PIECE_BYTES
MAX_GROWTH_BYTES = 64
"""What an encoding may have beyond its block, beside a 256th: zstd's own headers."""

_HEAD = struct.Struct("<8s32s32sQI")
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaHeader:
    """What a delta is about."""

    base_digest: bytes
    target_digest: bytes
    size_bytes: int
    """Of base and target."""
    block_bytes: int

    @property
    def block_count(self) -> int:
        """Number of blocks, at least 1."""
        return -(-self.size_bytes // self.block_bytes)

    def block_length(self, number: int) -> int:
        """Return the length of a block."""
        return min(self.block_bytes, self.size_bytes - number * self.block_bytes)

    @property
    def table_start(self) -> int:
        """Offset of the lengths."""
        return _HEAD.size

    @property
    def blocks_start(self) -> int:
        """Offset of the first encoding."""
        return _HEAD.size + _LENGTH.size * self.block_count

    def pack(self) -> bytes:
        """Return the bytes before the table."""
        return _HEAD.pack(MAGIC, self.base_digest, self.target_digest, self.size_bytes, self.block_bytes)


def pack_table(lengths: list[int]) -> bytes:
    """Return the table of lengths."""
    return b"".join(map(_LENGTH.pack, lengths))


class DeltaFile:
    """A delta on disk. Its blocks may be read from several threads.

    Args:
        path: of the file, whose bytes are those that the run's key signed.
        delta: its description.

    Raises:
        MalformedMessage: it is none, or not about what its description says.
        LocalFault: it cannot be read.

    """

    def __init__(self, path: Path, delta: Artifact) -> None:
        self._path = path
        self.header = _read_header(self._read(0, _HEAD.size))
        if self.header.base_digest != delta.base_digest or self.header.target_digest != delta.target_digest:
            raise MalformedMessage("delta: it leads from or to another file than its description says")
        self._offsets = self._read_table(delta.size_bytes)

    def apply(self, number: int, base: bytes | memoryview, codec: BlockCodec) -> bytes | memoryview:
        """Return a block of the target. `base` is the same block of the base.

        Raises:
            MalformedMessage: the block is no encoding.
            LocalFault: it cannot be read.

        """
        start, end = self._offsets[number], self._offsets[number + 1]
        return codec.decode(base, self._read(start, end - start) if end > start else b"")

    def _read_table(self, size: int) -> list[int]:
        """Return where each encoding starts, and where the last one ends."""
        header = self.header
        if header.blocks_start > size:
            raise MalformedMessage(f"delta: {size} bytes are too few for {header.block_count} blocks")
        table = self._read(header.table_start, header.blocks_start - header.table_start)
        offsets = [header.blocks_start]
        for number, (length,) in enumerate(_LENGTH.iter_unpack(table)):
            block = header.block_length(number)
            if length > block + block // 256 + MAX_GROWTH_BYTES:
                raise MalformedMessage(f"delta: block {number} of {block} bytes is encoded in {length}")
            offsets.append(offsets[-1] + length)
        if offsets[-1] != size:
            raise MalformedMessage(f"delta: {size} bytes, its blocks end at {offsets[-1]}")
        return offsets

    def _read(self, offset: int, length: int) -> bytes:
        data = read_range(self._path, offset, length)
        if data is None:
            raise LocalFault(f"{self._path} is gone, or shorter than it was")
        return data


def _read_header(data: bytes) -> DeltaHeader:
    if len(data) < _HEAD.size or not data.startswith(MAGIC):
        raise MalformedMessage("delta: the file does not begin like one")
    _, base_digest, target_digest, size_bytes, block_bytes = _HEAD.unpack(data)
    if not 1 <= size_bytes <= MAX_ARTIFACT_BYTES:
        raise MalformedMessage(f"delta: between files of {size_bytes} bytes")
    if not MIN_BLOCK_BYTES <= block_bytes <= MAX_BLOCK_BYTES or block_bytes & (block_bytes - 1):
        raise MalformedMessage(f"delta: blocks of {block_bytes} bytes")
    return DeltaHeader(
        base_digest=base_digest, target_digest=target_digest, size_bytes=size_bytes, block_bytes=block_bytes
    )
