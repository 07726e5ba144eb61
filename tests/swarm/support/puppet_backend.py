"""The backend seam in a few lines, inside the test's own process: answers at once, or when the test says so."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio

from echo_node.backends.base import (
    CannotScore,
    FailedRequest,
    FailureCode,
    GenerationRequest,
    LoadRefused,
    LoadTimes,
    Outcome,
    PolicyFiles,
    ScoreRequest,
    Scores,
)
from echo_node.backends.options import ScriptedOptions
from echo_node.backends.scripted import script, script_logprobs
from echo_swarm.errors import BackendFailed
from echo_swarm.work import BackendReport


class PuppetBackend:
    def __init__(self, *, batch: int = 4):
        self.batch = batch
        self.hold = False
        """Requests wait for `finish` instead of being answered at once."""
        self.scores = False
        self.policy: PolicyFiles | None = None
        self.loaded: list[int] = []
        self.refuse_versions: dict[int, str] = {}
        self.refuse_prompt: Callable[[tuple[int, ...]], bool] = lambda prompt: False
        self.starts = 0
        self.fail_starts = 0
        self.running: dict[int, tuple[GenerationRequest, PolicyFiles]] = {}
        self.most_running = 0
        self._failure = ""
        self._idle = anyio.Event()

    @asynccontextmanager
    async def open(self) -> AsyncGenerator["PuppetBackend"]:
        self.starts += 1
        if self.starts <= self.fail_starts:
            raise BackendFailed("the puppet has no strings")
        self._failure = ""
        self.policy = None
        self.running.clear()
        self._sink, self._outcomes = anyio.create_memory_object_stream[Outcome](8192)
        try:
            yield self
        finally:
            self._sink.close()
            self._outcomes.close()

    @property
    def report(self) -> BackendReport:
        return BackendReport(backend="scripted", build="puppet", precision="float32", device="none", batch=self.batch)

    async def load(self, policy: PolicyFiles) -> LoadTimes:
        self._check()
        while self.running:
            await self._idle.wait()
        if policy.policy_version in self.refuse_versions:
            raise LoadRefused(self.refuse_versions[policy.policy_version])
        assert policy.artifact.is_file()
        self.policy = policy
        self.loaded.append(policy.policy_version)
        return LoadTimes()

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._check()
        assert self.policy is not None
        for request in requests:
            self.running[request.request_id] = (request, self.policy)
        self.most_running = max(self.most_running, len(self.running))
        if not self.hold:
            self.finish()

    async def score(self, request: ScoreRequest) -> Scores:
        self._check()
        if self.policy is None or not self.scores:
            raise CannotScore("a puppet has no model")
        version = self.policy.policy_version
        return Scores(
            logprobs=tuple(script_logprobs(prompt, ids, version) for prompt, ids in request.items),
            policy_version=version,
            artifact_digest=self.policy.artifact_digest,
        )

    async def next_outcome(self) -> Outcome:
        try:
            return await self._outcomes.receive()
        except anyio.EndOfStream:
            raise BackendFailed(self._failure or "stopped") from None

    def finish(self, count: int | None = None) -> None:
        """Answer what runs, oldest first."""
        for request_id in list(self.running)[:count]:
            request, policy = self.running.pop(request_id)
            if self.refuse_prompt(request.prompt_ids):
                self._sink.send_nowait(
                    FailedRequest(request_id=request_id, code=FailureCode.TOO_LONG, reason="too long for a puppet")
                )
            else:
                self._sink.send_nowait(script(request, policy, ScriptedOptions()))
        if not self.running:
            self._idle.set()
            self._idle = anyio.Event()

    def die(self, reason: str) -> None:
        self._failure = reason
        self._sink.close()

    def _check(self) -> None:
        if self._failure:
            raise BackendFailed(self._failure)
