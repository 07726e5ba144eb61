"""A LoRA adapter as llama.cpp reads it: one GGUF file over any GGUF file of the base. Blocking.

For each adapted matrix two tensors, named after it: `blk.0.attn_q.weight.lora_a` [rank, inputs] and `.lora_b`
[outputs, rank]; llama.cpp computes y = W x + (alpha / rank) B (A x). Where the base's rows are reordered (Llama's
queries and keys, see `layout`), so are those of B, which are the same outputs. Stored as F32: it is small.
"""

from pathlib import Path

import gguf
import numpy as np

from echo_coordinator.publisher.gguf.layout import Placement, placements
from echo_coordinator.publisher.gguf.shape import NotConvertible, read_shape
from echo_coordinator.publisher.gguf.source import SafetensorsSource
from echo_swarm.checkpoint.adapter_file import read_adapter, tensor_names
from echo_swarm.checkpoint.gguf_file import check_gguf_adapter


def write_adapter(adapter: Path, config_json: str, target: Path) -> None:
    """Write `target`. The same adapter gives the same bytes.

    Args:
        adapter: a `lora` file.
        config_json: text of the base's config.json.
        target: replaced if it is there.

    Raises:
        NotConvertible: the model cannot be written as GGUF, or a layer has no place there.
        MalformedMessage: `adapter` is no adapter.
        OSError: the disk.

    """
    described = read_adapter(adapter)
    shape = read_shape(config_json)
    places = placements(shape)
    source = SafetensorsSource(adapter)
    writer = gguf.GGUFWriter(target, shape.architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, described.alpha)
    try:
        for layer, outputs_inputs in sorted(described.layers.items()):
            place = _place(places, layer, outputs_inputs)
            for name, part in zip(tensor_names(layer), ("lora_a", "lora_b"), strict=True):
                heads = place.interleaved_heads if part == "lora_b" else 0
                values = np.concatenate(list(source.blocks(name, heads)))
                writer.add_tensor(f"{place.name}.{part}", np.ascontiguousarray(values, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    check_gguf_adapter(target)


def _place(places: dict[str, Placement], layer: str, outputs_inputs: tuple[int, int]) -> Placement:
    place = places.get(f"{layer}.weight")
    if place is None or place.shape != outputs_inputs:
        raise NotConvertible(f"layer {layer!r} of {outputs_inputs} has no place in GGUF")
    return place
