"""Models and tensor files. Only safetensors are read or written; no code from a model folder is ever run.

Weights are float32 in memory. A tensor that two names share (tied embeddings) is stored once, under the name that
comes first in the model.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from echo_swarm.errors import BackendFailed, SettingsError


def load_model(folder: Path, *, device: torch.device, seed: int, gradient_checkpointing: bool = False) -> Any:
    """Return the causal language model in a Hugging Face folder, float32, with dropout off.

    Dropout is off because the policy that is trained must be the one that sampled. A folder without weights gives a
    randomly initialised model, drawn from `seed`.

    Raises:
        SettingsError: the folder holds no model that can be used; says what is missing.

    """
    if not (folder / "config.json").is_file():
        raise SettingsError(f"{folder} is no model folder: it has no config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _turn_dropout_off(config)
        model = _read(folder, config) if any(folder.glob("*.safetensors")) else _random(config, seed)
    except (OSError, ValueError, SafetensorError) as e:
        raise SettingsError(f"cannot load the model in {folder}: {e}") from e
    model = model.to(device=device)
    model.train(gradient_checkpointing)
    if gradient_checkpointing:
        _recompute_activations(model)
    return model


def tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Return all parameters and persistent buffers, each once, by name."""
    parameters: dict[str, Tensor] = dict(model.named_parameters())
    with_shared = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = {name: tensor for name, tensor in model.state_dict().items() if name not in with_shared}
    return {**parameters, **buffers}


def save_weights(model: torch.nn.Module, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the weights as safetensors; floating-point tensors in `dtype`. Equal weights give equal bytes."""
    save_tensors(
        {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors(model).items()},
        path,
    )


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Read weights written by `save_weights` into `model`.

    Raises:
        BackendFailed: the file does not hold exactly this model's tensors.

    """
    stored = load_tensors(path)
    wanted = tensors(model)
    wrong = sorted(set(stored) ^ set(wanted)) or [name for name in wanted if stored[name].shape != wanted[name].shape]
    if wrong:
        raise BackendFailed(f"{path} belongs to another model: {len(wrong)} tensors differ, such as {wrong[0]}")
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(stored[name])


def save_tensors(content: dict[str, Tensor], path: Path) -> None:
    """Write tensors as safetensors."""
    save_file(
        {name: tensor.detach().to("cpu").contiguous() for name, tensor in content.items()},
        path,
        metadata={"format": "pt"},
    )


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file. Raises BackendFailed when it is missing or damaged."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as e:
        raise BackendFailed(f"cannot read {path}: {e}") from e


def _read(folder: Path, config: Any) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    model, report = loaded
    # The library would fill missing tensors with random numbers and only log it.
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise SettingsError(f"{folder} lacks {len(missing)} of the model's tensors, such as {missing[0]}")
    return model


def _random(config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)


def _recompute_activations(model: Any) -> None:
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:  # older versions of transformers know it by its old name only
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _turn_dropout_off(config: Any) -> None:
    for name, value in config.to_dict().items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)
