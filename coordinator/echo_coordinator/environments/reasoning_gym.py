"""Any reasoning-gym data set as an environment: `reasoning_gym:<task>`, with the task's own settings.

reasoning-gym makes item i of a data set from the number `seed + i` alone. Each split owns a range of such numbers that
the other never touches: evaluation the first EVAL_ROOM, training chunks of CHUNK items after them, one data set a
chunk, so that training never ends. Small tasks repeat themselves all the same, so a training item whose question also
stands in the evaluation split is skipped.
"""

import functools
import random
import re
from dataclasses import fields
from typing import Annotated, Any, cast

from pydantic import Field

from echo_coordinator.environments.base import ChatMessage, Prompt, PromptSkipped, Split, Unscorable
from echo_coordinator.environments.settings import EnvironmentSettings, check_settings, near
from echo_swarm.errors import SettingsError

CHUNK = 1024
EVAL_ROOM = 1 << 16
SEED_ROOM = 1 << 26
"""Distance between the number ranges of two seeds; numpy, which some tasks use, takes 32 bits, so 63 seeds differ."""


class ReasoningGymSettings(EnvironmentSettings):
    """Ours; every other name is handed to the data set."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Another seed gives other items."""
    eval_size: Annotated[int, Field(ge=1, le=EVAL_ROOM)] = 512
    """Items kept for evaluation; a run's `evaluation.prompts` takes them from the front."""
    prompt: Annotated[str, Field(min_length=1)] = "{question}"
    """What the model sees. `{question}`, or any field of the item's metadata, such as `{expression} =`."""
    system_prompt: str | None = None
    """Put before the prompt; for chat models."""
    chat: bool = True
    """Through the model's chat template, if it has one. False: plain text always."""
    answer_start: str = ""
    """The answer stands behind the last occurrence of this, such as `<answer>`. Empty: the whole completion."""
    answer_end: str = ""
    """The answer ends before this, such as `</answer>`. Empty: at the end."""
    answer_required: bool = False
    """A completion without `answer_start` earns 0. False: the whole completion counts as its answer."""
    full_credit_only: bool = False
    """Anything below a full score counts as 0 (many tasks pay a little for an answer hidden in other text)."""


class ReasoningGymEnvironment:
    """One task of reasoning-gym."""

    def __init__(self, task: str, settings: dict[str, Any]) -> None:
        """Raises SettingsError for an unknown task or setting."""
        from reasoning_gym.factory import DATASETS

        registered = cast("dict[str, tuple[Any, Any]]", DATASETS)
        if task not in registered:
            raise SettingsError(f"reasoning-gym has no task {task!r}{near(task, registered)}")
        self._name = f"reasoning_gym:{task}"
        self._dataset_class, self._config_class = registered[task]
        own = {name: value for name, value in settings.items() if name in ReasoningGymSettings.model_fields}
        self._settings = check_settings(ReasoningGymSettings, own, self._name)
        self._task_settings = {name: _tuples(value) for name, value in settings.items() if name not in own}
        self._check_task_settings()
        self._chunk = functools.lru_cache(maxsize=8)(self._make_chunk)
        self._held_out: frozenset[str] | None = None
        try:
            self.prompt(Split.EVAL, 0)
        except PromptSkipped as e:
            raise SettingsError(f"environment.settings of {self._name}: its first item cannot be made: {e}") from e

    def size(self, split: Split) -> int | None:
        """Evaluation is as large as the settings say, training endless."""
        return self._settings.eval_size if split is Split.EVAL else None

    def prompt(self, split: Split, index: int) -> Prompt:
        """See Environment.prompt. Training items that are also evaluation items are skipped."""
        item = self._item(split, index)
        if split is Split.TRAIN and str(item["question"]) in self._evaluation_questions():
            raise PromptSkipped("the same question is held out for evaluation")
        text = self._fill(item)
        system = self._settings.system_prompt
        if not self._settings.chat:
            return Prompt(text=text if system is None else f"{system}\n\n{text}")
        turns = [] if system is None else [ChatMessage(role="system", content=system)]
        return Prompt(messages=(*turns, ChatMessage(role="user", content=text)))

    def reward(self, split: Split, index: int, completion: str) -> float:
        """See Environment.reward. Deterministic, also where a task's verifier draws random numbers."""
        item = self._item(split, index)
        dataset, _ = self._place(split, index)
        random.seed(0)
        try:
            score = float(dataset.score_answer(self._answer(completion), item))
        except Exception as e:
            raise Unscorable(f"{self._name}: {type(e).__name__}: {e}"[:300]) from e
        return score if score >= 1 or not self._settings.full_credit_only else 0.0

    def _answer(self, completion: str) -> str:
        settings = self._settings
        answer = completion
        if settings.answer_start:
            _, found, rest = completion.rpartition(settings.answer_start)
            if found or settings.answer_required:
                answer = rest if found else ""
        if settings.answer_end:
            answer = answer.partition(settings.answer_end)[0]
        return answer.strip()

    def _fill(self, item: dict[str, Any]) -> str:
        values = {**cast("dict[str, Any]", item["metadata"]), "question": item["question"]}

        def value(match: "re.Match[str]") -> str:
            name = match.group(1)
            if name not in values:
                text = f"environment.settings.prompt: {self._name} has no field {name!r}{near(name, values)}"
                raise SettingsError(text)
            return str(values[name])

        return re.sub(r"\{(\w+)\}", value, self._settings.prompt)

    def _item(self, split: Split, index: int) -> dict[str, Any]:
        size = self.size(split)
        if index < 0 or (size is not None and index >= size):
            raise IndexError(f"{split} prompt {index} of {size}")
        dataset, place = self._place(split, index)
        try:
            return cast("dict[str, Any]", dataset[place])
        except Exception as e:
            raise PromptSkipped(f"{self._name}: {type(e).__name__}: {e}"[:300]) from e

    def _place(self, split: Split, index: int) -> tuple[Any, int]:
        base = (self._settings.seed % 63) * SEED_ROOM
        if split is Split.EVAL:
            return self._chunk(base, self._settings.eval_size), index
        number, place = divmod(index, CHUNK)
        # Wrapping round keeps every index valid; it takes 65,000 updates of 1024 prompts to get there.
        number %= (SEED_ROOM - EVAL_ROOM) // CHUNK
        return self._chunk(base + EVAL_ROOM + number * CHUNK, CHUNK), place

    def _make_chunk(self, seed: int, size: int) -> Any:
        try:
            config = self._config_class(**self._task_settings, seed=seed, size=size)
            return self._dataset_class(config=config)
        except Exception as e:
            raise SettingsError(f"environment.settings of {self._name}: {e or type(e).__name__}") from e

    def _evaluation_questions(self) -> frozenset[str]:
        if self._held_out is None:
            dataset = self._chunk((self._settings.seed % 63) * SEED_ROOM, self._settings.eval_size)
            self._held_out = frozenset(str(dataset[i]["question"]) for i in range(self._settings.eval_size))
        return self._held_out

    def _check_task_settings(self) -> None:
        known = {field.name for field in fields(self._config_class)}
        for name in self._task_settings:
            if name == "size":
                raise SettingsError(
                    f"environment.settings of {self._name}: training is endless; set eval_size, not size"
                )
            if name not in known:
                names = known | set(ReasoningGymSettings.model_fields)
                raise SettingsError(f"environment.settings of {self._name}: no setting {name!r}{near(name, names)}")


def _tuples(value: Any) -> Any:
    # TOML has lists where the data sets' settings want tuples; those that want lists take tuples as well.
    return tuple(_tuples(entry) for entry in cast("list[Any]", value)) if isinstance(value, list) else value


def task_names() -> list[str]:
    """Return the names of all tasks."""
    from reasoning_gym.factory import DATASETS

    return sorted(cast("dict[str, Any]", DATASETS))
