"""Reading the header of a safetensors file, strictly, without any tensor library.

A file is: u64le header length n; n bytes of JSON; the tensors' bytes. Accepted is only what every parser reads alike:

1. n is at most MAX_HEADER_BYTES and at most what the file has (checked before anything is allocated),
2. the JSON is one object, begins with `{`, has no key twice and no NaN,
3. each entry has exactly dtype, shape, data_offsets; the dtype is known; numbers are whole and not negative,
4. shape × dtype equals the span of the offsets,
5. spans follow each other without hole or overlap, from 0 to the end of the file: no trailing bytes.
"""

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from echo_swarm import codec
from echo_swarm.errors import MalformedMessage

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

_LENGTH = struct.Struct("<Q")
_MAX_RANK = 64

_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Where one tensor lies, e.g. lm_head.weight, BF16, (49152, 576), bytes 0 to 56623104 of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """First byte, counted from the end of the header."""
    end: int
    """One past the last byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A checked header."""

    tensors: tuple[TensorSpec, ...]
    """In the order of their bytes."""
    metadata: dict[str, str]
    data_start: int
    """Offset of the first tensor byte in the file."""

    def layout(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return name → (dtype, shape)."""
        return {tensor.name: (tensor.dtype, tensor.shape) for tensor in self.tensors}


def read_header(path: Path) -> Header:
    """Read and check the header of a file against the rules above.

    Raises:
        MalformedMessage: naming the rule that is broken.
        OSError: the file cannot be read.

    """
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH.size)
        if len(start) < _LENGTH.size:
            raise MalformedMessage(f"safetensors: {size_bytes} bytes, too short for a header length")
        (length,) = _LENGTH.unpack(start)
        if length > MAX_HEADER_BYTES or length > size_bytes - _LENGTH.size:
            raise MalformedMessage(f"safetensors: header of {length} bytes in a file of {size_bytes} bytes")
        text = file.read(length)
    if len(text) < length:
        raise MalformedMessage("safetensors: the file ends inside its header")
    data_start = _LENGTH.size + length
    entries = _parse_json(text)
    metadata = _metadata(entries.pop("__metadata__", {}))
    tensors = tuple(sorted((_tensor(name, entry) for name, entry in entries.items()), key=lambda t: (t.begin, t.end)))
    _check_contiguous(tensors, size_bytes - data_start)
    return Header(tensors=tensors, metadata=metadata, data_start=data_start)


def layout_digest(header: Header) -> bytes:
    """Return the sha256 over (name, dtype, shape) of all tensors, sorted by name."""
    rows = [[name, dtype, list(shape)] for name, (dtype, shape) in sorted(header.layout().items())]
    return hashlib.sha256(codec.encode(rows)).digest()


def check_layout(path: Path, expected: bytes) -> Header:
    """Read a file's header and compare its layout with the digest that a manifest gives.

    Raises:
        MalformedMessage: the header is wrong, or a tensor is missing, extra, or of another type or shape.

    """
    header = read_header(path)
    if layout_digest(header) != expected:
        raise MalformedMessage(
            f"safetensors: the names, types or shapes of its {len(header.tensors)} tensors are not the manifest's"
        )
    return header


def layout_differences(header: Header, expected: Header) -> list[str]:
    """Return what is missing, extra or different, one line a tensor; empty when the layouts agree."""
    ours, theirs = header.layout(), expected.layout()
    lines = [f"missing: {name}" for name in sorted(theirs.keys() - ours.keys())]
    lines += [f"extra: {name}" for name in sorted(ours.keys() - theirs.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name] != theirs[name]:
            lines.append(f"different: {name} is {ours[name]}, expected {theirs[name]}")
    return lines


def _parse_json(text: bytes) -> dict[str, Any]:
    if not text.startswith(b"{"):
        raise MalformedMessage("safetensors: the header does not begin with '{'")
    try:
        value: Any = json.loads(text.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except MalformedMessage:
        raise
    except (ValueError, RecursionError) as e:
        raise MalformedMessage(f"safetensors: the header is no JSON: {type(e).__name__}") from e
    return cast("dict[str, Any]", value)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise MalformedMessage("safetensors: a name stands twice in the header")
    return result


def _no_constant(text: str) -> None:
    raise MalformedMessage(f"safetensors: {text} in the header")


def _metadata(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise MalformedMessage("safetensors: __metadata__ is no map")
    entries = cast("dict[str, object]", value)
    if not all(isinstance(item, str) for item in entries.values()):
        raise MalformedMessage("safetensors: __metadata__ holds something that is no string")
    return cast("dict[str, str]", entries)


def _tensor(name: str, value: object) -> TensorSpec:
    shown = name[:80]
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise MalformedMessage(f"safetensors: the name {shown!r} is no text")
    if not isinstance(value, dict):
        raise MalformedMessage(f"safetensors: entry {shown!r} is no map")
    entry = cast("dict[str, object]", value)
    if entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise MalformedMessage(f"safetensors: entry {shown!r} does not have exactly dtype, shape, data_offsets")
    dtype = entry["dtype"]
    bits = _DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None or not isinstance(dtype, str):
        raise MalformedMessage(f"safetensors: {shown!r} is of an unknown type")
    shape = _whole_numbers(entry["shape"], f"shape of {shown!r}")
    offsets = _whole_numbers(entry["data_offsets"], f"offsets of {shown!r}")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise MalformedMessage(f"safetensors: offsets of {shown!r} are no span")
    if math.prod(shape) * bits != (offsets[1] - offsets[0]) * 8:
        raise MalformedMessage(f"safetensors: {shown!r} of shape {shape[:8]} does not fill its span")
    return TensorSpec(name=name, dtype=dtype, shape=shape, begin=offsets[0], end=offsets[1])


def _whole_numbers(value: object, what: str) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise MalformedMessage(f"safetensors: {what} is no list")
    numbers = cast("list[object]", value)
    if len(numbers) > _MAX_RANK:
        raise MalformedMessage(f"safetensors: {what} has {len(numbers)} entries")
    for number in numbers:
        # bool is an int to Python, not to other parsers.
        if type(number) is not int or not 0 <= number < 2**63:
            raise MalformedMessage(f"safetensors: {what} holds something that is no whole number")
    return tuple(cast("list[int]", numbers))


def _check_contiguous(tensors: tuple[TensorSpec, ...], data_bytes: int) -> None:
    position = 0
    for tensor in tensors:
        if tensor.begin != position:
            raise MalformedMessage(f"safetensors: a hole or an overlap before {tensor.name[:80]!r}")
        position = tensor.end
    if position != data_bytes:
        raise MalformedMessage(f"safetensors: {data_bytes} bytes of data, the header describes {position}")
