"""The node's end of a backend child, for every engine.

    submit, load ─► pipe ─► child ─► pipe ─► _receive ─► outcomes (bounded by MAX_OUTSTANDING) ─► next_outcome
                                              │
    _watch: fails the backend when no frame came for too long (a hang, since a slow child beats between its steps)

A backend that failed stays failed: every call raises BackendFailed with the child's last words. Whoever owns it leaves
the block and starts another (see `restart`).
"""

import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from echo_node.backends.base import (
    MAX_OUTSTANDING,
    CannotScore,
    GenerationRequest,
    LoadRefused,
    LoadTimes,
    Outcome,
    PolicyFiles,
    ScoreRequest,
    Scores,
)
from echo_node.backends.conductor import LoadResult, ScoreResult
from echo_node.backends.frames import pack_policy, pack_requests, pack_score, unpack_event
from echo_node.backends.options import OPTIONS, EngineOptions
from echo_node.backends.survey import FOREIGN
from echo_node.backends.temporary import own_temporary_folder
from echo_swarm.children import Child, start_child
from echo_swarm.errors import BackendFailed, MalformedMessage, UsageError
from echo_swarm.work import BackendReport

_FOREVER_S = 1e7
"""The receiving task waits as long as it takes; `_watch` judges silence."""
_ENVIRONMENT = {
    # A backend loads what it is given and downloads nothing.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Nor does it import what lies in the folder that the node was started in, such as somebody's torch.py.
    "PYTHONSAFEPATH": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a child may take. Seconds."""

    start_s: float = 180.0
    """Until it is ready: importing its library from a cold disk."""
    silent_s: float = 120.0
    """Between two frames while it samples: one step of the slowest machine we serve."""
    load_s: float = 900.0
    """Between two frames while it swaps weights."""


class ChildBackend:
    """A `Backend` whose engine runs in a child process. Made by `start_backend`."""

    def __init__(self, child: Child, report: BackendReport, patience: Patience) -> None:
        self._child = child
        self._report = report
        self._patience = patience
        self._failure: BackendFailed | None = None
        self._outstanding: set[int] = set()
        self._loads: dict[int, anyio.Event] = {}
        self._loaded: dict[int, LoadResult] = {}
        self._next_load_id = 0
        self._to_score: dict[int, anyio.Event] = {}
        self._scored: dict[int, Scores | str] = {}
        self._next_score_id = 0
        self._heard_s = anyio.current_time()
        self._sink, self._outcomes = anyio.create_memory_object_stream[Outcome](MAX_OUTSTANDING)

    @property
    def report(self) -> BackendReport:
        """What samples in the child."""
        return self._report

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._child.pid

    @property
    def outstanding(self) -> int:
        """Requests submitted whose outcome has not been received from the child."""
        return len(self._outstanding)

    async def load(self, policy: PolicyFiles) -> LoadTimes:
        """Swap weights (see `Backend.load`)."""
        load_id = self._next_load_id
        self._next_load_id += 1
        done = self._loads[load_id] = anyio.Event()
        try:
            await self._send({"kind": "load", "load_id": load_id, "policy": pack_policy(policy)})
            await done.wait()
        finally:
            self._loads.pop(load_id, None)
        self._check()
        result = self._loaded.pop(load_id)
        if result.reason is not None:
            raise LoadRefused(f"{self._child.name} refused version {policy.policy_version}: {result.reason}")
        return result.times

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests (see `Backend.submit`). Raises UsageError for ids in use or too many requests."""
        self._check()
        ids = {request.request_id for request in requests}
        if len(ids) < len(requests) or ids & self._outstanding:
            raise UsageError("each request needs an id of its own until it is answered")
        if len(self._outstanding) + len(ids) + self._outcomes.statistics().current_buffer_used > MAX_OUTSTANDING:
            raise UsageError(f"more than {MAX_OUTSTANDING} requests are unanswered")
        frame = {"kind": "submit", "requests": pack_requests(requests)}
        self._outstanding |= ids
        await self._send(frame)

    async def score(self, request: ScoreRequest) -> Scores:
        """Score completions (see `Backend.score`)."""
        score_id = self._next_score_id
        self._next_score_id += 1
        done = self._to_score[score_id] = anyio.Event()
        try:
            await self._send(pack_score(score_id, request))
            await done.wait()
        finally:
            self._to_score.pop(score_id, None)
        self._check()
        scores = self._scored.pop(score_id)
        if isinstance(scores, str):
            raise CannotScore(scores)
        return scores

    async def next_outcome(self) -> Outcome:
        """Return what finished next (see `Backend.next_outcome`)."""
        try:
            return await self._outcomes.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            self._check()
            raise

    # Inside.

    async def _send(self, frame: dict[str, Any]) -> None:
        self._check()
        try:
            with anyio.fail_after(self._patience.silent_s):
                await self._child.send(frame)
        except TimeoutError:
            # A frame may be half written: nothing can follow it.
            self._fail(f"{self._child.name} takes no more frames; see {self._child.log_path}")
        except BackendFailed as e:
            self._fail(str(e))
        except anyio.get_cancelled_exc_class():
            self._fail(f"{self._child.name} was abandoned in the middle of a frame")
            raise
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            # A new object each time: one exception raised from several tasks would mix their tracebacks.
            raise BackendFailed(str(self._failure))

    def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._failure = BackendFailed(reason)
        self._sink.close()
        for done in [*self._loads.values(), *self._to_score.values()]:
            done.set()

    async def _receive(self) -> None:
        try:
            while self._failure is None:
                frame = await self._child.receive(timeout_s=_FOREVER_S)
                self._heard_s = anyio.current_time()
                if frame["kind"] == "events":
                    self._report = BackendReport.from_wire(frame["report"])
                    for item in frame["items"]:
                        self._take(item)
        except BackendFailed as e:
            self._fail(str(e))
        except (KeyError, TypeError, ValueError, MalformedMessage) as e:
            self._fail(f"{self._child.name} wrote a frame that makes no sense ({type(e).__name__}: {e})")

    def _take(self, item: dict[str, Any]) -> None:
        event = unpack_event(item)
        if isinstance(event, LoadResult):
            if event.load_id in self._loads:
                self._loaded[event.load_id] = event
                self._loads[event.load_id].set()
            return
        if isinstance(event, ScoreResult):
            if event.score_id in self._to_score:
                self._scored[event.score_id] = event.scores
                self._to_score[event.score_id].set()
            return
        self._outstanding.remove(event.request_id)
        self._sink.send_nowait(event)

    async def _watch(self) -> None:
        while self._failure is None:
            limit_s = self._patience.load_s if self._loads else self._patience.silent_s
            remaining_s = self._heard_s + limit_s - anyio.current_time()
            if remaining_s <= 0:
                self._fail(f"{self._child.name} hangs: silent for {limit_s:.0f} s; see {self._child.log_path}")
                return
            await anyio.sleep(min(remaining_s, 1.0))


@asynccontextmanager
async def start_backend(
    options: EngineOptions,
    *,
    log_path: Path,
    patience: Patience | None = None,
    nice: int = 10,
    python: str = sys.executable,
) -> AsyncGenerator[ChildBackend]:
    """Run the engine that `options` are for in a child, for the length of the block.

    `python` may be the interpreter of another environment that has this package and the engine's library.

    Raises:
        BackendFailed: it does not start; with the child's own last words.

    """
    name = next(name for name, model in OPTIONS.items() if model is type(options))
    patience = patience or Patience()
    arguments = [name, options.model_dump_json(), str(nice)]
    foreign = FOREIGN if python != sys.executable else {}
    async with (
        own_temporary_folder() as temporary,
        start_child(
            "echo_node.backends.serve",
            arguments,
            name=f"{name} backend",
            log_path=log_path,
            python=python,
            environment={**_ENVIRONMENT, **options.environment(), **foreign, **temporary},
        ) as child,
    ):
        backend = await _greet(child, patience)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(backend._receive)
                tasks.start_soon(backend._watch)
                try:
                    yield backend
                finally:
                    tasks.cancel_scope.cancel()
                    backend._fail(f"{child.name} has been stopped")
                    backend._outcomes.close()
        except BaseExceptionGroup as group:
            # The two tasks raise nothing, so this is what the block raised; its callers expect it bare.
            if len(group.exceptions) == 1:
                raise group.exceptions[0] from None
            raise


async def _greet(child: Child, patience: Patience) -> ChildBackend:
    frame = await child.receive(timeout_s=patience.start_s)
    try:
        return ChildBackend(child, BackendReport.from_wire(frame["report"]), patience)
    except (KeyError, MalformedMessage) as e:
        raise BackendFailed(f"{child.name} did not introduce itself; see {child.log_path}") from e
