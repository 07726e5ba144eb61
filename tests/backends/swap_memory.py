"""What a backend's child takes over twenty swaps, of versions so large that keeping one of each swap would show.

A whole version has 17 MiB, an adapter 8: twenty of them are far more than a tenth of any child.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import save_file

from echo_coordinator.publisher.gguf.adapter import write_adapter
from echo_coordinator.publisher.gguf.write import write_gguf
from echo_coordinator.trainer.adapter import adapter_tensors, add_adapter, save_adapter
from echo_coordinator.trainer.settings import LoraSettings
from echo_node.backends.base import Completion, PolicyFiles
from echo_node.backends.child import ChildBackend
from echo_swarm.manifest import sha256
from tests.unit.backends.support import request
from tests.unit.publisher.gguf_models import save_model

SWAPS = 20
GROWTH = 1.1
"""Of what the child took after the second swap."""
VERSIONS = 3
"""They take turns: what a version leaves behind does not depend on whether it was there before."""
SHAPE: dict[str, Any] = {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
LORA = LoraSettings(rank=128, alpha=128)


def whole_versions(folder: Path, *, gguf: bool = False) -> list[PolicyFiles]:
    """Versions of all weights."""
    model = save_model("llama", folder, **SHAPE)
    return [_whole(folder, model, seed, gguf=gguf) for seed in range(VERSIONS)]


def lora_versions(folder: Path, *, gguf: bool = False) -> list[PolicyFiles]:
    """Adapters over one base."""
    model = save_model("llama", folder, **SHAPE)
    base = _whole(folder, model, 0, gguf=gguf)
    config = base.model_config_json
    add_adapter(model, LORA, 0)
    versions: list[PolicyFiles] = []
    for seed in range(VERSIONS):
        _draw(adapter_tensors(model).values(), seed)
        path = folder / f"adapter-{seed}.safetensors"
        save_adapter(model, LORA, path)
        if gguf:
            source, path = path, path.with_suffix(".gguf")
            write_adapter(source, config, path)
        digest = sha256(path.read_bytes())
        version = replace(base, artifact=path, artifact_digest=digest)
        versions.append(replace(version, base=base.artifact, base_digest=base.artifact_digest))
    return versions


async def grown(backend: ChildBackend, versions: Sequence[PolicyFiles]) -> float:
    """Return how many times its size after the second swap the child has at the end.

    Of the last three the smallest: a small child's size goes up and down by a version's, and a leak does not go down.
    """
    sizes: list[int] = []
    for number in range(SWAPS):
        policy = replace(versions[number % VERSIONS], policy_version=number)
        await backend.load(policy)
        await backend.submit([request(i, max_tokens=4) for i in range(8)])
        outcomes = [await backend.next_outcome() for _ in range(8)]
        assert {o.newest_version for o in outcomes if isinstance(o, Completion)} == {number}, outcomes
        sizes.append(psutil.Process(backend.pid).memory_info().rss)
    print(f"resident MiB: {[size >> 20 for size in sizes]}")
    return min(sizes[-VERSIONS:]) / sizes[1]


def _whole(folder: Path, model: torch.nn.Module, seed: int, *, gguf: bool) -> PolicyFiles:
    _draw([parameter for parameter in model.parameters() if parameter.ndim == 2], seed)
    path = folder / f"whole-{seed}.safetensors"
    save_file({name: tensor.detach().clone() for name, tensor in model.named_parameters()}, path)
    config = (folder / "config.json").read_text(encoding="utf-8")
    if gguf:
        source, path = path, path.with_suffix(".gguf")
        write_gguf(source, config, path, "f32")
    return PolicyFiles(
        policy_version=seed,
        artifact=path,
        artifact_digest=sha256(path.read_bytes()),
        model_config_json=config,
        end_token_ids=(7,),
        vocabulary_size=json.loads(config)["vocab_size"],
        max_prompt_tokens=32,
        max_completion_tokens=64,
    )


def _draw(tensors: Iterable[torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in tensors:
            tensor.normal_(0, 0.05, generator=generator)
