"""What llama.cpp has to know of a model, read from its `config.json`. Pure; refuses what would be computed wrongly."""

import json
import math
from dataclasses import dataclass
from typing import Any, cast

from echo_swarm.errors import UsageError

_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
"""Name in config.json → name in GGUF."""


class NotConvertible(UsageError):
    """This model cannot be written as GGUF; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The figures of one decoder, e.g. of SmolLM2-135M."""

    architecture: str
    """`llama`, `qwen2` or `qwen3`."""
    layers: int
    """30"""
    hidden: int
    """576"""
    heads: int
    """9"""
    kv_heads: int
    """3"""
    head_dim: int
    """64; not always hidden / heads."""
    feed_forward: int
    """1536"""
    vocabulary: int
    """49152"""
    context: int
    """8192 tokens"""
    norm_epsilon: float
    rope_base: float
    """100000.0"""
    rope_divisors: tuple[float, ...]
    """What each of the head_dim / 2 frequencies is divided by; empty: nothing."""
    tied: bool
    """The output matrix is the embedding."""
    attention_bias: bool
    """Biases on q, k, v and output (`llama`); `qwen2` always has those on q, k, v."""
    mlp_bias: bool


def read_shape(config_json: str) -> ModelShape:
    """Read a model's `config.json`.

    Raises:
        NotConvertible: another architecture, or a feature that llama.cpp would compute differently.

    """
    config = _parsed(config_json)
    architecture = _architecture(config)
    heads = _whole(config, "num_attention_heads")
    hidden = _whole(config, "hidden_size")
    head_dim = _whole(config, "head_dim", hidden // heads)
    rope = _rope(config)
    _check_attention(config, architecture, heads_are_plain=head_dim * heads == hidden)
    return ModelShape(
        architecture=architecture,
        layers=_whole(config, "num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_whole(config, "num_key_value_heads", heads),
        head_dim=head_dim,
        feed_forward=_whole(config, "intermediate_size"),
        vocabulary=_whole(config, "vocab_size"),
        context=_whole(config, "max_position_embeddings"),
        norm_epsilon=_number(config, "rms_norm_eps"),
        rope_base=_number(rope, "rope_theta"),
        rope_divisors=_divisors(rope, head_dim),
        tied=bool(config.get("tie_word_embeddings", False)),
        attention_bias=architecture == "llama" and bool(config.get("attention_bias", False)),
        mlp_bias=architecture == "llama" and bool(config.get("mlp_bias", False)),
    )


def _parsed(config_json: str) -> dict[str, Any]:
    try:
        config: Any = json.loads(config_json)
    except ValueError as e:
        raise NotConvertible(f"config.json cannot be read: {e}") from e
    if not isinstance(config, dict):
        raise NotConvertible("config.json holds no JSON object")
    return cast("dict[str, Any]", config)


def _architecture(config: dict[str, Any]) -> str:
    named = cast(
        "list[Any]", config.get("architectures") or [f"{str(config.get('model_type')).capitalize()}ForCausalLM"]
    )
    found = next((_ARCHITECTURES[name] for name in named if name in _ARCHITECTURES), None)
    if found is None:
        raise NotConvertible(f"architecture {named[0]!r} cannot be written as GGUF; {', '.join(_ARCHITECTURES)} can")
    return found


def _check_attention(config: dict[str, Any], architecture: str, *, heads_are_plain: bool) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise NotConvertible(
            f"activation {config['hidden_act']!r} is not the one that llama.cpp has for {architecture}"
        )
    windowed = config.get("use_sliding_window") or set(config.get("layer_types") or ()) - {"full_attention"}
    if windowed:
        raise NotConvertible("sliding-window attention is not written as GGUF")
    if architecture == "qwen2" and not heads_are_plain:
        raise NotConvertible("llama.cpp's qwen2 needs head_dim = hidden_size / num_attention_heads")
    if architecture == "qwen3" and config.get("attention_bias"):
        raise NotConvertible("llama.cpp's qwen3 has no attention biases")


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return rope_theta, rope_type and what belongs to it, from the older or the newer way of writing them."""
    newer, older = config.get("rope_parameters"), config.get("rope_scaling")
    found: dict[str, Any] = {"rope_theta": config.get("rope_theta", 10_000.0), **(newer or older or {})}
    found["rope_type"] = found.get("rope_type") or found.get("type") or "default"
    return found


def _divisors(rope: dict[str, Any], head_dim: int) -> tuple[float, ...]:
    """Return the divisors of the frequencies: none, or those of Llama 3 (long waves slowed, short ones kept)."""
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise NotConvertible("partly rotated heads are not written as GGUF")
    if rope["rope_type"] == "default":
        return ()
    if rope["rope_type"] != "llama3":
        raise NotConvertible(f"rope scaling {rope['rope_type']!r} is not written as GGUF; 'default' and 'llama3' are")
    factor, low, high = (_number(rope, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = _number(rope, "original_max_position_embeddings")
    base = _number(rope, "rope_theta")
    return tuple(
        _divisor(2 * math.pi * base ** (2 * i / head_dim), original, factor, low, high) for i in range(head_dim // 2)
    )


def _divisor(wavelength: float, original: float, factor: float, low: float, high: float) -> float:
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return factor
    smooth = (original / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


def _whole(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if type(value) is not int or not 0 < value < 2**31:
        raise NotConvertible(f"config.json: {key} is {value!r}, expected a whole number above 0")
    return value


def _number(config: dict[str, Any], key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise NotConvertible(f"config.json: {key} is {value!r}, expected a number above 0")
    return float(value)
