"""Canonical msgpack with limits: one value has one encoding, and no input can make us allocate beyond its size.

Rules of the encoding: maps have string keys in ascending order of their UTF-8 bytes, numbers take their shortest
form, floats are 64 bit, no extension types. `decode` refuses everything else, in this order: the size; then, walking
over the headers alone and before any value is built, depth, number of items, unknown types and a wrong length; then
text that is no UTF-8, keys that are no strings or stand twice; then (for signed data) any other encoding of the same
value.
"""

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]

from echo_swarm.errors import MalformedMessage

_msgpack: Any = msgpack
"""The library ships no types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a reader is willing to accept."""

    max_bytes: int
    """Whole encoded message."""
    max_items: int = 65_536
    """Entries of all lists and maps together; a map's entry is a key and a value and counts 2. An item can take some
    100 bytes of memory, whatever its length on the wire."""
    max_depth: int = 12
    """Nesting of lists and maps; a flat map has depth 1."""


SMALL = Limits(max_bytes=64 * 1024)
"""For control messages and directory records."""


def encode(value: object, *, canonical: bool = True) -> bytes:
    """Return the encoding of `value` (None, bool, int, float, str, bytes, list/tuple, dict with str keys).

    Args:
        value: what to encode.
        canonical: sort the keys of maps. False, in a sixth of the time, for what is neither signed nor hashed; whether
            keys are strings is then seen by the reader alone.

    Raises:
        TypeError: a value of another type, or (canonical) a map key that is no string.

    """
    return cast(bytes, _msgpack.packb(_sorted(value) if canonical else value, use_bin_type=True))


def decode(data: bytes | memoryview, limits: Limits, *, canonical: bool = True) -> Any:
    """Return the value encoded in `data`.

    Args:
        data: exactly one encoded value; trailing bytes are refused.
        limits: sizes checked before anything is allocated.
        canonical: also refuse any other encoding of the same value. Needed wherever bytes are signed or hashed.

    Raises:
        MalformedMessage: with what is wrong.

    """
    if len(data) > limits.max_bytes:
        raise MalformedMessage(f"message of {len(data)} bytes, limit {limits.max_bytes}")
    if canonical:
        data = bytes(data)
    _check_structure(data, limits)
    try:
        value: Any = _msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_ordered_map if canonical else _unique_map,
            max_str_len=len(data),
            max_bin_len=len(data),
            max_array_len=limits.max_items,
            max_map_len=limits.max_items,
            max_ext_len=0,
        )
    except (ValueError, TypeError, _msgpack.UnpackException) as e:
        raise MalformedMessage(f"not a msgpack message: {e or type(e).__name__}") from e
    # The keys are in order already, so packing gives the canonical form.
    if canonical and _msgpack.packb(value, use_bin_type=True) != data:
        raise MalformedMessage("not in canonical form")
    return value


def pack_u32(values: Iterable[int]) -> bytes:
    """Pack token ids as little-endian unsigned 32-bit integers.

    Raises:
        OverflowError: an id below 0 or above 2**32 - 1.

    """
    return _to_little_endian(array("I", values))


def unpack_u32(data: bytes) -> "array[int]":
    """Inverse of `pack_u32`. Raises MalformedMessage when the length is no multiple of 4."""
    return cast("array[int]", _from_little_endian("I", data))


def pack_f32(values: Iterable[float]) -> bytes:
    """Pack log-probabilities as little-endian 32-bit floats."""
    return _to_little_endian(array("f", values))


def unpack_f32(data: bytes) -> "array[float]":
    """Inverse of `pack_f32`. Raises MalformedMessage when the length is no multiple of 4."""
    return cast("array[float]", _from_little_endian("f", data))


def _to_little_endian(values: "array[Any]") -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _from_little_endian(typecode: str, data: bytes) -> "array[Any]":
    values: array[Any] = array(typecode)
    if len(data) % values.itemsize:
        raise MalformedMessage(f"packed array of {len(data)} bytes, not a multiple of {values.itemsize}")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _unique_map(pairs: list[tuple[object, object]]) -> dict[str, object]:
    result = cast("dict[str, object]", dict(pairs))
    for key in result:
        if type(key) is not str:
            raise MalformedMessage(f"map key of type {type(key).__name__}, expected a string")
    if len(result) != len(pairs):
        raise MalformedMessage("a map key stands twice")
    return result


def _ordered_map(pairs: list[tuple[object, object]]) -> dict[str, object]:
    result = _unique_map(pairs)
    keys = list(result)
    # Python orders strings by code point, which is the order of their UTF-8 bytes.
    if keys != sorted(keys):
        raise MalformedMessage("not in canonical form: map keys out of order")
    return result


def _scalar_sizes() -> tuple[int, ...]:
    """Return, for each first byte, the whole length of a value that it fixes; 0 for all others."""
    sizes = [0] * 256
    for first in (*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3):
        sizes[first] = 1
    for first in range(0xA0, 0xC0):
        sizes[first] = 1 + (first & 0x1F)
    for first, width in zip((*range(0xCA, 0xD0), *range(0xD0, 0xD4)), (4, 8, 1, 2, 4, 8, 1, 2, 4, 8), strict=True):
        sizes[first] = 1 + width
    return tuple(sizes)


_SCALAR_SIZES = _scalar_sizes()
_BYTES_WIDTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""First byte of a binary or a string: width of the length that follows."""
_NESTED_WIDTHS = {0xDC: (1, 2), 0xDD: (1, 4), 0xDE: (2, 2), 0xDF: (2, 4)}
"""First byte of a list or a map: items for each entry, width of the count that follows."""


def _check_structure(data: bytes | memoryview, limits: Limits) -> None:
    """Walk over the headers of `data`, building nothing.

    The unpacker makes room for as many items as a header promises and goes 1024 levels deep: 64 KiB of headers
    make it ask for half a GiB, and 8 MiB of empty lists become one GiB. After this walk, what it makes is bounded.
    """
    end = len(data)
    position, items = 0, 1
    open_levels: list[int] = []
    """Items still to come in each enclosing list or map."""
    allowed = limits.max_items
    while items or open_levels:
        if not items:
            items = open_levels.pop()
            continue
        items -= 1
        if position >= end:
            raise MalformedMessage("not a msgpack message: incomplete")
        first = data[position]
        if size := _SCALAR_SIZES[first]:
            position += size
        elif width := _BYTES_WIDTHS.get(first):
            position += 1 + width
            position += int.from_bytes(data[position - width : position])
        else:
            open_levels.append(items)
            items, position = _nested(data, position)
            allowed -= items
            if allowed < 0:
                raise MalformedMessage(f"more than {limits.max_items} items")
            if len(open_levels) > limits.max_depth:
                raise MalformedMessage(f"nested deeper than {limits.max_depth} levels")
    if position != end:
        raise MalformedMessage(f"not a msgpack message: {end} bytes, expected {position}")


def _nested(data: bytes | memoryview, position: int) -> tuple[int, int]:
    """Return the number of items of the list or map at `position`, and where they start."""
    first = data[position]
    if 0x90 <= first <= 0x9F:
        return first & 0x0F, position + 1
    if 0x80 <= first <= 0x8F:
        return 2 * (first & 0x0F), position + 1
    if first not in _NESTED_WIDTHS:
        raise MalformedMessage(f"not a msgpack message of this protocol: type {first:#x}")
    each, width = _NESTED_WIDTHS[first]
    start = position + 1 + width
    return each * int.from_bytes(data[position + 1 : start]), start


_NESTED: tuple[type[object], ...] = (dict, list, tuple)


def _sorted(value: object) -> object:
    # A call for each leaf would cost more than the packing.
    if isinstance(value, dict):
        items = cast("dict[object, object]", value)
        for key in items:
            if not isinstance(key, str):
                raise TypeError(f"map key of type {type(key).__name__}, expected a string")
        named = cast("dict[str, object]", value)
        return {key: _sorted(item) if isinstance(item := named[key], _NESTED) else item for key in sorted(named)}
    if isinstance(value, (list, tuple)):
        members = cast("list[object]", value)
        return [_sorted(item) if isinstance(item, _NESTED) else item for item in members]
    return value
