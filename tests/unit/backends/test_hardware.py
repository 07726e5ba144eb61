"""Choosing a backend and a batch from a machine's figures."""

import json

import pytest

from echo_node.backends.options import NEEDS, LlamaCppOptions, TorchOptions
from echo_node.hardware import choose, needed_bytes
from echo_node.machine import Gpu, Machine, parse_gpus, probe
from echo_node.model_shape import ModelShape
from echo_swarm.errors import BackendFailed, UsageError
from echo_swarm.manifest import RunManifest

GIB = 1 << 30
QWEN3_06B = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
}


def run_of(config: dict[str, object], **overrides: object) -> RunManifest:
    return RunManifest(
        **{
            "protocol": 1,
            "run_id": "0" * 32,
            "name": "test",
            "created_at": 0.0,
            "publisher_key": bytes(32),
            "mode": "async",
            "max_staleness": 4,
            "model_config_json": json.dumps(config),
            "parameters": 596_049_920,
            "vocabulary_size": 151_669,
            "end_token_ids": (1,),
            "max_prompt_tokens": 512,
            "max_completion_tokens": 1024,
            "environment": "test",
            **overrides,
        }
    )


def machine(**overrides: object) -> Machine:
    return Machine(**{"cpu_count": 4, "available_bytes": 16 * GIB, **overrides})


def test_the_cache_of_a_known_model_is_counted_right() -> None:
    shape = ModelShape.parse(json.dumps(QWEN3_06B))
    # 2 (keys and values) x 28 layers x 8 heads x 128 numbers.
    assert shape.cache_numbers_per_token == 57_344


def test_a_batch_is_as_large_as_memory_allows_and_no_larger() -> None:
    run = run_of(QWEN3_06B)
    choice = choose("auto", run, machine())
    shape = ModelShape.parse(run.model_config_json)
    assert 1 <= choice.batch < 32
    budget = 0.85 * 16 * GIB
    assert needed_bytes(shape, run, batch=choice.batch, width=4) <= budget
    assert needed_bytes(shape, run, batch=choice.batch + 1, width=4) > budget
    assert choice.options == TorchOptions(batch=choice.batch, device="cpu", precision="float32")
    assert "torch on CPU, float32" in choice.text


def test_a_small_model_gets_the_largest_useful_batch() -> None:
    small = {**QWEN3_06B, "num_hidden_layers": 2, "vocab_size": 64}
    assert choose(None, run_of(small, parameters=600_000), machine()).batch == 32


def test_a_model_that_does_not_fit_is_refused_with_both_figures() -> None:
    """Field case 51: 2 GiB of memory, a model of 2.2 GiB in float32."""
    with pytest.raises(BackendFailed, match=r"596,049,920 parameters in float32 .* need 3\.\d GiB, .* has 1\.7 GiB"):
        choose("torch", run_of(QWEN3_06B), machine(available_bytes=2 * GIB))
    assert choose("torch:precision=bfloat16,batch=1", run_of(QWEN3_06B), machine(available_bytes=4 * GIB)).batch == 1


def test_a_batch_that_was_asked_for_is_kept_or_refused() -> None:
    assert choose("torch:batch=2", run_of(QWEN3_06B), machine()).batch == 2
    with pytest.raises(BackendFailed, match="with a batch of 64 need"):
        choose("torch:batch=64", run_of(QWEN3_06B), machine())


def test_a_gpu_that_is_asked_for_must_be_there() -> None:
    gpu = Gpu(name="NVIDIA Example", total_bytes=24 * GIB, free_bytes=20 * GIB)
    choice = choose("torch:device=cuda", run_of(QWEN3_06B), machine(gpus=(gpu,)))
    assert choice.options.model_dump()["precision"] == "bfloat16"
    assert "NVIDIA Example" in choice.text
    with pytest.raises(UsageError, match="shows none"):
        choose("torch:device=cuda", run_of(QWEN3_06B), machine())
    with pytest.raises(UsageError, match=r"there are 1 GPU"):
        choose("torch:device=cuda:3", run_of(QWEN3_06B), machine(gpus=(gpu,)))


def test_a_scripted_backend_asks_for_nothing() -> None:
    choice = choose("scripted:batch=3", run_of({}), machine(available_bytes=0))
    assert (choice.name, choice.batch) == ("scripted", 3)


@pytest.mark.parametrize("config", [{}, {"num_attention_heads": 0}, {**QWEN3_06B, "num_hidden_layers": 10**9}])
def test_a_senseless_model_config_is_named(config: dict[str, object]) -> None:
    with pytest.raises(BackendFailed, match="model config has no usable"):
        choose("torch", run_of(config), machine())


def test_a_model_config_that_is_nested_without_end_is_named() -> None:
    run = run_of({}).model_copy(update={"model_config_json": "[" * 60_000})
    with pytest.raises(BackendFailed, match="model config is not JSON"):
        choose("torch", run, machine())


def test_lines_of_nvidia_smi_are_read_and_nonsense_is_left_out() -> None:
    gpus = parse_gpus("NVIDIA H200, 143771, 143000\nNo devices were found\nX, [N/A], 3\n")
    assert gpus == (Gpu(name="NVIDIA H200", total_bytes=143_771 << 20, free_bytes=143_000 << 20),)


def test_this_machine_can_be_described() -> None:
    found = probe()
    assert found.cpu_count >= 1 and found.available_bytes > 0
    assert "of memory free" in found.describe()


def test_llama_cpp_gets_every_cpu_and_the_batch_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NEEDS, "llama_cpp", ())  # whether or not it is installed here
    choice = choose("llama_cpp", run_of(QWEN3_06B), machine(available_bytes=6 * GIB))
    # 57,344 numbers of 16 bits for each of 1,536 tokens: 168 MiB a completion beside 1.1 GiB of weights.
    assert isinstance(choice.options, LlamaCppOptions)
    assert choice.options.threads == 4 and 16 <= choice.batch <= 24
    assert "llama_cpp, 4 threads" in choice.text
    half = choose("llama_cpp:context=768,threads=2", run_of(QWEN3_06B), machine(available_bytes=6 * GIB))
    assert half.batch == 32 and half.options.model_dump()["threads"] == 2
    with pytest.raises(BackendFailed, match=r"does not fit: 596,049,920 parameters .* a batch of 64 need"):
        choose("llama_cpp:batch=64", run_of(QWEN3_06B), machine(available_bytes=6 * GIB))
