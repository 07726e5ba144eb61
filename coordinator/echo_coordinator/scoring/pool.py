"""A pool of scorer children with a hard deadline for each completion and each prompt.

    prompts() ─┐                       ┌─► slot 0 ─► child
    score() ───┴► jobs (queue of 0) ───┼─► slot 1 ─► child      a slot replaces its child when that hangs or dies
                                       └─► …

The queue holds nothing: callers wait until a slot takes their job, and a batch is cut into jobs of at most JOB_ITEMS,
so that slots share it. A child answers item by item, so the first item without an answer is the culprit. One that runs
past the deadline is given up at once, since it would again; one whose child died is tried TRIES times, alone after the
first. The rest of its job goes to the new child. A prompt that cannot be made is tried twice, since prompts must not
depend on a child that was stopped by chance, and then left out; LOST_PROMPTS of them in a row end the pool's caller.
A child that fails to start START_TRIES times in a row ends the pool.
"""

import logging
import math
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import TaskGroup

from echo_coordinator.scoring.items import Opened, PoolSettings, Prompt, Scored, ScoreRequest
from echo_coordinator.scoring.job import Job
from echo_swarm.children import Child, kill_tree, start_child
from echo_swarm.errors import BackendFailed, EchoError, SettingsError

log = logging.getLogger(__name__)

JOB_ITEMS = 16
TRIES = 3
START_TRIES = 3
RESTART_PAUSE_S = 0.2
OPEN_S = 120.0
"""For importing libraries and reading a data set."""
QUIET_S = 20.0
"""An opening child says every second that it is at it, and before the first time loads an interpreter. One that is
silent for this long was stopped, or its libraries are stuck."""
PROMPTS_AT_ONCE = 64
PROMPT_TRIES = 2
LOST_PROMPTS = 3
SLOW_S = 5.0
"""A prompt that takes longer is worth a word in the status."""
MODULE = "echo_coordinator.scoring.worker"

__all__ = ["Opened", "PoolSettings", "Prompt", "ScoreRequest", "Scored", "ScorerPool", "open_pool"]


class ScorerPool:
    """The parent's end. Any number of tasks may call it at once."""

    def __init__(self, settings: PoolSettings, log_dir: Path) -> None:
        self.settings = settings
        self.skipped: Counter[str] = Counter()
        """Prompts left out, by reason."""
        self.failures = 0
        """Completions that could not be scored."""
        self.replaced = 0
        """Children that hung or died."""
        self.opened: Opened
        self._log_dir = log_dir
        self._making: dict[int, tuple[str, float]] = {}
        """Process id of a child → the prompt it makes, and since when."""
        self._lost_prompts = 0
        """In a row."""
        self._children: dict[int, int] = {}
        self._send, self._receive = anyio.create_memory_object_stream[Job](0)
        self._failed: EchoError | None = None
        self._broken = anyio.Event()
        self._first_open = anyio.Event()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the children that run now."""
        return tuple(self._children.values())

    async def prompts(self, split: str, start: int, count: int) -> list[Prompt]:
        """Return the usable prompts among `count` indices from `start`; those left out are counted in `skipped`.

        Raises:
            SettingsError: the environment or the chat template cannot make prompts with these settings.
            BackendFailed: scorers fail again and again.

        """
        found: list[Prompt] = []
        for begin in range(start, start + count, PROMPTS_AT_ONCE):
            length = min(PROMPTS_AT_ONCE, start + count - begin)
            job = Job(split=str(split), start=begin, stop=begin + length)
            await self._finish([job])
            for frame in job.made:
                if "reason" in frame:
                    self.skipped[frame["reason"]] += 1
                    log.debug("%s prompt %d left out: %s", split, frame["index"], frame["reason"])
                else:
                    found.append(Prompt(index=frame["index"], prompt_ids=frame["prompt_ids"], text=frame["text"]))
        return found

    def held_up(self) -> str:
        """Return what takes unusually long to make, for the status; empty if nothing does."""
        oldest = min(self._making.values(), default=None, key=lambda making: making[1])
        if oldest is None or (taken_s := anyio.current_time() - oldest[1]) < SLOW_S:
            return ""
        limit_s = self.settings.prompt_deadline_s
        return f"{oldest[0]} has been in the making for {taken_s:.0f} s; its scorer is replaced after {limit_s:g} s"

    def why_skipped(self) -> str:
        """Return the most common reason for leaving prompts out, empty if none was."""
        return next((reason for reason, _ in self.skipped.most_common(1)), "")

    async def score(self, items: Sequence[ScoreRequest]) -> list[Scored]:
        """Return one result for each item, in order.

        Raises:
            BackendFailed: scorers fail again and again, whatever they are given.

        """
        length = max(1, min(JOB_ITEMS, math.ceil(len(items) / self.settings.size)))
        jobs = [
            Job(items=part, waiting=list(range(len(part))))
            for part in (items[begin : begin + length] for begin in range(0, len(items), length))
        ]
        await self._finish(jobs)
        results = [job.results[position] for job in jobs for position in range(len(job.items))]
        self.failures += sum(result.reward is None for result in results)
        return results

    async def _finish(self, jobs: list[Job]) -> None:
        async def one(job: Job) -> None:
            await self._send.send(job)
            await job.done.wait()

        async with anyio.create_task_group() as watched:
            watched.start_soon(self._cancel_when_broken, watched.cancel_scope)
            async with anyio.create_task_group() as tasks:
                for job in jobs:
                    tasks.start_soon(one, job)
            watched.cancel_scope.cancel()
        error = next((job.error for job in jobs if job.error is not None), None)
        if error is not None or not all(job.done.is_set() for job in jobs):
            raise error or self._failed or BackendFailed("the scorers have ended")

    async def _cancel_when_broken(self, scope: anyio.CancelScope) -> None:
        await self._broken.wait()
        scope.cancel()

    async def start_slots(self, tasks: TaskGroup) -> None:
        """Start the first child, and when it is open the others. Raises what kept it from opening."""
        tasks.start_soon(self._run_slot, 0)
        await self._first_open.wait()
        if self._failed is not None:
            raise self._failed
        for slot in range(1, self.settings.size):
            tasks.start_soon(self._run_slot, slot)

    def close(self) -> None:
        """Refuse further work, and let go of all who wait."""
        self._fail(BackendFailed("the scorers have ended"))
        self._send.close()
        self._receive.close()

    async def _run_slot(self, slot: int) -> None:
        """Keep one child alive and feed it jobs, until the pool closes or fails."""
        job: Job | None = None
        starts = 0
        try:
            while not self._broken.is_set():
                try:
                    async with self._child(slot) as child:
                        starts = 0
                        self._first_open.set()
                        job = await self._work(child, job)
                        self.replaced += 1
                except BackendFailed as e:
                    starts += 1
                    if starts >= START_TRIES:
                        raise BackendFailed(f"a scorer failed to start {starts} times in a row: {e}") from e
                    log.warning("a scorer did not start, trying again: %s", e)
                    await anyio.sleep(RESTART_PAUSE_S * starts)
        except EchoError as e:
            self._fail(e)

    def _fail(self, error: EchoError) -> None:
        self._failed = self._failed or error
        self._broken.set()
        self._first_open.set()

    @asynccontextmanager
    async def _child(self, slot: int) -> AsyncGenerator[Child]:
        name = f"scorer {slot}"
        async with start_child(MODULE, name=name, log_path=self._log_dir / f"scorer-{slot}.log", grace_s=1.0) as child:
            await self._open(child)
            self._children[slot] = child.pid
            try:
                yield child
            finally:
                del self._children[slot]

    async def _open(self, child: Child) -> None:
        settings = self.settings
        await child.send(
            {
                "op": "open",
                "model_dir": str(settings.model_dir),
                "environment": settings.environment,
                "settings": settings.environment_settings,
                "max_prompt_tokens": settings.max_prompt_tokens,
            }
        )
        reply = await self._first_answer(child)
        end_token_ids = tuple(reply.pop("end_token_ids"))
        reply.pop("op")
        self.opened = Opened(**reply, end_token_ids=end_token_ids)

    async def _first_answer(self, child: Child) -> dict[str, Any]:
        """Wait for a child to open. Raises BackendFailed when it falls silent, or says for OPEN_S that it is at it."""
        with anyio.move_on_after(OPEN_S):
            while (reply := _checked(await child.receive(timeout_s=QUIET_S)))["op"] == "opening":
                pass
            return reply
        raise BackendFailed(f"{child.name} took longer than {OPEN_S:g} s to open {self.settings.environment}")

    async def _work(self, child: Child, job: Job | None) -> Job | None:
        """Run jobs, `job` first. Return when the child must be replaced, with the job that it left unfinished."""
        while True:
            job = job or await self._receive.receive()
            try:
                healthy = await (self._score(child, job) if job.items else self._prompts(child, job))
            except SettingsError as e:
                job.error, healthy = e, True
            if job.error is not None or job.complete:
                job.done.set()
                job = None
            if not healthy:
                return job

    async def _prompts(self, child: Child, job: Job) -> bool:
        """Make what is missing. Returns False when the child hung or died; the culprit is dealt with."""
        request = {"op": "prompts", "split": job.split, "start": job.start, "count": job.stop - job.start}
        try:
            await child.send(request)
            while True:
                self._making[child.pid] = f"{job.split} prompt {job.start}", anyio.current_time()
                frame = await self._answer(child, self.settings.prompt_deadline_s)
                if frame["op"] == "end":
                    job.start = job.stop
                    return True
                job.made.append(frame)
                job.start += 1
                self._lost_prompts = 0
        except (_Deadline, BackendFailed) as e:
            kill_tree(child.pid)
            self._blame(job, str(e) or f"a prompt took longer than {self.settings.prompt_deadline_s:g} s to make")
            return False
        finally:
            self._making.pop(child.pid, None)

    def _blame(self, job: Job, reason: str) -> None:
        """Count a try of the next prompt; leave it out after PROMPT_TRIES."""
        log.warning("%s prompt %d could not be made, its scorer is replaced: %s", job.split, job.start, reason)
        job.tries[job.start] += 1
        if job.tries[job.start] < PROMPT_TRIES:
            return
        self._lost_prompts += 1
        if self._lost_prompts >= LOST_PROMPTS:
            job.error = BackendFailed(f"the environment could not give prompts: {reason}")
        job.made.append({"index": job.start, "reason": reason})
        job.start += 1

    async def _score(self, child: Child, job: Job) -> bool:
        """Score what is waiting. Returns False when the child hung or died; the culprit is dealt with."""
        # Whatever has brought down a child before is tried last and alone.
        batch = [position for position in job.waiting if not job.tries[position]] or job.waiting[:1]
        items = [job.items[position] for position in batch]
        frames = [{"split": str(item.split), "index": item.index, "token_ids": item.token_ids} for item in items]
        answered = 0
        try:
            await child.send({"op": "score", "items": frames})
            for position in batch:
                reply = await self._answer(child, self.settings.deadline_s)
                job.results[position] = Scored(reward=reply["reward"], failure=reply["failure"], text=reply["text"])
                job.waiting.remove(position)
                answered += 1
        except _Deadline:
            kill_tree(child.pid)  # One that hangs would use up its grace, and those waiting with it.
            self._give_up(job, batch[answered], f"the verifier took longer than {self.settings.deadline_s:g} s")
            return False
        except BackendFailed as e:
            kill_tree(child.pid)
            culprit = batch[answered]
            job.tries[culprit] += 1
            if job.tries[culprit] >= TRIES:
                self._give_up(job, culprit, f"the verifier's process failed {TRIES} times: {e}")
            return False
        return True

    async def _answer(self, child: Child, deadline_s: float) -> dict[str, Any]:
        # Ours is the shorter wait, so that a deadline and a dead child can be told apart.
        with anyio.move_on_after(deadline_s):
            return _checked(await child.receive(timeout_s=math.ceil(deadline_s) + 60.0))
        raise _Deadline

    def _give_up(self, job: Job, position: int, reason: str) -> None:
        job.waiting.remove(position)
        job.results[position] = Scored(reward=None, failure=reason, text="")


class _Deadline(Exception):
    pass


def _checked(reply: dict[str, Any]) -> dict[str, Any]:
    if reply["op"] == "error":
        raise SettingsError(reply["text"]) if reply["settings"] else BackendFailed(reply["text"])
    return reply


@asynccontextmanager
async def open_pool(settings: PoolSettings, *, log_dir: Path) -> AsyncGenerator[ScorerPool]:
    """Run a pool for the length of the block. Its children write their logs to `log_dir`/scorer-<n>.log.

    Raises:
        SettingsError: environment, its settings, tokenizer or chat template cannot work.
        BackendFailed: a scorer cannot be started.

    """
    pool = ScorerPool(settings, log_dir)
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        try:
            # The first alone: what is wrong with the settings is wrong for all, and is said once.
            await pool.start_slots(tasks)
            yield pool
        except Exception as e:  # noqa: BLE001 - passed on below, outside the task group, which would wrap it
            failure = e
        finally:
            tasks.cancel_scope.cancel()
    pool.close()
    if failure is not None:
        raise failure
