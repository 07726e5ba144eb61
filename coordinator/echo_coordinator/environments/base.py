"""The environment seam: prompts by index, and what a completion's text is worth.

    registry.open_environment(name, settings) ─► Environment ─► scoring.worker (child) ─► scoring.pool (coordinator)

An environment lives in a scorer child. What a reward needs (gold answers, task metadata) stays inside it and is found
again by (split, index); only prompts leave the training side. Both splits are deterministic: the same name, settings,
split and index give the same prompt in every process and after every restart. The splits share no prompt.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Split(StrEnum):
    """What a prompt is used for."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    """`system`, `user` or `assistant`, as the model's chat template knows it."""
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a completion answers: plain text for a base model, messages for a chat model. Never both."""

    text: str | None = None
    """Such as `58 + 26 =`."""
    messages: tuple[ChatMessage, ...] = ()

    def __post_init__(self) -> None:
        if (self.text is None) == (not self.messages):
            raise ValueError("a prompt is either text or messages")


class PromptSkipped(Exception):
    """There is no usable prompt at this index; the message says why. The index stays unused, others do not shift."""


class Unscorable(Exception):
    """The verifier itself failed on this completion: counted apart, never a reward of 0."""


class Environment(Protocol):
    """A task with a verifier."""

    def size(self, split: Split) -> int | None:
        """Return how many indices a split has, or None when it is endless (training may be, evaluation never)."""
        ...

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return the prompt at `index` >= 0.

        Raises:
            PromptSkipped: this index holds no usable prompt.
            IndexError: `index` is not below `size(split)`.

        """
        ...

    def reward(self, split: Split, index: int, completion: str) -> float:
        """Return the reward in [0, 1] of a completion's text (end tokens already stripped; may be empty).

        Raises:
            Unscorable: the verifier failed.
            PromptSkipped, IndexError: as for `prompt`.

        """
        ...
