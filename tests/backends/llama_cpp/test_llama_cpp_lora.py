"""LoRA on llama.cpp: the trainer's model over GGUF files, one base for all versions, and nothing left after a swap."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from echo_coordinator.publisher.gguf.adapter import write_adapter
from echo_coordinator.publisher.gguf.shape import NotConvertible
from echo_coordinator.publisher.gguf.write import write_gguf
from echo_coordinator.trainer.adapter import adapter_tensors, add_adapter, save_adapter
from echo_coordinator.trainer.settings import LoraSettings
from echo_node.backends.base import LoadRefused, PolicyFiles
from echo_node.backends.llama_cpp_engine import LlamaCppEngine
from echo_node.backends.options import LlamaCppOptions
from echo_swarm.checkpoint.gguf_file import check_gguf_adapter
from echo_swarm.errors import MalformedMessage
from echo_swarm.manifest import sha256
from tests.backends.llama_cpp.support import complete, content
from tests.unit.backends.support import request
from tests.unit.publisher.gguf_models import SIZES, save_model

LORA = LoraSettings(rank=4, alpha=12)
"""All layers, the permuted ones among them."""
TEMPERATURE = 0.7


class Model:
    """A model with an adapter, and its files."""

    def __init__(self, name: str, folder: Path) -> None:
        self.folder = folder
        self.model = save_model(name, folder)
        self.config = (folder / "config.json").read_text()
        add_adapter(self.model, LORA, 0)

    def base(self, precision: str = "f32") -> Path:
        path = self.folder / f"{precision}.gguf"
        if not path.exists():
            write_gguf(self.folder / "model.safetensors", self.config, path, precision)
        return path

    def version(self, seed: int, precision: str = "f32") -> PolicyFiles:
        """Draw an adapter from `seed`; the model in memory has it afterwards."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in adapter_tensors(self.model).values():
                tensor.normal_(0, 0.1, generator=generator)
        source, target = self.folder / f"{seed}.safetensors", self.folder / f"{seed}.gguf"
        save_adapter(self.model, LORA, source)
        write_adapter(source, self.config, target)
        return PolicyFiles(
            policy_version=seed,
            artifact=target,
            artifact_digest=sha256(target.read_bytes()),
            base=self.base(precision),
            base_digest=sha256(self.base(precision).read_bytes()),
            model_config_json=self.config,
            end_token_ids=(7,),
            vocabulary_size=SIZES["vocab_size"],
            max_prompt_tokens=32,
            max_completion_tokens=64,
        )

    def largest_difference(self, engine: LlamaCppEngine) -> float:
        """Between the engine's log-probabilities and those of PEFT's model, over 24 completions."""
        asked = [request(i, prompt_ids=tuple(range(1, 4 + i % 3)), temperature=TEMPERATURE) for i in range(24)]
        worst = 0.0
        for one in asked:
            completion = complete(engine, [one])[one.request_id]
            ids = torch.tensor([[*one.prompt_ids, *completion.token_ids]])
            with torch.no_grad():
                logits = self.model(input_ids=ids).logits[0, len(one.prompt_ids) - 1 : -1]
            chosen = torch.log_softmax(logits.double() / TEMPERATURE, -1)
            chosen = chosen.gather(1, ids[0, len(one.prompt_ids) :, None]).squeeze(1)
            worst = max(worst, float((chosen - torch.tensor(completion.logprobs.tolist())).abs().max()))
        return worst


def engine_with(*policies: PolicyFiles) -> LlamaCppEngine:
    engine = LlamaCppEngine(LlamaCppOptions(batch=4, threads=1))
    for policy in policies:
        engine.load(policy)
    return engine


def sampled(engine: LlamaCppEngine) -> list[tuple[int, list[int], list[float]]]:
    return content(complete(engine, [request(i, prompt_ids=(1, 2, 3, 4)) for i in range(8)]))


@pytest.mark.parametrize("name", ["llama", "llama, biases, large heads", "qwen2", "qwen3"])
def test_log_probabilities_are_those_of_peft(tmp_path: Path, name: str) -> None:
    model = Model(name, tmp_path)
    engine = engine_with(model.version(1))
    largest = model.largest_difference(engine)
    print(f"{name}: largest difference {largest:.1e}")
    assert largest <= 1e-3
    # Over another adapter's model they are far away: what was compared is the adapter.
    engine.load(model.version(2))
    model.version(3)
    assert model.largest_difference(engine) > 0.05


def test_one_adapter_serves_every_precision_of_the_base(tmp_path: Path) -> None:
    model = Model("llama", tmp_path)
    engine = engine_with(model.version(1, "q8_0"))
    assert engine.report().precision == "q8_0"
    assert model.largest_difference(engine) < 0.5


def test_a_swap_reads_the_adapter_alone_and_leaves_nothing_of_the_old_one(tmp_path: Path) -> None:
    model = Model("qwen3", tmp_path)
    first, second = model.version(1), model.version(2)
    whole = replace(first, artifact=first.base, base=None, base_digest=b"")
    alone = [sampled(engine_with(policy)) for policy in (first, second, whole)]
    assert alone[0] != alone[1] != alone[2]
    kept = first.base.rename(tmp_path / "away.gguf")
    engine = engine_with(replace(first, base=kept))
    kept.rename(first.base)
    for policy, expected in ((second, alone[1]), (first, alone[0]), (whole, alone[2]), (second, alone[1])):
        engine.load(policy)
        assert sampled(engine) == expected


def test_an_adapter_of_another_model_is_refused_and_the_next_one_is_taken(tmp_path: Path) -> None:
    model, other = Model("qwen3", tmp_path / "a"), Model("llama", tmp_path / "b")
    good = model.version(1)
    engine = engine_with(good)
    with pytest.raises(LoadRefused, match=r"llama\.cpp cannot load 5\.gguf"):
        engine.load(replace(good, artifact=other.version(5).artifact))
    engine.load(good)
    assert sampled(engine) == sampled(engine_with(good))


def test_the_file_holds_what_is_needed_and_a_layer_without_a_place_is_named(tmp_path: Path) -> None:
    model = Model("llama", tmp_path)
    header = check_gguf_adapter(model.version(1).artifact)
    assert header.values["adapter.lora.alpha"] == 12.0
    assert {tensor.name for tensor in header.tensors} >= {"blk.0.attn_q.weight.lora_a", "blk.1.ffn_down.weight.lora_b"}
    with pytest.raises(NotConvertible, match=r"layer 'model\.layers\.0\.mlp\.down_proj' of \(64, 96\) has no place"):
        config = model.config.replace('"intermediate_size": 96', '"intermediate_size": 128')
        write_adapter(tmp_path / "1.safetensors", config, tmp_path / "x.gguf")
    with pytest.raises(MalformedMessage, match=r"has no place in a version's file"):
        check_gguf_adapter(model.base())
