"""The scorer child: one environment and one tokenizer, behind frames. Run as `python -m` this module by `pool`.

    open     model_dir, environment, settings, max_prompt_tokens   → opening  every second until it is done
                                                                   → opened   eval_size, train_size, end_token_ids, …
    prompts  split, start, count                                   → made     one frame an index, in order: index, and
                                                                              prompt_ids, text, or reason (left out)
                                                                   → end      after the last
    score    items [{split, index, token_ids}]                     → scored   one frame an item, in order:
                                                                              position, reward, failure, text
    any      what cannot work                                      → error    text, settings (whether a person can
                                                                              mend it in run.toml)

Verifiers run in the main thread, since some use SIGALRM. One frame an item tells the parent which one hangs. There is
no place for a claim of the worker that sampled: text is made from ids here, and rewards come from the verifier alone.
"""

import logging
import math
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from echo_coordinator.environments.base import Environment, PromptSkipped, Split, Unscorable
from echo_coordinator.environments.registry import open_environment
from echo_coordinator.model_folder import ModelFacts, read_facts
from echo_coordinator.scoring.tokenizer import PromptTokenizer
from echo_swarm import codec
from echo_swarm.children import claim_pipes, die_with_parent, read_frame, write_frame
from echo_swarm.errors import EchoError, SettingsError

ROUNDING = 1e-6
"""Rewards outside [0, 1] by no more than this are rounding errors and are clipped; others are refused."""
BEAT_S = 1.0
MAX_LOGGED = 100
"""Failures of the verifier that a child writes down with their tracebacks."""
MAX_TEXT_CHARS = 4_000
"""Of a prompt or completion sent along for people to read."""


class Worker:
    """The operations."""

    def __init__(self, writer: BinaryIO) -> None:
        self._writer = writer
        self._environment: Environment | None = None
        self._tokenizer: PromptTokenizer | None = None
        self._max_prompt_tokens = 0
        self._failures = 0

    def handle(self, message: dict[str, Any]) -> None:
        """Answer one frame."""
        operation = {"open": self._open, "prompts": self._prompts, "score": self._score}[message["op"]]
        try:
            operation(message)
        except EchoError as e:
            self._reply("error", text=str(e), settings=isinstance(e, SettingsError))

    def _open(self, message: dict[str, Any]) -> None:
        with self._beating():
            environment, tokenizer, facts = self._load(message)
        self._reply(
            "opened",
            eval_size=environment.size(Split.EVAL),
            train_size=environment.size(Split.TRAIN),
            end_token_ids=list(facts.end_token_ids),
            vocabulary_size=facts.vocabulary_size,
            has_chat_template=tokenizer.has_chat_template,
        )

    def _load(self, message: dict[str, Any]) -> tuple[Environment, PromptTokenizer, ModelFacts]:
        model_dir = Path(message["model_dir"])
        facts = read_facts(model_dir)
        tokenizer = PromptTokenizer(model_dir, facts.end_token_ids)
        environment = open_environment(message["environment"], message["settings"])
        self._environment, self._tokenizer = environment, tokenizer
        self._max_prompt_tokens = message["max_prompt_tokens"]
        # Environments do some of their reading at the first prompt, which would count against that prompt's deadline.
        with suppress(PromptSkipped, IndexError):
            environment.prompt(Split.TRAIN, 0)
        return environment, tokenizer, facts

    @contextmanager
    def _beating(self) -> Generator[None]:
        """Say every second that opening goes on: how long a data set takes is anybody's guess, a stop is not."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(BEAT_S):
                self._reply("opening")

        thread = threading.Thread(target=beat, name="beat", daemon=True)
        self._reply("opening")
        thread.start()
        try:
            yield
        finally:
            # The writer is the main thread's again.
            done.set()
            thread.join()

    def _prompts(self, message: dict[str, Any]) -> None:
        environment, _ = self._opened()
        split = Split(message["split"])
        size = environment.size(split)
        stop = message["start"] + message["count"]
        for index in range(message["start"], stop if size is None else min(stop, size)):
            try:
                prompt_ids, text = self._make(split, index)
            except PromptSkipped as e:
                self._reply("made", index=index, reason=str(e) or "no reason was given")
            else:
                self._reply("made", index=index, prompt_ids=prompt_ids, text=text)
        self._reply("end")

    def _make(self, split: Split, index: int) -> tuple[bytes, str]:
        environment, tokenizer = self._opened()
        prompt = environment.prompt(split, index)
        ids = tokenizer.encode(prompt)
        if not ids or len(ids) > self._max_prompt_tokens:
            raise PromptSkipped(f"prompt longer than {self._max_prompt_tokens} tokens" if ids else "empty prompt")
        return codec.pack_u32(ids), tokenizer.render(prompt)[:MAX_TEXT_CHARS]

    def _score(self, message: dict[str, Any]) -> None:
        for position, item in enumerate(message["items"]):
            reward, failure, text = self._score_one(item)
            self._reply("scored", position=position, reward=reward, failure=failure, text=text[:MAX_TEXT_CHARS])

    def _score_one(self, item: dict[str, Any]) -> tuple[float | None, str | None, str]:
        environment, tokenizer = self._opened()
        split, index = Split(item["split"]), item["index"]
        text = tokenizer.decode(codec.unpack_u32(item["token_ids"]))
        size = environment.size(split)
        try:
            if size is not None and index >= size:
                raise IndexError(f"there is no {split} prompt {index}, only {size}")
            reward = environment.reward(split, index, text)
        except (Unscorable, PromptSkipped, IndexError) as e:
            return None, str(e) or type(e).__name__, text
        except Exception as e:
            # The first ones tell a person enough; a verifier that always fails must not fill the disk.
            self._failures += 1
            if self._failures <= MAX_LOGGED:
                logging.exception("the verifier failed on %s %s", split, index)
            return None, f"{type(e).__name__}: {e}"[:300], text
        return *checked_reward(reward), text

    def _opened(self) -> tuple[Environment, PromptTokenizer]:
        if self._environment is None or self._tokenizer is None:
            raise EchoError("the scorer was not opened")
        return self._environment, self._tokenizer

    def _reply(self, op: str, **fields: Any) -> None:
        write_frame(self._writer, {"op": op, **fields})


def checked_reward(reward: object) -> tuple[float | None, str | None]:
    """Return (reward, None), or (None, why) for what is no finite number in [0, 1]."""
    if isinstance(reward, (bool, int, float)) and math.isfinite(reward) and -ROUNDING <= reward <= 1 + ROUNDING:
        return min(1.0, max(0.0, float(reward))), None
    return None, f"the verifier gave {str(reward)[:40]}, which is no number from 0 to 1"


def main() -> None:
    """Serve the parent until it closes the pipe."""
    die_with_parent()
    reader, writer = claim_pipes()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    worker = Worker(writer)
    while (message := read_frame(reader)) is not None:
        worker.handle(message)


if __name__ == "__main__":
    main()
