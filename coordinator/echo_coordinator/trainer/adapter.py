"""LoRA: a small adapter is trained over a model that stays as it is (arXiv 2106.09685), through the PEFT library.

    model folder ─► base file (written once, in the published precision) ─► model, frozen ─► + adapter, trained
                    nodes sample over this very file, so both sides compute with the same numbers

PEFT's forward is y = W x + (alpha / rank) B (A x), B zero at first: version 0 is the base.
"""

import json
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from echo_coordinator.trainer.model import load_tensors, load_weights, save_tensors, save_weights
from echo_coordinator.trainer.settings import LoraSettings, Precision
from echo_swarm.checkpoint.adapter_file import CONFIG_KEY, PREFIX, adapter_config, read_adapter, tensor_names
from echo_swarm.checkpoint.files import make_folder, publish_file
from echo_swarm.checkpoint.read_back import file_digest
from echo_swarm.errors import BackendFailed, MalformedMessage, SettingsError

BASE_FILE = "base/model.safetensors"
"""In the checkpoint folder. What the adapters of all checkpoints there apply to."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PART = re.compile(r"(.+)\.lora_([AB])\.default\.weight")


def fix_base(model: torch.nn.Module, checkpoints: Path, precision: Precision) -> str:
    """Make `model` hold exactly the numbers of the base file, which is written if it is not there yet.

    Returns:
        The file's sha256, in hexadecimal digits.

    """
    path = checkpoints / BASE_FILE
    if not path.is_file():
        make_folder(path.parent)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        save_weights(model, temporary, _DTYPES[precision])
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        publish_file(temporary, path)
    load_weights(model, path)
    return file_digest(path).hex()


def add_adapter(model: torch.nn.Module, settings: LoraSettings, seed: int) -> None:
    """Freeze `model` and put a trainable adapter, drawn from `seed`, over its target layers.

    Raises:
        SettingsError: a target is no linear layer of this model's blocks; names those that are.

    """
    from peft import LoraConfig, inject_adapter_in_model

    _check_targets(model, settings.targets)
    model.requires_grad_(False)
    described = adapter_config(rank=settings.rank, alpha=settings.alpha, targets=settings.targets)
    config = LoraConfig(**{**described, "inference_mode": False})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model)


def adapter_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return the adapter's tensors under the names that PEFT gives them in a file."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if match := _PART.fullmatch(name):
            found[f"{PREFIX}{match[1]}.lora_{match[2]}.weight"] = parameter
    return found


def save_adapter(model: torch.nn.Module, settings: LoraSettings, path: Path) -> None:
    """Write the adapter as a `lora` file, float32. Equal adapters give equal bytes."""
    config = adapter_config(rank=settings.rank, alpha=settings.alpha, targets=settings.targets)
    content = {name: tensor.detach().to("cpu").contiguous() for name, tensor in adapter_tensors(model).items()}
    # One entry: the library writes several in an order that changes.
    save_file(content, path, metadata={CONFIG_KEY: json.dumps(config, sort_keys=True)})


def load_adapter(model: torch.nn.Module, settings: LoraSettings, path: Path) -> None:
    """Read a file of `save_adapter` into `model`.

    Raises:
        BackendFailed: it is damaged, or of another rank, alpha or other targets.

    """
    try:
        stored_config = read_adapter(path).config
    except (OSError, MalformedMessage) as e:
        raise BackendFailed(f"cannot read {path}: {e}") from e
    stored, wanted = load_tensors(path), adapter_tensors(model)
    config = adapter_config(rank=settings.rank, alpha=settings.alpha, targets=settings.targets)
    shapes = [{name: tensor.shape for name, tensor in tensors.items()} for tensors in (stored, wanted)]
    if stored_config != config or shapes[0] != shapes[1]:
        raise BackendFailed(
            f"{path} has rank {stored_config['r']}, alpha {stored_config['lora_alpha']}, targets "
            f"{', '.join(stored_config['target_modules'])}: [lora] was changed after the run began; write it back"
        )
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(stored[name])


class WithoutAdapter:
    """The frozen base of a model with an adapter, called like a model: the reference of a KL term, for no memory."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, **arguments: Any) -> Any:
        """Run the base."""
        with _disabled(self._model):
            return self._model(**arguments)


@contextmanager
def _disabled(model: torch.nn.Module) -> Generator[None]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _check_targets(model: Any, targets: tuple[str, ...]) -> None:
    outer = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    linear = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and id(module) not in outer
    }
    if unknown := sorted(set(targets) - linear):
        raise SettingsError(
            f"lora.targets: {unknown[0]!r} is no linear layer of this model's blocks; there are "
            f"{', '.join(sorted(linear))}"
        )


def merge(base: Path, adapter: Path, target: Path) -> None:
    """Write the model that base and adapter make together: W + (alpha / rank) B A, in the base's precision.

    Raises:
        BackendFailed, MalformedMessage: a file is damaged, or the adapter is for another model.

    """
    described = read_adapter(adapter)
    weights, matrices = load_tensors(base), load_tensors(adapter)
    for layer, shape in described.layers.items():
        weight = weights.get(f"{layer}.weight")
        if weight is None or tuple(weight.shape) != shape:
            raise BackendFailed(f"{adapter} is for a layer {layer} of {shape}, which {base} does not have")
        first, second = (matrices[name].float() for name in tensor_names(layer))
        weights[f"{layer}.weight"] = (weight.float() + described.scale * second @ first).to(weight.dtype)
    save_tensors(weights, target)
