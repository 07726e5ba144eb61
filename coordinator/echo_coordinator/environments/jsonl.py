"""A JSONL file of questions as an environment: `jsonl:<path>`, each line `{"prompt": …, "answer": …}`.

`prompt` is a string, or a list of {"role", "content"} messages. Answers are compared mathematically by math-verify.
A line whose answer cannot be parsed can never be scored, so it is left out and counted when the file is read.
"""

import hashlib
import json
import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field

from echo_coordinator.environments.base import ChatMessage, Prompt, PromptSkipped, Split
from echo_coordinator.environments.math_answers import Gold, parse_gold, reward_of
from echo_coordinator.environments.settings import EnvironmentSettings, check_settings
from echo_swarm.errors import SettingsError

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 30
ENOUGH = 2
"""Different prompts: one to train on, one held out."""
EXPECTED = 'expected on each line: {"prompt": "1 + 1 = ?", "answer": "2"}'
_ROLES = ("system", "user", "assistant")


class JsonlSettings(EnvironmentSettings):
    """Settings of a JSONL environment."""

    eval_share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Part of the usable lines held out. Which ones depends on their content and `seed`, not on their order."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the split into training and evaluation."""
    system_prompt: str | None = None
    """Put before the prompt; for chat models."""
    chat: bool = True
    """Through the model's chat template, if it has one. False: plain text always."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    key: str
    """Digest of the prompt; equal prompts go to the same split."""
    turns: tuple[ChatMessage, ...]
    gold: Gold


class JsonlEnvironment:
    """Questions from a file. Training indices run on for ever, in a new order on each pass."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        """Raises SettingsError when the file cannot be used."""
        self._settings = check_settings(JsonlSettings, settings, f"jsonl:{path.name}")
        samples, self.skipped = _read(path)
        ranked = sorted({sample.key for sample in samples}, key=lambda key: _rank(self._settings.seed, key))
        if len(ranked) < ENOUGH:
            raise _too_few(path, len(ranked), self.skipped_in_words())
        held_out = set(ranked[: min(len(ranked) - 1, max(1, round(len(ranked) * self._settings.eval_share)))])
        samples.sort(key=lambda sample: _rank(self._settings.seed, sample.key))
        self._samples = {
            Split.EVAL: [sample for sample in samples if sample.key in held_out],
            Split.TRAIN: [sample for sample in samples if sample.key not in held_out],
        }
        if self.skipped:
            log.warning("%s: %s", path, self.skipped_in_words())

    def skipped_in_words(self) -> str:
        """Return how many lines were left out, by reason."""
        return ", ".join(f"{count} × {reason}" for reason, count in sorted(self.skipped.items())) or "none left out"

    def size(self, split: Split) -> int | None:
        """Evaluation has as many prompts as were held out, training is endless."""
        return len(self._samples[Split.EVAL]) if split is Split.EVAL else None

    def prompt(self, split: Split, index: int) -> Prompt:
        """See Environment.prompt."""
        turns = self._sample(split, index).turns
        if self._settings.system_prompt is not None:
            turns = (ChatMessage(role="system", content=self._settings.system_prompt), *turns)
        if self._settings.chat:
            return Prompt(messages=turns)
        return Prompt(text="\n\n".join(turn.content for turn in turns))

    def reward(self, split: Split, index: int, completion: str) -> float:
        """See Environment.reward."""
        return reward_of(self._sample(split, index).gold, completion)

    def _sample(self, split: Split, index: int) -> _Sample:
        samples = self._samples[split]
        if index < 0 or (split is Split.EVAL and index >= len(samples)):
            raise IndexError(f"{split} prompt {index} of {len(samples)}")
        round_number, place = divmod(index, len(samples))
        if round_number and split is Split.TRAIN:
            # An affine step is a permutation when its factor has no divisor in common with the length.
            place = (place * _factor(len(samples), round_number) + round_number) % len(samples)
        return samples[place]


def _factor(length: int, round_number: int) -> int:
    import math

    factor = 2 * round_number + 1
    while math.gcd(factor, length) != 1:
        factor += 1
    return factor


def _rank(seed: int, key: str) -> str:
    return hashlib.sha256(f"{seed}/{key}".encode()).hexdigest()


def check_file(path: Path) -> None:
    """Look at each line's form, and for prompts enough to begin with: what `init` asks before it makes a run.

    Raises:
        SettingsError: naming the line that is wrong and what is expected there.

    """
    keys: set[str] = set()
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            # Parsing every answer would take minutes for a large file; a bad one is left out and counted anyway.
            with suppress(PromptSkipped):
                sample = _sample(line, f"{path}:{number}", parse=len(keys) < ENOUGH)
                keys.add(sample.key)
    if len(keys) < ENOUGH:
        raise _too_few(path, len(keys), EXPECTED)


def _too_few(path: Path, count: int, why: str) -> SettingsError:
    return SettingsError(
        f"{path}: {count} different prompts with an answer that can be scored, at least {ENOUGH} are needed ({why})"
    )


def _lines(path: Path) -> list[str]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SettingsError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB; split it")
        return path.read_text(encoding="utf-8").split("\n")
    except OSError as e:
        raise SettingsError(f"cannot read {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise SettingsError(f"{path} is not UTF-8: {e}") from e


def _read(path: Path) -> tuple[list[_Sample], dict[str, int]]:
    samples: list[_Sample] = []
    skipped: dict[str, int] = {}
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        try:
            samples.append(_sample(line, f"{path}:{number}"))
        except PromptSkipped as e:
            skipped[str(e)] = skipped.get(str(e), 0) + 1
    return samples, skipped


def _sample(line: str, where: str, *, parse: bool = True) -> _Sample:
    record = _record(line, where)
    answer = record["answer"]
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise SettingsError(f'{where}: "answer" is a text or a number')
    turns = _turns(record["prompt"], where)
    gold = parse_gold(str(answer)) if parse else Gold(choice=None, parsed=[])
    if gold is None:
        raise PromptSkipped("answer cannot be parsed")
    key = hashlib.sha256(re.sub(r"\s+", " ", json.dumps([(t.role, t.content) for t in turns])).encode()).hexdigest()
    return _Sample(key=key, turns=turns, gold=gold)


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise SettingsError(f"{where}: not a JSON value ({e}); {EXPECTED}") from e
    if not isinstance(value, dict):
        raise SettingsError(f'{where}: no object with "prompt" and "answer"; {EXPECTED}')
    record = cast("dict[str, Any]", value)
    if missing := [name for name in ("prompt", "answer") if name not in record]:
        found = ", ".join(list(record)[:8])[:200] or "nothing"
        raise SettingsError(f"{where}: {' and '.join(missing)} missing (it has: {found}); {EXPECTED}")
    return record


def _turns(prompt: Any, where: str) -> tuple[ChatMessage, ...]:
    if isinstance(prompt, str) and prompt.strip():
        return (ChatMessage(role="user", content=prompt),)
    turns: list[ChatMessage] = []
    for turn in cast("list[Any]", prompt) if isinstance(prompt, list) else []:
        fields = cast("dict[str, Any]", turn) if isinstance(turn, dict) else {}
        role, content = fields.get("role"), fields.get("content")
        if role not in _ROLES or not isinstance(content, str):
            raise SettingsError(f"{where}: each message has a role ({', '.join(_ROLES)}) and a text content")
        turns.append(ChatMessage(role=role, content=content))
    if not turns:
        raise SettingsError(f'{where}: "prompt" is a text or a list of messages, and not empty')
    return tuple(turns)
