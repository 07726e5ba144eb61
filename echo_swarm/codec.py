"""Canonical msgpack with limits: one value has one encoding, and no input can make us allocate beyond its size.

Rules of the encoding: maps have string keys in ascending order of their UTF-8 bytes, numbers take their shortest
form, floats are 64 bit, no extension types. `decode` refuses everything else: it bounds each count by the bytes
that are really there, bounds depth, and (for signed data) re-encodes what it read and compares.
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
    """Entries of any one list or map."""
    max_depth: int = 12
    """Nesting of lists and maps; a flat map has depth 1."""


SMALL = Limits(max_bytes=64 * 1024)
"""For control messages and directory records."""


def encode(value: object) -> bytes:
    """Return the canonical encoding of `value` (None, bool, int, float, str, bytes, list/tuple, dict with str keys).

    Raises:
        TypeError: a value of another type, or a map key that is no string.

    """
    return cast(bytes, _msgpack.packb(_sorted(value), use_bin_type=True))


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
    # Every element takes at least one byte, so no honest count exceeds the message's own length.
    count = min(len(data), limits.max_items)
    try:
        value: Any = _msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            use_list=True,
            object_pairs_hook=_unique_pairs,
            max_str_len=len(data),
            max_bin_len=len(data),
            max_array_len=count,
            max_map_len=count,
            max_ext_len=0,
        )
    except MalformedMessage:
        raise
    except (ValueError, TypeError, _msgpack.UnpackException, RecursionError, OverflowError) as e:
        raise MalformedMessage(f"not a msgpack message: {e or type(e).__name__}") from e
    _check_depth(value, limits.max_depth)
    if canonical and encode(value) != bytes(data):
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


def _unique_pairs(pairs: list[tuple[object, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if not isinstance(key, str):
            raise MalformedMessage(f"map key of type {type(key).__name__}, expected a string")
        if key in result:
            raise MalformedMessage(f"map key {key[:40]!r} stands twice")
        result[key] = value
    return result


def _check_depth(value: object, allowed: int) -> None:
    level: list[object] = [value]
    for _ in range(allowed + 1):
        nested: list[object] = []
        for item in level:
            if isinstance(item, dict):
                nested.extend(cast("dict[str, object]", item).values())
            elif isinstance(item, list):
                nested.extend(cast("list[object]", item))
        if not nested:
            return
        level = nested
    raise MalformedMessage(f"nested deeper than {allowed} levels")


def _sorted(value: object) -> object:
    if isinstance(value, dict):
        items = cast("dict[object, object]", value)
        for key in items:
            if not isinstance(key, str):
                raise TypeError(f"map key of type {type(key).__name__}, expected a string")
        ordered = sorted(cast("dict[str, object]", value).items(), key=_utf8_key)
        return {key: _sorted(item) for key, item in ordered}
    if isinstance(value, (list, tuple)):
        return [_sorted(item) for item in cast("list[object]", value)]
    return value


def _utf8_key(item: tuple[str, object]) -> bytes:
    return item[0].encode("utf-8", "surrogatepass")
