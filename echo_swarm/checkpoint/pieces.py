"""Which pieces of an artifact are held: a bitmap, as it is kept in memory and sent to others."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from echo_swarm.errors import MalformedMessage

MAX_PACKED_BYTES = 1 << 13
"""65,536 pieces, the most that a manifest can list."""
_AT_ONCE = 512
"""Bits looked at as one number: taking the lowest off costs in proportion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPiece:
    """A piece of another version that has the content wanted."""

    path: Path
    offset: int
    length: int
    wanted: tuple[int, ...]
    """Indexes in the new artifact."""


class PieceMap:
    """A set of piece indexes from 0 to count - 1. Packed: bit i of byte i // 8, lowest bit first, spare bits 0."""

    __slots__ = ("_bits", "_held", "count")

    def __init__(self, count: int) -> None:
        self.count = count
        self._bits = bytearray((count + 7) // 8)
        self._held = 0

    @classmethod
    def full(cls, count: int) -> "PieceMap":
        """Return the map that has every piece."""
        pieces = cls(count)
        pieces._bits[:] = ((1 << count) - 1).to_bytes(len(pieces._bits), "little")
        pieces._held = count
        return pieces

    @classmethod
    def unpack(cls, count: int, packed: bytes) -> "PieceMap":
        """Return the map that a peer sent. Raises MalformedMessage unless it is exactly `count` bits."""
        pieces = cls(count)
        if len(packed) != len(pieces._bits):
            raise MalformedMessage(f"piece map of {len(packed)} bytes, expected {len(pieces._bits)}")
        if count % 8 and packed[-1] >> (count % 8):
            raise MalformedMessage("piece map names pieces beyond the last")
        pieces._bits[:] = packed
        pieces._held = int.from_bytes(packed, "little").bit_count()
        return pieces

    @classmethod
    def of_bits(cls, count: int, bits: int) -> "PieceMap":
        """Return the map of the pieces whose bits are set; see `bits`."""
        return cls.unpack(count, bits.to_bytes((count + 7) // 8, "little"))

    @property
    def bits(self) -> int:
        """The pieces as one number, bit i for piece i: what many pieces have in common costs as much as one."""
        return int.from_bytes(self._bits, "little")

    def pack(self) -> bytes:
        """Return the bytes for the wire."""
        return bytes(self._bits)

    @property
    def held(self) -> int:
        """Number of pieces in the map."""
        return self._held

    @property
    def complete(self) -> bool:
        """Whether no piece is missing."""
        return self._held == self.count

    @property
    def beginning(self) -> int:
        """Number of pieces from the first on, without a gap."""
        bits = self.bits
        return (~bits & (bits + 1)).bit_length() - 1

    def lacks_some_of(self, other: "PieceMap") -> bool:
        """Whether `other` has a piece that this one has not."""
        return bool(other.bits & ~self.bits)

    def common(self, other: "PieceMap") -> int:
        """Return how many pieces are in both."""
        return (self.bits & other.bits).bit_count()

    def differing(self, other: "PieceMap") -> Iterator[int]:
        """Return the indexes that one of both has and the other has not, ascending."""
        return _indexes(self.bits ^ other.bits)

    def __contains__(self, index: int) -> bool:
        return 0 <= index < self.count and bool(self._bits[index >> 3] >> (index & 7) & 1)

    def add(self, index: int) -> None:
        """Add a piece; again is fine."""
        if not 0 <= index < self.count:
            raise IndexError(f"piece {index} of {self.count}")
        if index not in self:
            self._bits[index >> 3] |= 1 << (index & 7)
            self._held += 1

    def discard(self, index: int) -> None:
        """Remove a piece if it is there."""
        if index in self:
            self._bits[index >> 3] &= ~(1 << (index & 7)) & 0xFF
            self._held -= 1

    def copy(self) -> "PieceMap":
        """Return an independent copy."""
        return PieceMap.unpack(self.count, self.pack())

    @property
    def lacking(self) -> int:
        """The pieces that are not in the map as one number; see `bits`."""
        return ~self.bits & ((1 << self.count) - 1)

    def missing(self) -> Iterator[int]:
        """Return the indexes that are not in the map, ascending."""
        return _indexes(self.lacking)

    def __iter__(self) -> Iterator[int]:
        return _indexes(self.bits)


def any_of(bits: int, start: int) -> int:
    """Return the index of the first bit that is set from `start` on, or else of the first; one must be."""
    later = bits >> start
    if later == 0:
        start, later = 0, bits
    return start + (later & -later).bit_length() - 1


def _indexes(bits: int) -> Iterator[int]:
    for start in range(0, bits.bit_length(), _AT_ONCE):
        some = bits >> start & ((1 << _AT_ONCE) - 1)
        while some:
            yield start + (some & -some).bit_length() - 1
            some &= some - 1
