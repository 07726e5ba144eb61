"""LoRA adapters over a transformers model, computed as the trainer's library computes them, and swapped in place.

    y = W x + (alpha / rank) B (A x)

Merging B A into W would be faster by two small products a layer, and would round: the log-probabilities would no
longer be those of the trainer, and taking an adapter out again would not give the base back.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.nn.functional import linear

from echo_node.backends.base import LoadRefused
from echo_swarm.checkpoint.adapter_file import Adapter, read_adapter, tensor_names
from echo_swarm.errors import MalformedMessage


class LoraLinear(torch.nn.Module):
    """A linear layer with an adapter beside it; the layer itself stays as it is."""

    def __init__(self, base: torch.nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        weight = base.weight
        outputs, inputs = weight.shape
        self.first = torch.nn.Parameter(weight.new_zeros(rank, inputs), requires_grad=False)
        self.second = torch.nn.Parameter(weight.new_zeros(outputs, rank), requires_grad=False)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [..., outputs] for [..., inputs]."""
        return self.base(x) + linear(linear(x, self.first), self.second) * self.scale


def apply_adapter(model: torch.nn.Module, path: Path) -> None:
    """Make `model` the base with this adapter, whatever adapter it had. All is checked before the first change.

    Raises:
        LoadRefused: the file is no adapter, or not one of this model.

    """
    try:
        adapter = read_adapter(path)
        bases = check_layers(model, adapter)
        with safe_open(path, framework="pt") as file, torch.no_grad():
            for layer in _fit_layers(model, adapter, bases):
                first, second = tensor_names(layer)
                module = model.get_submodule(layer)
                assert isinstance(module, LoraLinear)
                module.first.copy_(file.get_tensor(first))
                module.second.copy_(file.get_tensor(second))
                module.scale = adapter.scale
    except (OSError, SafetensorError, MalformedMessage) as e:
        raise LoadRefused(f"cannot read {path.name}: {e}") from e


def remove_adapter(model: torch.nn.Module) -> None:
    """Give the base back as it was."""
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLinear):
            _put(model, name, module.base)


def check_layers(model: torch.nn.Module, adapter: Adapter) -> dict[str, torch.nn.Linear]:
    """Return the base layer for each adapted one. Raises LoadRefused when the model does not have it."""
    modules = dict(model.named_modules())
    found: dict[str, torch.nn.Linear] = {}
    for layer, shape in adapter.layers.items():
        module = modules.get(layer)
        base = module.base if isinstance(module, LoraLinear) else module
        if not isinstance(base, torch.nn.Linear):
            raise LoadRefused(f"the adapter is for a layer {layer[:200]!r}, which the model does not have")
        if tuple(base.weight.shape) != shape:
            raise LoadRefused(f"the adapter's layer {layer} is {shape}, the model's {tuple(base.weight.shape)}")
        found[layer] = base
    return found


def _fit_layers(model: torch.nn.Module, adapter: Adapter, bases: dict[str, torch.nn.Linear]) -> list[str]:
    """Put adapter layers where this adapter has them, and nowhere else; return where."""
    there = {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    if there.keys() != bases.keys() or any(len(module.first) != adapter.rank for module in there.values()):
        remove_adapter(model)
        for layer, base in bases.items():
            _put(model, layer, LoraLinear(base, adapter.rank))
    return list(bases)


def _put(model: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)
