"""Feeds one backend from the lease book and collects what it makes, for as long as that backend lives.

    LeaseBook ──turn, begin──► load, if another version is due ──► submit ──► backend ──► finished | refused
                       at most `places` requests unanswered: its batch, and a few that wait in it

Those that wait take a place that becomes free within the same step. Fed one by one, each place stays empty for a step:
with completions of 64 tokens that cost 4 % (benchmarks/node_throughput.py).

A load is a barrier in the backend: what runs finishes on the old weights, so nothing is ever aborted for a version. Nor
should anything begin on them for long, so that none waits in the backend while a newer version is on its way.
"""

from collections.abc import Callable, Collection, Container
from dataclasses import dataclass
from typing import Protocol

import anyio

from echo_node.activity import Activity, Part
from echo_node.backends.base import (
    Backend,
    Completion,
    FailedRequest,
    FailureCode,
    GenerationRequest,
    LoadRefused,
    PolicyFiles,
    ScoreRequest,
    Scores,
)
from echo_node.lease_book import LeaseBook, Turn
from echo_node.swaps import Swaps
from echo_swarm.clock import Clock
from echo_swarm.codec import unpack_u32
from echo_swarm.errors import BackendFailed
from echo_swarm.work import BackendReport, Lease, LeaseMember

AHEAD = 0.25
"""Requests that wait in the backend, as a share of its batch."""
MAX_REFUSALS = 10
"""Requests refused in a row after which the backend, not the prompts, is to blame."""


class Policies(Protocol):
    """What the sampler needs of policy sync."""

    @property
    def newest(self) -> int | None:
        """The newest version that is held and usable."""
        ...

    @property
    def known_head(self) -> int | None:
        """The newest version that there is, held or not."""
        ...

    @property
    def usable(self) -> Container[int]:
        """All versions that could be loaded now."""
        ...

    @property
    def refused(self) -> Container[int]:
        """Versions that can never be used here."""
        ...

    @property
    def takeovers(self) -> int:
        """How often versions were dropped, so that what is loaded may be another than the one of that number now."""
        ...

    @property
    def left_behind(self) -> bool:
        """Whether no version whose work would still count can be used here."""
        ...

    def files(self, version: int) -> PolicyFiles:
        """Return a usable version's files."""
        ...

    def want(self, versions: Collection[int]) -> None:
        """Ask for versions that are not held; they become usable later, or never."""
        ...

    def refuse(self, version: int, reason: str) -> None:
        """Note that the backend cannot use a version."""
        ...

    def set_in_use(self, versions: Collection[int]) -> None:
        """Say which versions must not be deleted."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A completion of a lease that still holds."""

    lease: Lease
    member: LeaseMember
    completion: Completion
    report: BackendReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A lease of which the backend refused a request."""

    lease: Lease
    reason: str
    blame_prompt: bool
    """Whether another node would refuse it as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    lease: Lease
    member: LeaseMember


class Sampler:
    """One backend's life."""

    def __init__(
        self,
        *,
        backend: Backend,
        book: LeaseBook,
        policies: Policies,
        clock: Clock,
        activity: Activity,
        swaps: Swaps,
        finished: Callable[[Finished], None],
        refused: Callable[[Refused], None],
        swapped: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._book = book
        self._policies = policies
        self._clock = clock
        self._activity = activity
        self._swaps = swaps
        self._finished = finished
        self._refused = refused
        self._swapped = swapped
        self._running: dict[int, _Running] = {}
        self._next_id = 0
        self._refusals = 0
        self._takeovers = policies.takeovers
        self._changed = anyio.Event()
        self._freshened = anyio.Event()
        """Unset while somebody waits in `score` for the newest version to be loaded."""
        self._freshened.set()
        self.loaded: int | None = None
        """The version that new requests are answered by; None before the first load and after a refused one."""
        self.loads = 0

    @property
    def report(self) -> BackendReport:
        """What samples here."""
        return self._backend.report

    @property
    def places(self) -> int:
        """Requests that the backend should have."""
        batch, head = self._backend.report.batch, self._policies.known_head
        is_newest = self.loaded is not None and (head is None or head <= self.loaded)
        return batch + (int(AHEAD * batch) if is_newest else 0)

    @property
    def free(self) -> int:
        """How many it may be given now."""
        return max(0, self.places - len(self._running))

    @property
    def _is_asked(self) -> bool:
        return not self._freshened.is_set()

    def wake(self) -> None:
        """Tell that leases or versions changed."""
        self._changed.set()

    async def score(self, request: ScoreRequest) -> Scores:
        """Score completions (see `Backend.score`).

        Without work, nothing asks for the newest version to be loaded, and it is that one which is to be scored.
        """
        self._freshened = anyio.Event()
        self._changed.set()
        await self._freshened.wait()
        return await self._backend.score(request)

    async def run(self) -> None:
        """Feed and collect until the backend ends. Raises BackendFailed."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._collect)
                while True:
                    self._changed = anyio.Event()
                    if not await self._advance():
                        await self._changed.wait()
        finally:
            self._freshened.set()

    async def _advance(self) -> bool:
        """Do the next thing. Returns False when there is nothing to do before something changes."""
        newest = self._policies.newest
        if self._takeovers != self._policies.takeovers:
            self._takeovers, self.loaded = self._policies.takeovers, None
        if self.loaded is None:
            # Before any work is taken: a node that cannot load must not hold leases.
            return newest is not None and await self._load(newest)
        self._policies.want(self._book.missing(newest, self._policies.usable))
        turn = self._turn()
        if turn is None and not self._running and newest is not None and newest != self.loaded and self._is_asked:
            return await self._load(newest)
        self._freshened.set()
        if turn is None or not self.free:
            return False
        if turn.version != self.loaded:
            await self._load(turn.version)
        else:
            await self._submit(turn)
        return True

    async def _load(self, version: int) -> bool:
        files = self._policies.files(version)
        self._policies.set_in_use({version} if self.loaded is None else {version, self.loaded})
        self._activity.progress(f"loading version {version} into the backend")
        try:
            times = await self._backend.load(files)
        except LoadRefused as e:
            self.loaded = None
            if not self.loads:
                raise BackendFailed(str(e)) from e
            self._policies.refuse(version, str(e))
            self._activity.waits(Part.BACKEND, f"a version that the backend can use (not {version})", str(e))
            return True
        self.loaded = version
        self.loads += 1
        self._swaps.loaded(version, times)
        self._policies.set_in_use({version})
        self._activity.done(Part.BACKEND)
        self._activity.doing(f"sampling with version {version}")
        self._swapped()
        return True

    def _turn(self) -> Turn | None:
        return self._book.turn(
            loaded=self.loaded,
            newest=self._policies.newest,
            held=self._policies.usable,
            now_s=self._clock.monotonic_s(),
        )

    async def _submit(self, first: Turn) -> None:
        """Submit all that can run now in one call: what runs beside what then follows from the leases alone."""
        requests: list[GenerationRequest] = []
        turn: Turn | None = first
        while turn is not None and turn.version == self.loaded and self.free:
            begun = self._begin(turn.lease)
            if not begun:
                break
            requests += begun
            turn = self._turn()
        await self._backend.submit(requests)

    def _begin(self, lease: Lease) -> list[GenerationRequest]:
        prompt_ids = tuple(unpack_u32(lease.prompt_ids))
        requests: list[GenerationRequest] = []
        for member in self._book.begin(lease.lease_id, self.free):
            self._running[self._next_id] = _Running(lease=lease, member=member)
            requests.append(
                GenerationRequest(
                    request_id=self._next_id,
                    prompt_ids=prompt_ids,
                    max_tokens=lease.sampling.max_tokens,
                    temperature=lease.sampling.temperature,
                    seed=member.seed,
                )
            )
            self._next_id += 1
        return requests

    async def _collect(self) -> None:
        while True:
            outcome = await self._backend.next_outcome()
            running = self._running.pop(outcome.request_id, None)
            self._changed.set()
            if running is None:
                continue
            if isinstance(outcome, FailedRequest):
                self._on_refusal(running, outcome)
                continue
            self._refusals = 0
            if self._book.finish(running.lease.lease_id, running.member.member):
                self._finished(
                    Finished(lease=running.lease, member=running.member, completion=outcome, report=self.report)
                )

    def _on_refusal(self, running: _Running, outcome: FailedRequest) -> None:
        blame_prompt = outcome.code is not FailureCode.NO_POLICY
        self._refused(Refused(lease=running.lease, reason=outcome.reason, blame_prompt=blame_prompt))
        self._refusals += blame_prompt
        if self._refusals >= MAX_REFUSALS:
            raise BackendFailed(f"the backend refused {self._refusals} requests in a row; the last: {outcome.reason}")
