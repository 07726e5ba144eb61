"""A backend whose child is replaced between two versions when it has grown: a leak costs a restart, not the machine.

    load(version) ─► resident memory beyond the bound? ── no ──► the child's load
                                                        └─ yes ─► what runs finishes ─► child ends ─► new child ─► load

A load is a barrier anyway, so that nothing is lost and its caller notices nothing but the time. The bound is relative
to what the child took once it had loaded and sampled two versions: before that, growth is normal (caches, allocators).
Memory of a GPU is not looked at; it ends with the child as well.
"""

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass

import anyio
import psutil
from anyio import to_thread
from anyio.abc import TaskStatus

from echo_node.backends.base import GenerationRequest, LoadTimes, Outcome, PolicyFiles, ScoreRequest, Scores
from echo_node.backends.child import ChildBackend
from echo_node.machine import gib
from echo_swarm.errors import BackendFailed
from echo_swarm.work import BackendReport

OpenChild = Callable[[], AbstractAsyncContextManager[ChildBackend]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBound:
    """How far a child may grow."""

    settled_loads: int = 2
    """Versions that a child loads and samples with before its size counts as normal."""
    factor: float = 1.5
    slack_bytes: int = 512 << 20
    """A child may grow to `factor` times its normal size and this much more."""

    def exceeded(self, normal_bytes: int, resident_bytes: int) -> bool:
        """Whether a child of that normal size has grown too far."""
        return resident_bytes > self.factor * normal_bytes + self.slack_bytes


class RenewingBackend:
    """A `Backend`. Made by `open_renewing`."""

    def __init__(self, open_child: OpenChild, bound: MemoryBound, emit: Callable[[str], None]) -> None:
        self._open_child = open_child
        self._bound = bound
        self._emit = emit
        self._child: ChildBackend | None = None
        self._loads = 0
        """Of this child."""
        self._normal_bytes = 0
        self._unanswered = 0
        self._all_answered = anyio.Event()
        self._renew = anyio.Event()
        self._renewed = anyio.Event()
        self._replacing = False
        self._swapping = anyio.Lock()
        self.renewals = 0

    @property
    def report(self) -> BackendReport:
        """What samples in the child."""
        return self._running.report

    @property
    def pid(self) -> int:
        """Process id of the child that runs now."""
        return self._running.pid

    async def load(self, policy: PolicyFiles) -> LoadTimes:
        """Swap to `policy`, in another child if need be (see `Backend.load`)."""
        async with self._swapping:
            resident = await to_thread.run_sync(resident_bytes, self.pid)
            if self._loads == self._bound.settled_loads:
                self._normal_bytes = resident
            elif self._loads > self._bound.settled_loads and self._bound.exceeded(self._normal_bytes, resident):
                self._emit(
                    f"the {self.report.backend} backend has grown from {gib(self._normal_bytes)} to {gib(resident)}; "
                    f"it is started anew for version {policy.policy_version}"
                )
                await self._replace()
            self._loads += 1
            return await self._running.load(policy)

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests (see `Backend.submit`)."""
        async with self._swapping:
            self._unanswered += len(requests)
            try:
                await self._running.submit(requests)
            except BaseException:
                self._answered(len(requests))
                raise

    async def next_outcome(self) -> Outcome:
        """Return what finished next (see `Backend.next_outcome`)."""
        while True:
            child = self._running
            try:
                outcome = await child.next_outcome()
            except BackendFailed:
                if child is self._child and not self._replacing:
                    raise
                # It ended because it is replaced; it owed nothing.
                await self._renewed.wait()
                continue
            self._answered(1)
            return outcome

    async def score(self, request: ScoreRequest) -> Scores:
        """Score completions (see `Backend.score`)."""
        async with self._swapping:
            self._unanswered += 1
        try:
            return await self._running.score(request)
        finally:
            self._answered(1)

    # Inside.

    @property
    def _running(self) -> ChildBackend:
        assert self._child is not None, "the block of `open_renewing` starts with a child"
        return self._child

    def _answered(self, count: int) -> None:
        self._unanswered -= count
        if not self._unanswered:
            self._all_answered.set()

    async def _replace(self) -> None:
        while self._unanswered:
            # Should the child die meanwhile, then whoever waits for outcomes is told.
            self._all_answered = anyio.Event()
            await self._all_answered.wait()
        self._replacing, self._renewed = True, anyio.Event()
        self._renew.set()
        await self._renewed.wait()
        self._replacing = False
        self.renewals += 1

    async def keep(self, *, task_status: TaskStatus[None]) -> None:
        """Own the children, one after the other. Raises BackendFailed when one does not start."""
        while True:
            self._renew = anyio.Event()
            is_first = self._child is None
            async with self._open_child() as self._child:
                self._loads = self._normal_bytes = 0
                self._renewed.set()
                if is_first:
                    task_status.started()
                await self._renew.wait()


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and all below it; 0 when it is gone."""
    total = 0
    with contextlib.suppress(psutil.Error):
        parent = psutil.Process(pid)
        for process in (parent, *parent.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
    return total


@asynccontextmanager
async def open_renewing(
    open_child: OpenChild, *, emit: Callable[[str], None], bound: MemoryBound | None = None
) -> AsyncGenerator[RenewingBackend]:
    """Run a backend whose child is replaced when it grows, for the length of the block.

    Raises:
        BackendFailed: as `open_child` does.

    """
    try:
        async with anyio.create_task_group() as tasks:
            backend = RenewingBackend(open_child, bound or MemoryBound(), emit)
            await tasks.start(backend.keep)
            yield backend
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        # Callers expect one error bare, whether the block raised it or a child did that did not start.
        if len(group.exceptions) == 1:
            raise group.exceptions[0] from None
        raise
