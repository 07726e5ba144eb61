"""The few figures of a model's `config.json` that decide about memory."""

import json
from dataclasses import dataclass
from typing import Any, Self

from echo_swarm.errors import BackendFailed

_MOST = {"num_hidden_layers": 4096, "num_key_value_heads": 65_536, "head_dim": 65_536, "vocab_size": 1 << 31}
"""Beyond any model there is; catches nonsense before anything is built from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder."""

    layers: int
    kv_heads: int
    head_dim: int
    vocabulary_rows: int
    """Rows of the embedding; may exceed the run's vocabulary by padding."""

    @property
    def cache_numbers_per_token(self) -> int:
        """Numbers that the key-value cache holds for one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @classmethod
    def parse(cls, model_config_json: str) -> Self:
        """Read a Hugging Face `config.json`.

        Raises:
            BackendFailed: naming the field that is missing or out of range.

        """
        try:
            config = json.loads(model_config_json)
        except (ValueError, RecursionError) as e:
            raise BackendFailed(f"the run's model config is not JSON: {e}") from e
        if not isinstance(config, dict):
            raise BackendFailed("the run's model config is not a JSON object")
        heads = _figure(config, "num_attention_heads")
        return cls(
            layers=_figure(config, "num_hidden_layers"),
            kv_heads=_figure(config, "num_key_value_heads", heads),
            head_dim=_figure(config, "head_dim", _figure(config, "hidden_size") // heads),
            vocabulary_rows=_figure(config, "vocab_size"),
        )


def _figure(config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    most = _MOST.get(name, 1 << 24)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise BackendFailed(f"the run's model config has no usable {name}: {value!r}"[:300])
    return value
