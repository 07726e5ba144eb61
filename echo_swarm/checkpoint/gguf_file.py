"""Reading the header of a GGUF file, strictly, without llama.cpp.

llama.cpp parses files in C++ and supports far more than a run needs; what a version's file may hold is little:

1. magic and version 3; at most MAX_KEYS keys, MAX_TENSORS tensors and MAX_HEADER_BYTES of header, each length checked
   against what the file has before anything is allocated,
2. each key once, all of `general.*`, `<architecture>.*` or the next one; no arrays in arrays,
3. `tokenizer.ggml.model` is `no_vocab`: only ids travel, so no vocabulary is parsed; and no `split.*`, which makes
   llama.cpp open further files,
4. the architecture is one of ARCHITECTURES, its sizes are there and above 0,
5. each tensor's name once, 1 to 4 dimensions above 0, a type of TYPES, rows of whole blocks,
6. tensors follow each other, each at the next multiple of 32 from the end of the header; the last ends the file.

A LoRA adapter (`check_gguf_adapter`) has no sizes and no tokenizer, but `general.type` = `adapter`, `adapter.type` =
`lora` and `adapter.lora.alpha` above 0; its tensors are F32 or F16 matrices in pairs, `blk.N.NAME.weight.lora_a` and
`.lora_b`, all of one rank.
"""

import math
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from echo_swarm.errors import MalformedMessage

MAX_HEADER_BYTES = 16 << 20
MAX_KEYS = 1024
MAX_TENSORS = 65_536
MAX_NAME_BYTES = 63
"""Of a tensor's name; ggml keeps 64 with the end mark."""
MAX_TEXT_BYTES = 65_535
ALIGNMENT = 32
ARCHITECTURES = ("llama", "qwen2", "qwen3")
TYPES = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 8: ("Q8_0", 32, 34), 30: ("BF16", 1, 2)}
"""Number → (name, values in a block, bytes of a block)."""

Scalar = int | float | bool | str

_MAGIC = b"GGUF"
_ADAPTER_TENSOR = re.compile(r"(blk\.\d{1,6}\.[a-z_]{1,24}\.weight)\.lora_([ab])")
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
_BOOL, _TEXT, _ARRAY = 7, 8, 9
_SIZES = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "vocab_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor, e.g. blk.0.attn_q.weight, Q8_0, (576, 576)."""

    name: str
    type: str
    shape: tuple[int, ...]
    """Rows first, as a safetensors file has it; GGUF lists it the other way round."""
    begin: int
    """First byte, counted from the start of the data."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """A checked header."""

    architecture: str
    values: dict[str, Scalar]
    """All keys that hold no array."""
    tensors: tuple[GgufTensor, ...]
    data_start: int
    """Offset of the first tensor byte in the file."""


def check_gguf(path: Path) -> GgufHeader:
    """Check a file's header against the rules above, and return it.

    Raises:
        MalformedMessage: naming what is wrong.
        OSError: the file cannot be read.

    """
    header, keys = _read(path)
    return replace(header, architecture=_check_keys(keys, header.values))


def check_gguf_adapter(path: Path) -> GgufHeader:
    """Check the header of a LoRA adapter, and return it.

    Raises:
        MalformedMessage: naming what is wrong.
        OSError: the file cannot be read.

    """
    header, keys = _read(path)
    values = header.values
    _check_common(keys - {"adapter.type", "adapter.lora.alpha"}, values)
    alpha = values.get("adapter.lora.alpha")
    if values.get("general.type") != "adapter" or values.get("adapter.type") != "lora":
        raise MalformedMessage("gguf: this is no LoRA adapter")
    if type(alpha) is not float or alpha <= 0:
        raise MalformedMessage("gguf: adapter.lora.alpha is missing or not above 0")
    _check_pairs(header.tensors)
    return replace(header, architecture=str(values["general.architecture"]))


def _read(path: Path) -> tuple[GgufHeader, set[str]]:
    """Apply rules 1, 2 as far as the form goes, 5 and 6; the architecture is left empty."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        reader = _Reader(file, min(size_bytes, MAX_HEADER_BYTES))
        if reader.bytes(4) != _MAGIC or reader.number("<I") != 3:
            raise MalformedMessage("gguf: this is no GGUF file of version 3")
        tensor_count, key_count = reader.number("<Q"), reader.number("<Q")
        if not 1 <= tensor_count <= MAX_TENSORS or key_count > MAX_KEYS:
            raise MalformedMessage(
                f"gguf: {tensor_count} tensors and {key_count} keys, allowed {MAX_TENSORS}, {MAX_KEYS}"
            )
        keys, values = _keys(reader, key_count)
        tensors = tuple(_tensor(reader) for _ in range(tensor_count))
    data_start = _aligned(reader.position)
    _check_tensors(tensors, size_bytes - data_start)
    return GgufHeader(architecture="", values=values, tensors=tensors, data_start=data_start), keys


class _Reader:
    """Reads no byte beyond a limit."""

    def __init__(self, file: BinaryIO, limit_bytes: int) -> None:
        self._file = file
        self._limit_bytes = limit_bytes
        self.position = 0

    def bytes(self, length: int) -> bytes:
        if length > self._limit_bytes - self.position:
            raise MalformedMessage("gguf: the header does not end within the file, or is too long")
        data = self._file.read(length)
        if len(data) != length:
            raise MalformedMessage("gguf: the file ends inside its header")
        self.position += length
        return data

    def number(self, form: str) -> int:
        return struct.unpack(form, self.bytes(struct.calcsize(form)))[0]

    def text(self, most_bytes: int) -> str:
        length = self.number("<Q")
        if length > most_bytes:
            raise MalformedMessage(f"gguf: a text of {length} bytes, allowed {most_bytes}")
        try:
            text = self.bytes(length).decode("utf-8")
        except UnicodeDecodeError as e:
            raise MalformedMessage("gguf: a text that is no UTF-8") from e
        if "\0" in text:
            # C++ would read a shorter one.
            raise MalformedMessage("gguf: a text with a zero byte")
        return text


def _keys(reader: _Reader, count: int) -> tuple[set[str], dict[str, Scalar]]:
    """Return all keys, and the values of those that hold no array."""
    keys: set[str] = set()
    values: dict[str, Scalar] = {}
    for _ in range(count):
        key = reader.text(MAX_TEXT_BYTES)
        if key in keys:
            raise MalformedMessage(f"gguf: key {key[:80]!r} stands twice")
        keys.add(key)
        kind = reader.number("<I")
        if kind == _ARRAY:
            _skip_array(reader, key)
        else:
            values[key] = _scalar(reader, kind, key)
    return keys, values


def _scalar(reader: _Reader, kind: int, key: str) -> Scalar:
    if kind == _TEXT:
        return reader.text(MAX_TEXT_BYTES)
    if kind not in _SCALARS:
        raise MalformedMessage(f"gguf: key {key[:80]!r} is of an unknown type")
    value = reader.number(_SCALARS[kind])
    if not math.isfinite(value) or (kind == _BOOL and value > 1):
        raise MalformedMessage(f"gguf: key {key[:80]!r} holds no proper value")
    return bool(value) if kind == _BOOL else value


def _skip_array(reader: _Reader, key: str) -> None:
    kind, count = reader.number("<I"), reader.number("<Q")
    if kind in _SCALARS:
        # Python's whole numbers do not wrap: a huge count simply exceeds the limit.
        reader.bytes(count * struct.calcsize(_SCALARS[kind]))
    elif kind == _TEXT:
        for _ in range(min(count, MAX_HEADER_BYTES)):
            reader.text(MAX_TEXT_BYTES)
    else:
        raise MalformedMessage(f"gguf: key {key[:80]!r} is an array of an unknown type")


def _check_keys(keys: set[str], values: dict[str, Scalar]) -> str:
    """Apply rules 2 to 4 and return the architecture."""
    architecture = _check_common(keys - {"tokenizer.ggml.model"}, values)
    if values.get("tokenizer.ggml.model") != "no_vocab":
        raise MalformedMessage("gguf: it carries a vocabulary; a version's file has none")
    for size in _SIZES:
        value = values.get(f"{architecture}.{size}")
        if type(value) is not int or not 0 < value < 2**31:
            raise MalformedMessage(f"gguf: {architecture}.{size} is missing or no whole number above 0")
    return architecture


def _check_common(keys: set[str], values: dict[str, Scalar]) -> str:
    architecture = values.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise MalformedMessage(
            f"gguf: architecture {str(architecture)[:80]!r}, expected one of {', '.join(ARCHITECTURES)}"
        )
    if values.get("general.alignment", ALIGNMENT) != ALIGNMENT:
        raise MalformedMessage(f"gguf: alignment is not {ALIGNMENT}")
    for key in keys:
        if not key.startswith(("general.", f"{architecture}.")):
            raise MalformedMessage(f"gguf: key {key[:80]!r} has no place in a version's file")
    return str(architecture)


def _check_pairs(tensors: tuple[GgufTensor, ...]) -> None:
    pairs: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor in tensors:
        match = _ADAPTER_TENSOR.fullmatch(tensor.name)
        if match is None or tensor.type not in ("F32", "F16") or len(tensor.shape) != 2:
            raise MalformedMessage(f"gguf: tensor {tensor.name!r} has no place in an adapter")
        pairs.setdefault(match[1], {})[match[2]] = tensor.shape
    ranks = {(pair["a"][0], pair["b"][1]) if len(pair) == 2 else (0, 0) for pair in pairs.values()}
    if len(ranks) != 1 or (0, 0) in ranks or any(a != b for a, b in ranks):
        raise MalformedMessage("gguf: the adapter's matrices do not pair up, or differ in rank")


def _tensor(reader: _Reader) -> GgufTensor:
    name = reader.text(MAX_NAME_BYTES)
    rank = reader.number("<I")
    if not 1 <= rank <= 4:
        raise MalformedMessage(f"gguf: tensor {name!r} has {rank} dimensions")
    shape = tuple(reversed([reader.number("<Q") for _ in range(rank)]))
    kind, begin = reader.number("<I"), reader.number("<Q")
    if kind not in TYPES:
        raise MalformedMessage(f"gguf: tensor {name!r} is of type {kind}, which is not accepted")
    type_name, block_values, block_bytes = TYPES[kind]
    values = 1
    for size in shape:
        values *= size
    if not 0 < values < 2**48 or shape[-1] % block_values:
        raise MalformedMessage(f"gguf: tensor {name!r} cannot have the shape {shape} as {type_name}")
    size_bytes = values // block_values * block_bytes
    return GgufTensor(name=name, type=type_name, shape=shape, begin=begin, size_bytes=size_bytes)


def _check_tensors(tensors: tuple[GgufTensor, ...], data_bytes: int) -> None:
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise MalformedMessage("gguf: a tensor's name stands twice")
    position = 0
    for tensor in tensors:
        if tensor.begin != position:
            raise MalformedMessage(f"gguf: tensor {tensor.name!r} is not where the one before it ends")
        position = _aligned(tensor.begin + tensor.size_bytes)
    if position != data_bytes:
        raise MalformedMessage(f"gguf: {data_bytes} bytes of data, the header describes {position}")


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT
