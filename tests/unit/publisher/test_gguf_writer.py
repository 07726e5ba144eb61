"""GGUF files hold the model's numbers under llama.cpp's names, and what would come out wrong is refused."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from echo_coordinator.publisher.gguf.shape import NotConvertible, read_shape
from echo_coordinator.publisher.gguf.source import interleaved
from echo_coordinator.publisher.gguf.write import write_gguf
from echo_swarm.checkpoint.gguf_file import check_gguf
from echo_swarm.manifest import GGUF_PRECISIONS
from tests.unit.publisher import gguf_models as models

LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def written(folder: Path, precision: str) -> gguf.GGUFReader:
    target = folder / f"{precision}.gguf"
    write_gguf(folder / "model.safetensors", (folder / "config.json").read_text(), target, precision)
    return gguf.GGUFReader(target)


def values_of(reader: gguf.GGUFReader) -> dict[str, np.ndarray]:
    return {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).reshape([int(n) for n in reversed(tensor.shape)])
        for tensor in reader.tensors
    }


def source_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"
    return f"{OTHER_NAMES[parts[0]]}.{parts[1]}"


def in_model_order(name: str, values: np.ndarray, config) -> np.ndarray:
    """Undo the reordering of Llama's q and k."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if config.model_type != "llama" or heads is None:
        return values
    return values[np.argsort(interleaved(len(values), heads))]


@pytest.mark.parametrize("name", models.MODELS)
def test_every_number_of_a_model_is_found_again(name, tmp_path):
    config = models.save_model(name, tmp_path).config
    found = values_of(written(tmp_path, "f32"))
    found.pop("rope_freqs.weight", None)
    weights = load_file(tmp_path / "model.safetensors")
    assert {source_name(target) for target in found} == set(weights)
    for target, values in found.items():
        np.testing.assert_array_equal(in_model_order(target, values, config), weights[source_name(target)].numpy())


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_the_figures_llama_cpp_needs_are_there(name, tmp_path):
    config = models.save_model(name, tmp_path).config
    fields = {key: field.contents() for key, field in written(tmp_path, "f32").fields.items()}
    head_dim = 32 if name == "qwen3" else 16
    assert fields["general.architecture"] == name
    assert fields["tokenizer.ggml.model"] == "no_vocab"
    assert {key.removeprefix(f"{name}."): value for key, value in fields.items() if key.startswith(f"{name}.")} == {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "rope.freq_base": 50_000.0,
        "attention.layer_norm_rms_epsilon": pytest.approx(config.rms_norm_eps),
        "vocab_size": 160,
    }


@pytest.mark.parametrize(("precision", "largest"), [("f16", 2**-11), ("bf16", 2**-8), ("q8_0", 0.0045), ("q4_0", 0.13)])
def test_lower_precisions_stay_within_their_bounds(precision, largest, tmp_path):
    config = models.save_model("llama", tmp_path).config
    reader = written(tmp_path, precision)
    weights = load_file(tmp_path / "model.safetensors")
    for target, values in values_of(reader).items():
        expected = weights[source_name(target)].numpy()
        exact = expected.ndim == 1
        found = in_model_order(target, values, config)
        scale = np.abs(expected).max() if precision.startswith("q") else np.abs(expected)
        # The smallest half-precision numbers are 2**-24 apart.
        assert (np.abs(found - expected) <= (0 if exact else largest * scale + 2**-25)).all(), target
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    assert kinds["blk.1.ffn_down.weight"] == precision.upper()
    assert kinds["token_embd.weight"] == ("Q8_0" if precision == "q4_0" else precision.upper())


def test_the_quantised_bytes_are_those_of_the_package_for_the_whole_tensor(tmp_path):
    models.save_model("qwen2", tmp_path)
    tensor = next(t for t in written(tmp_path, "q8_0").tensors if t.name == "token_embd.weight")
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].numpy()
    np.testing.assert_array_equal(tensor.data, gguf.quantize(embedding, gguf.GGMLQuantizationType.Q8_0))


def test_rows_that_are_no_whole_number_of_blocks_become_f16(tmp_path):
    models.save_model("qwen2", tmp_path, intermediate_size=80)
    kinds = {tensor.name: tensor.tensor_type.name for tensor in written(tmp_path, "q8_0").tensors}
    assert kinds["blk.0.ffn_down.weight"] == "F16"
    assert kinds["blk.0.ffn_up.weight"] == "Q8_0"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_read_exactly(dtype, tmp_path):
    models.save_model("qwen3", tmp_path, dtype=dtype)
    weights = load_file(tmp_path / "model.safetensors")
    for target, values in values_of(written(tmp_path, "f32")).items():
        np.testing.assert_array_equal(values, weights[source_name(target)].float().numpy())


def test_writing_twice_gives_the_same_bytes(tmp_path):
    models.save_model("llama", tmp_path)
    written(tmp_path, "q8_0")
    first = (tmp_path / "q8_0.gguf").read_bytes()
    written(tmp_path, "q8_0")
    assert (tmp_path / "q8_0.gguf").read_bytes() == first


def test_tensors_larger_than_a_block_are_written_in_parts(tmp_path, monkeypatch):
    models.save_model("llama", tmp_path)
    written(tmp_path, "q8_0")
    whole = (tmp_path / "q8_0.gguf").read_bytes()
    monkeypatch.setattr("echo_coordinator.publisher.gguf.source.BLOCK_VALUES", 300)
    written(tmp_path, "q8_0")
    assert (tmp_path / "q8_0.gguf").read_bytes() == whole


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' cannot be written"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}}, "rope scaling 'linear'"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_theta is -1"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"head_dim": 32}, "head_dim"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers is 'two'"),
        ({"num_hidden_layers": 3}, "'model.layers.2.input_layernorm.weight' is missing"),
        ({"num_hidden_layers": 1}, "'model.layers.1.input_layernorm.weight' has no place"),
        ({"vocab_size": 161}, "is (160, 64), config.json implies (161, 64)"),
    ],
)
def test_models_that_would_come_out_wrong_are_refused(changes, words, tmp_path):
    """Field case 82."""
    models.save_model("qwen2", tmp_path)
    config = json.dumps(json.loads((tmp_path / "config.json").read_text()) | changes)
    with pytest.raises(NotConvertible) as refused:
        write_gguf(tmp_path / "model.safetensors", config, tmp_path / "out.gguf", "f32")
    assert words in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", '{"architectures": ["LlamaForCausalLM"]}'])
def test_a_config_that_says_nothing_is_refused(text):
    with pytest.raises(NotConvertible):
        read_shape(text)


def test_older_ways_of_writing_rope_settings_are_read():
    newer = {**models.SIZES, "architectures": ["LlamaForCausalLM"], "rope_parameters": models.LLAMA3_ROPE}
    older = {**newer, "rope_parameters": None, "rope_scaling": models.LLAMA3_ROPE, "rope_theta": 50_000.0}
    older["rope_scaling"] = {key: value for key, value in models.LLAMA3_ROPE.items() if key != "rope_theta"}
    assert read_shape(json.dumps(newer)) == read_shape(json.dumps(older))
    assert len(read_shape(json.dumps(newer)).rope_divisors) == 8


@pytest.mark.parametrize(
    ("value", "precision", "words"),
    [
        (float("nan"), "f32", "not finite"),
        (float("-inf"), "q8_0", "not finite"),
        (1e6, "f16", "beyond the range of F16"),
        (-1e8, "q8_0", "beyond the range of F16"),
    ],
)
def test_numbers_that_cannot_be_stored_are_refused(value, precision, words, tmp_path):
    models.save_model("qwen2", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][3, 5] = value
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(NotConvertible, match=words):
        written(tmp_path, precision)


def test_an_unknown_precision_is_refused_with_the_known_ones(tmp_path):
    models.save_model("qwen2", tmp_path)
    with pytest.raises(NotConvertible, match="f32, f16, bf16, q8_0, q4_0"):
        written(tmp_path, "q4_k")


@pytest.mark.parametrize("name", models.MODELS)
@pytest.mark.parametrize("precision", GGUF_PRECISIONS)
def test_what_is_written_passes_the_check_of_a_node(name, precision, tmp_path):
    models.save_model(name, tmp_path)
    reader = written(tmp_path, precision)
    header = check_gguf(tmp_path / f"{precision}.gguf")
    assert [tensor.name for tensor in header.tensors] == [tensor.name for tensor in reader.tensors]
    assert [tensor.begin + header.data_start for tensor in header.tensors] == [t.data_offset for t in reader.tensors]
