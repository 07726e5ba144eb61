"""A tiny model that comes with this package, and what transformers computes for it in float32. Neither torch nor numpy.

The folder `known_model/` beside this file is written by `tools/make_known_model.py`, which says what is in it.
"""

import json
import math
from array import array
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from echo_node.backends.base import PolicyFiles
from echo_swarm.codec import unpack_f32
from echo_swarm.manifest import ArtifactKind, artifact_file_name, sha256

FOLDER = Path(__file__).with_name("known_model")
MAX_COMPLETION_TOKENS = 64


@dataclass(frozen=True, kw_only=True)
class KnownModel:
    """The files, and the logits after each prompt and after each prompt and one more id."""

    folder: Path
    config: dict[str, Any]
    vocabulary: int
    end_token_id: int
    prompts: tuple[tuple[int, ...], ...]

    @classmethod
    def read(cls, folder: Path = FOLDER) -> Self:
        """Read the description; the weights are left to the backends."""
        values = json.loads((folder / "known_model.json").read_text(encoding="utf-8"))
        prompts = tuple(tuple(prompt) for prompt in values.pop("prompts"))
        return cls(folder=folder, prompts=prompts, **values)

    def files(self, kind: ArtifactKind, precision: str = "") -> PolicyFiles:
        """Return the model as a version to load: safetensors, or GGUF of a precision."""
        path = self.folder / artifact_file_name(kind, precision)
        return PolicyFiles(
            policy_version=0,
            artifact=path,
            artifact_digest=sha256(path.read_bytes()),
            model_config_json=json.dumps(self.config),
            end_token_ids=(self.end_token_id,),
            vocabulary_size=self.vocabulary,
            max_prompt_tokens=max(map(len, self.prompts)),
            max_completion_tokens=MAX_COMPLETION_TOKENS,
        )

    def expected_logprobs(self, prompt: int, ids: "array[int]", temperature: float) -> list[float]:
        """Return log p(id) for the first and the second id of a completion of prompt number `prompt`."""
        rows = [0, 1 + ids[0]][: len(ids)]
        return [self._logprob(prompt, row, i, temperature) for row, i in zip(rows, ids, strict=True)]

    def _logprob(self, prompt: int, row: int, token_id: int, temperature: float) -> float:
        """Return log softmax(logits / T) at one id."""
        start = (prompt * (1 + self.vocabulary) + row) * self.vocabulary
        scaled = [logit / temperature for logit in self._logits[start : start + self.vocabulary]]
        largest = max(scaled)
        return scaled[token_id] - largest - math.log(math.fsum(math.exp(value - largest) for value in scaled))

    @cached_property
    def _logits(self) -> "array[float]":
        return unpack_f32((self.folder / "expected.bin").read_bytes())
