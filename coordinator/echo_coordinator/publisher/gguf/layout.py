"""Which tensor goes where: names in a model folder, names in GGUF, shapes, and what must be reordered. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from echo_coordinator.publisher.gguf.shape import ModelShape, NotConvertible

TOKEN_EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
ROPE_DIVISORS = "rope_freqs.weight"

_LAYER = {
    "input_layernorm.weight": ("attn_norm.weight", ("hidden",)),
    "self_attn.q_proj.weight": ("attn_q.weight", ("q", "hidden")),
    "self_attn.k_proj.weight": ("attn_k.weight", ("kv", "hidden")),
    "self_attn.v_proj.weight": ("attn_v.weight", ("kv", "hidden")),
    "self_attn.o_proj.weight": ("attn_output.weight", ("hidden", "q")),
    "post_attention_layernorm.weight": ("ffn_norm.weight", ("hidden",)),
    "mlp.gate_proj.weight": ("ffn_gate.weight", ("feed_forward", "hidden")),
    "mlp.up_proj.weight": ("ffn_up.weight", ("feed_forward", "hidden")),
    "mlp.down_proj.weight": ("ffn_down.weight", ("hidden", "feed_forward")),
}
_QKV_BIAS = {
    "self_attn.q_proj.bias": ("attn_q.bias", ("q",)),
    "self_attn.k_proj.bias": ("attn_k.bias", ("kv",)),
    "self_attn.v_proj.bias": ("attn_v.bias", ("kv",)),
}
_OUTPUT_BIAS = {"self_attn.o_proj.bias": ("attn_output.bias", ("hidden",))}
_MLP_BIAS = {
    "mlp.gate_proj.bias": ("ffn_gate.bias", ("feed_forward",)),
    "mlp.up_proj.bias": ("ffn_up.bias", ("feed_forward",)),
    "mlp.down_proj.bias": ("ffn_down.bias", ("hidden",)),
}
_QK_NORM = {
    "self_attn.q_norm.weight": ("attn_q_norm.weight", ("head",)),
    "self_attn.k_norm.weight": ("attn_k_norm.weight", ("head",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where one tensor of the model goes."""

    name: str
    """In GGUF, e.g. blk.0.attn_q.weight."""
    shape: tuple[int, ...]
    """(rows, columns) or (length,)."""
    interleaved_heads: int = 0
    """Rows are reordered within so many heads: Llama's two halves of a head become neighbours, since llama.cpp rotates
    pairs (2i, 2i + 1) there where transformers rotates (i, i + head_dim / 2). 0: as they are."""


def placements(shape: ModelShape) -> dict[str, Placement]:
    """Return every tensor that a model of this shape has: name in its safetensors file → placement."""
    sizes = {
        "hidden": shape.hidden,
        "q": shape.heads * shape.head_dim,
        "kv": shape.kv_heads * shape.head_dim,
        "head": shape.head_dim,
        "feed_forward": shape.feed_forward,
    }
    found = {"model.embed_tokens.weight": Placement(name=TOKEN_EMBEDDING, shape=(shape.vocabulary, shape.hidden))}
    for layer in range(shape.layers):
        for source, (target, dimensions) in _layer(shape).items():
            found[f"model.layers.{layer}.{source}"] = Placement(
                name=f"blk.{layer}.{target}",
                shape=tuple(sizes[dimension] for dimension in dimensions),
                interleaved_heads=_interleaved(shape, source),
            )
    found["model.norm.weight"] = Placement(name="output_norm.weight", shape=(shape.hidden,))
    if not shape.tied:
        found["lm_head.weight"] = Placement(name=OUTPUT, shape=(shape.vocabulary, shape.hidden))
    return found


def check_tensors(expected: Mapping[str, Placement], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare what a file holds (name → shape) with what its config.json implies.

    Raises:
        NotConvertible: a tensor is missing, of another shape, or one that would be left out without a word.

    """
    # Tied models may carry a copy of the embedding; it says nothing new.
    extra = sorted(shapes.keys() - expected.keys() - {"lm_head.weight"})
    missing = sorted(expected.keys() - shapes.keys())
    if extra or missing:
        what = f"tensor {extra[0]!r} has no place in GGUF" if extra else f"tensor {missing[0]!r} is missing"
        raise NotConvertible(f"{what} ({len(extra)} without a place, {len(missing)} missing)")
    for name, placement in expected.items():
        if shapes[name] != placement.shape:
            raise NotConvertible(f"tensor {name!r} is {shapes[name]}, config.json implies {placement.shape}")


def _layer(shape: ModelShape) -> dict[str, tuple[str, tuple[str, ...]]]:
    found = dict(_LAYER)
    if shape.architecture == "qwen2" or shape.attention_bias:
        found |= _QKV_BIAS
    if shape.attention_bias:
        found |= _OUTPUT_BIAS
    if shape.mlp_bias:
        found |= _MLP_BIAS
    if shape.architecture == "qwen3":
        found |= _QK_NORM
    return found


def _interleaved(shape: ModelShape, source: str) -> int:
    if shape.architecture != "llama":
        return 0
    if source.startswith("self_attn.q_proj"):
        return shape.heads
    return shape.kv_heads if source.startswith("self_attn.k_proj") else 0
