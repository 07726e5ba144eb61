"""A transformers model from a `config.json` and a safetensors file: no code, no download, exact names and shapes."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from echo_node.backends.base import LoadRefused, PolicyFiles

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_model(policy: PolicyFiles, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Return the architecture that the config names, its weights not yet meaningful.

    Raises:
        LoadRefused: the config names an architecture that transformers does not bring itself, or one that this
            engine's cache cannot serve.

    """
    try:
        config = model_config(policy)
        _check_attention(config, policy)
        with no_init_weights(), torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        model.tie_weights()
    except LoadRefused:
        raise
    except torch.OutOfMemoryError as e:
        raise LoadRefused(f"the model does not fit into memory: {_first_line(e)}") from e
    except Exception as e:
        raise LoadRefused(f"cannot build the model from its config: {type(e).__name__}: {_first_line(e)}") from e
    return model.eval().requires_grad_(False)


def model_config(policy: PolicyFiles) -> Any:
    """Return the transformers config that the policy's `config.json` describes.

    Raises:
        LoadRefused: it asks for quantised weights.
        Exception: of transformers' own, when it makes no sense of it.

    """
    fields: dict[str, Any] = json.loads(policy.model_config_json)
    model_type = fields.pop("model_type")
    # References to code inside a model's repository; never followed.
    fields.pop("auto_map", None)
    if fields.get("quantization_config"):
        raise LoadRefused("the model's config asks for quantised weights, which this backend does not load")
    return AutoConfig.for_model(model_type, **fields)


def load_weights(model: torch.nn.Module, artifact: Path) -> None:
    """Copy a safetensors file into `model`, tensor by tensor. All names and shapes are checked before the first copy.

    Raises:
        LoadRefused: names or shapes differ, or the file cannot be read.

    """
    try:
        with safe_open(artifact, framework="pt") as file:
            targets = match_tensors(model, file)
            with torch.no_grad():
                for name, target in targets.items():
                    target.copy_(file.get_tensor(name))
    except (OSError, SafetensorError) as e:
        raise LoadRefused(f"cannot read {artifact.name}: {_first_line(e)}") from e


def match_tensors(model: torch.nn.Module, file: Any) -> dict[str, torch.Tensor]:
    """Return the model's tensor for each name in an open safetensors file.

    Raises:
        LoadRefused: a tensor is missing, unknown, or of another shape.

    """
    unique = dict(model.named_parameters()) | _persistent_buffers(model)
    # Tied weights have several names and may be stored under any or all of them.
    allowed = model.state_dict(keep_vars=True)
    names = set(file.keys())
    targets = {name: allowed[name] for name in names & allowed.keys()}
    covered = {id(tensor) for tensor in targets.values()}
    missing = sorted(name for name, tensor in unique.items() if id(tensor) not in covered)
    _refuse("lacks", missing)
    _refuse("has unknown", sorted(names - allowed.keys()))
    for name, target in targets.items():
        shape = tuple(file.get_slice(name).get_shape())
        if shape != tuple(target.shape):
            raise LoadRefused(f"tensor {name} has shape {shape}, the model wants {tuple(target.shape)}")
    return targets


def _check_attention(config: Any, policy: PolicyFiles) -> None:
    """Refuse what the row cache cannot serve: recurrent layers, and windows shorter than the context."""
    context = policy.max_prompt_tokens + policy.max_completion_tokens
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and context > longest:
        raise LoadRefused(f"the run allows {context} tokens, the model's context is {longest}")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if kinds - {"full_attention", "sliding_attention"}:
        raise LoadRefused(f"layers of type {', '.join(sorted(kinds))} are not supported by the torch backend")
    windowed = "sliding_attention" in kinds or (window is not None and not hasattr(config, "layer_types"))
    if windowed and window is not None and window < context:
        raise LoadRefused(f"the model's sliding window of {window} is shorter than the run's context of {context}")


def _persistent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    stored = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def _refuse(what: str, names: list[str]) -> None:
    if names:
        raise LoadRefused(f"the file {what} {len(names)} tensor(s), such as {names[0][:200]}")


def _first_line(e: BaseException) -> str:
    return next(iter(str(e).splitlines()), type(e).__name__)[:300]
