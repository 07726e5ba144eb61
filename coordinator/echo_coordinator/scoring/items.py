"""What goes into the pool of scorers and what comes out."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROMPT_DEADLINE_S = 30.0
"""At least; some tasks search for a puzzle with one solution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """What each scorer is made of."""

    model_dir: Path
    """Folder with tokenizer.json, config.json and perhaps a chat template."""
    environment: str
    """Such as `reasoning_gym:chain_sum`; see environments.registry."""
    environment_settings: dict[str, Any] = field(default_factory=dict[str, Any])
    max_prompt_tokens: int
    size: int = 1
    """Child processes."""
    deadline_s: float = 30.0
    """For one completion."""
    prompt_deadline_s: float = PROMPT_DEADLINE_S
    """For one prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A tokenised prompt."""

    index: int
    """Its place in the split."""
    prompt_ids: bytes
    """`codec.pack_u32`."""
    text: str
    """For people; cut after some thousand characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """A completion to score."""

    split: str
    """`train` or `eval`."""
    index: int
    """Of its prompt."""
    token_ids: bytes
    """`codec.pack_u32`, completion only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What came out. Exactly one of `reward` and `failure` is None."""

    reward: float | None
    """In [0, 1]."""
    failure: str | None
    """Why the verifier could not say."""
    text: str
    """The completion, for people; cut after some thousand characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What the children say of the environment and the model."""

    eval_size: int
    train_size: int | None
    """None: endless."""
    end_token_ids: tuple[int, ...]
    vocabulary_size: int
    has_chat_template: bool
