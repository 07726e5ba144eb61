"""Reading the header of a LoRA adapter, strictly, without any tensor library.

A `lora` file is PEFT's `adapter_model.safetensors`; what PEFT keeps beside it in `adapter_config.json` is its metadata
entry `adapter_config`. For each adapted linear layer of the base it holds two matrices:

    base_model.model.<layer>.lora_A.weight   [rank, inputs]
    base_model.model.<layer>.lora_B.weight   [outputs, rank]       y = W x + (alpha / rank) B A x

1. it is a good safetensors file (see `safetensors_file`),
2. the configuration is a JSON object of exactly the entries of `adapter_config`, with the arithmetic above,
3. every tensor is one of such a pair, each pair whole, with the rank of the configuration, all of one type.
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from echo_swarm.checkpoint.safetensors_file import Header, read_header
from echo_swarm.errors import MalformedMessage

CONFIG_KEY = "adapter_config"
MAX_CONFIG_BYTES = 65_536
MAX_RANK = 512
"""The largest that vLLM serves."""
PREFIX = "base_model.model."
"""What PEFT puts before the names of the base's own modules."""
_NAME = re.compile(r"base_model\.model\.([A-Za-z0-9_.]{1,200})\.lora_([AB])\.weight")
_TYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A checked adapter, e.g. of rank 16 with alpha 32 on q_proj and v_proj of 30 layers."""

    rank: int
    alpha: float
    layers: dict[str, tuple[int, int]]
    """Adapted linear layer, by its name in the base → (outputs, inputs)."""
    config: dict[str, Any]
    """PEFT's adapter_config.json."""
    header: Header

    @property
    def scale(self) -> float:
        """What B A is multiplied with."""
        return self.alpha / self.rank


def adapter_config(*, rank: int, alpha: float, targets: Sequence[str]) -> dict[str, Any]:
    """Return PEFT's configuration of an adapter, as its file carries it."""
    return {
        "base_model_name_or_path": "",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def tensor_names(layer: str) -> tuple[str, str]:
    """Return the names of a layer's A and B in the file."""
    return f"{PREFIX}{layer}.lora_A.weight", f"{PREFIX}{layer}.lora_B.weight"


def read_adapter(path: Path) -> Adapter:
    """Read and check the header of a file against the rules above.

    Raises:
        MalformedMessage: naming what is wrong.
        OSError: the file cannot be read.

    """
    header = read_header(path)
    config = _config(header.metadata.get(CONFIG_KEY, ""))
    rank = cast("int", config["r"])
    return Adapter(
        rank=rank, alpha=float(config["lora_alpha"]), layers=_layers(header, rank), config=config, header=header
    )


def _config(text: str) -> dict[str, Any]:
    if not 0 < len(text) <= MAX_CONFIG_BYTES:
        raise MalformedMessage(f"adapter: its metadata has no {CONFIG_KEY}, or one that is too long")
    try:
        config: Any = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise MalformedMessage(f"adapter: {CONFIG_KEY} is no JSON") from e
    expected = adapter_config(rank=1, alpha=1.0, targets=())
    if not isinstance(config, dict) or cast("dict[str, Any]", config).keys() != expected.keys():
        raise MalformedMessage(f"adapter: {CONFIG_KEY} does not have exactly {', '.join(expected)}")
    config = cast("dict[str, Any]", config)
    for key in expected.keys() - {"r", "lora_alpha", "target_modules"}:
        if config[key] != expected[key]:
            raise MalformedMessage(f"adapter: {key} is {str(config[key])[:80]!r}; only {expected[key]!r} is served")
    rank, alpha = config["r"], config["lora_alpha"]
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise MalformedMessage(f"adapter: r is {str(rank)[:80]!r}, expected a whole number from 1 to {MAX_RANK}")
    if type(alpha) not in (int, float) or not 0 < alpha < math.inf:
        raise MalformedMessage(f"adapter: lora_alpha is {str(alpha)[:80]!r}, expected a number above 0")
    return config


def _layers(header: Header, rank: int) -> dict[str, tuple[int, int]]:
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor in header.tensors:
        match = _NAME.fullmatch(tensor.name)
        if match is None or tensor.dtype not in _TYPES or tensor.dtype != header.tensors[0].dtype:
            raise MalformedMessage(f"adapter: tensor {tensor.name[:80]!r} ({tensor.dtype}) has no place in an adapter")
        found.setdefault(match[1], {})[match[2]] = tensor.shape
    if not found:
        raise MalformedMessage("adapter: it holds no tensors")
    for layer, pair in found.items():
        first, second = pair.get("A", ()), pair.get("B", ())
        if len(first) != 2 or len(second) != 2 or first[0] != rank or second[1] != rank or 0 in first + second:
            raise MalformedMessage(f"adapter: layer {layer!r} has A {first} and B {second}, rank {rank}")
    return {layer: (pair["B"][0], pair["A"][1]) for layer, pair in found.items()}
