"""One GGUF file from one safetensors file: header by the `gguf` package, data block by block. Blocking.

Stored types: one-dimensional tensors stay F32; a quantised matrix whose rows are no whole number of blocks becomes F16;
in a Q4_0 file the embedding and the output matrix are Q8_0, since an error there reaches every logit directly.
"""

from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Stored
from numpy.typing import NDArray

from echo_coordinator.publisher.gguf.layout import OUTPUT, ROPE_DIVISORS, TOKEN_EMBEDDING, Placement, check_tensors
from echo_coordinator.publisher.gguf.layout import placements as placements_of
from echo_coordinator.publisher.gguf.shape import ModelShape, NotConvertible, read_shape
from echo_coordinator.publisher.gguf.source import SafetensorsSource

_PRECISIONS = {
    "f32": (Stored.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (Stored.F16, gguf.LlamaFileType.MOSTLY_F16),
    "bf16": (Stored.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "q8_0": (Stored.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (Stored.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
_QUANTISED = {Stored.Q8_0, Stored.Q4_0}
_HALF_RANGE = {Stored.F16, *_QUANTISED}
_LARGEST_F16 = 65504.0
_ALIGNMENT = 32
_NO_VOCABULARY = "no_vocab"
_GROUP = 2048
"""Values in a row handed to the package's quantiser, which works on 16 rows at a time: they stay in the cache."""


def write_gguf(weights: Path, config_json: str, target: Path, precision: str) -> None:
    """Write `target`. The same weights, settings and `gguf` release give the same bytes.

    Args:
        weights: a safetensors file with all tensors of the model.
        config_json: text of the model's config.json.
        target: replaced if it is there; what is left after an error is no valid file.
        precision: `f32`, `f16`, `bf16`, `q8_0` or `q4_0`.

    Raises:
        NotConvertible: the model, a tensor or the precision; says which and why.
        MalformedMessage: `weights` is no safetensors file.
        OSError: the disk.

    """
    if precision not in _PRECISIONS:
        raise NotConvertible(f"precision {precision!r} cannot be written; there are: {', '.join(_PRECISIONS)}")
    wanted, file_type = _PRECISIONS[precision]
    shape = read_shape(config_json)
    source = SafetensorsSource(weights)
    places = placements_of(shape)
    check_tensors(places, source.shapes)
    types = {name: _stored_type(place, wanted) for name, place in places.items()}
    _write_header(target, shape, file_type, [(places[name], types[name]) for name in places])
    with target.open("ab") as file:
        _pad(file)
        if shape.rope_divisors:
            file.write(np.array(shape.rope_divisors, dtype="<f4").tobytes())
            _pad(file)
        for name, place in places.items():
            for block in source.blocks(name, place.interleaved_heads):
                file.write(_encoded(block, types[name], name).data)
            _pad(file)


def _stored_type(place: Placement, wanted: Stored) -> Stored:
    if len(place.shape) == 1:
        return Stored.F32
    if wanted in _QUANTISED and place.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0]:
        return Stored.F16
    if wanted is Stored.Q4_0 and place.name in (TOKEN_EMBEDDING, OUTPUT):
        return Stored.Q8_0
    return wanted


def _write_header(
    target: Path, shape: ModelShape, file_type: gguf.LlamaFileType, tensors: list[tuple[Placement, Stored]]
) -> None:
    writer = gguf.GGUFWriter(None, shape.architecture)
    _add_figures(writer, shape)
    writer.add_file_type(file_type)
    if any(stored in _QUANTISED for _, stored in tensors):
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if shape.rope_divisors:
        _add_tensor(writer, Placement(name=ROPE_DIVISORS, shape=(len(shape.rope_divisors),)), Stored.F32)
    for place, stored in tensors:
        _add_tensor(writer, place, stored)
    try:
        writer.write_header_to_file(target)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()


def _add_figures(writer: gguf.GGUFWriter, shape: ModelShape) -> None:
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_tokenizer_model(_NO_VOCABULARY)


def _add_tensor(writer: gguf.GGUFWriter, place: Placement, stored: Stored) -> None:
    values_per_block, bytes_per_block = gguf.GGML_QUANT_SIZES[stored]
    size_bytes = int(np.prod(place.shape)) // values_per_block * bytes_per_block
    # With another type than uint8 the shape is taken as that of the values, and not of their bytes.
    writer.add_tensor_info(place.name, place.shape, np.dtype(np.float32), size_bytes, raw_dtype=stored)


def _encoded(block: NDArray[np.float32], stored: Stored, name: str) -> NDArray[Any]:
    # Quantised blocks carry their scale as F16.
    if stored in _HALF_RANGE and max(block.max(), -block.min()) > _LARGEST_F16:
        raise NotConvertible(f"tensor {name!r} holds numbers beyond the range of F16; publish bf16 or f32 instead")
    return np.ascontiguousarray(gguf.quantize(_grouped(block) if stored in _QUANTISED else block, stored))


def _grouped(block: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the same values in rows of a handy length. Quantisation works on 32 neighbours, wherever rows end."""
    return block.reshape(-1, _GROUP) if block.size % _GROUP == 0 else block


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % _ALIGNMENT))
