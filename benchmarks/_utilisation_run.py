"""One run of the utilisation benchmark: real coordinator and nodes, scripted engines, a trainer of fixed step time.

    MeteredBackend (InlineBackend (ScriptedEngine)) ─► Node, several times ─► memory network ─► run_coordinator
                                                                                                   ▲ StandInTrainer

`Measured` is what happened between the ends of two updates, after a warm-up.
"""

import tempfile
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio

from echo_coordinator.coordinator import Coordinator
from echo_coordinator.state.counters import DROPPED_GROUPS, DROPPED_SLOTS
from echo_coordinator.state.groups import GroupState
from echo_node.backends.base import Backend, GenerationRequest, LoadTimes, Outcome, PolicyFiles, ScoreRequest, Scores
from echo_node.backends.options import ScriptedOptions
from echo_swarm.errors import EchoError
from echo_swarm.work import BackendReport
from tests.swarm.support.stand_ins import StandInTrainer
from tests.swarm.support.whole_run import RunningNode, inline_backend, make_run

K = TypeVar("K")
V = TypeVar("V", int, float)

LIMIT_S = 300.0
"""A run that takes longer hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What all runs have in common."""

    step_s: float
    groups_per_update: int
    group_size: int
    warm_up_updates: int
    window_s: float
    """Least time measured; it ends with an update."""

    @property
    def batch(self) -> int:
        """Completions an update trains on."""
        return self.groups_per_update * self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFigures:
    """One node in the window."""

    nominal_rate: float
    """Completions a second by its settings: batch / mean time, as if nothing ever made a place wait."""
    rate: float
    """Completions a second while it had work: loads of new versions included, waiting for leases not."""
    starved_share: float
    """Share of its places' time without a lease to work on."""
    refused_share: float
    """Share of its judged completions that were refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run."""

    seconds: float
    updates: int
    busy_share: float
    """Of the window, as the trainer itself measured."""
    status_busy_share: float
    """As `status` says: since the first batch, warm-up included."""
    waiting_s: dict[str, float]
    """By cause, accounted within the window."""
    staleness: dict[int, int]
    """Trained completions by staleness."""
    trained_groups: int
    group_time_s: tuple[float, ...]
    """From a group's admission to its last reward (or its drop), ascending; of the groups that ended in the window."""
    dropped_groups: dict[str, int]
    dropped_slots: dict[str, int]
    nodes: tuple[NodeFigures, ...]


class MeteredBackend:
    """A `Backend` that adds up for how long its places had nothing to do."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._outstanding = 0
        self._loading = 0
        self._since = anyio.current_time()
        self.completions = 0
        self.starved_place_s = 0.0
        """Places times seconds without a request, while no load stood in the way."""

    @property
    def report(self) -> BackendReport:
        return self._backend.report

    def account(self) -> None:
        now = anyio.current_time()
        if not self._loading:
            self.starved_place_s += (now - self._since) * max(0, self.report.batch - self._outstanding)
        self._since = now

    async def load(self, policy: PolicyFiles) -> LoadTimes:
        self.account()
        self._loading += 1
        try:
            return await self._backend.load(policy)
        finally:
            self.account()
            self._loading -= 1

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.account()
        self._outstanding += len(requests)
        await self._backend.submit(requests)

    async def score(self, request: ScoreRequest) -> Scores:
        return await self._backend.score(request)

    async def next_outcome(self) -> Outcome:
        outcome = await self._backend.next_outcome()
        self.account()
        self._outstanding -= 1
        self.completions += 1
        return outcome


class GroupTimes:
    """How long groups are under way before they are ready or dropped; seen to 5 ms."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self.ended: list[tuple[float, float]] = []
        """End and duration of each."""

    def look(self, active: set[int]) -> None:
        now = anyio.current_time()
        for group_id in active - self._since.keys():
            self._since[group_id] = now
        for group_id in self._since.keys() - active:
            self.ended.append((now, now - self._since.pop(group_id)))

    def within(self, first: float, last: float) -> tuple[float, ...]:
        return tuple(sorted(seconds for at, seconds in self.ended if first <= at <= last))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Metered:
    options: ScriptedOptions
    running: RunningNode
    backends: list[MeteredBackend]


@dataclass(frozen=True, slots=True, kw_only=True)
class _NodeMark:
    completions: int
    starved_place_s: float
    accepted: int
    refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """Where all counters stood when an update ended."""

    at: float
    """End of that update."""
    updates: int
    counters: dict[str, dict[str, int]]
    staleness: dict[int, int]
    waiting_s: dict[str, float]
    nodes: tuple[_NodeMark, ...]


async def measure(scale: Scale, max_staleness: int, nodes: Sequence[ScriptedOptions]) -> Measured:
    """Run until the window is over."""
    with tempfile.TemporaryDirectory(prefix="echo-utilisation-") as folder, anyio.fail_after(LIMIT_S):
        run = make_run(
            Path(folder),
            group_size=scale.group_size,
            groups_per_update=scale.groups_per_update,
            max_staleness=max_staleness,
            mode="async" if max_staleness else "sequential",
            beat_s=1.0,
        )
        run.trainer = StandInTrainer(step_s=scale.step_s)
        async with run.coordinator() as coordinator, AsyncExitStack() as stack:
            metered: list[_Metered] = []
            for number, options in enumerate(nodes):
                backends: list[MeteredBackend] = []
                opened = partial(_open_metered, options, backends)
                running = await stack.enter_async_context(run.node(f"node{number}", open_backend=opened))
                metered.append(_Metered(options=options, running=running, backends=backends))
            times = GroupTimes()
            take = partial(_mark, run.trainer, coordinator, metered, times)
            first = await take(lambda: len(run.trainer.spans) >= scale.warm_up_updates)
            over = first.at + scale.window_s
            last = await take(lambda: run.trainer.spans[-1][1] >= over)
            share = coordinator.reporter.status().trainer_busy_share
        return _difference(first, last, run.trainer, metered, times, status_busy_share=share)


@asynccontextmanager
async def _open_metered(options: ScriptedOptions, made: list[MeteredBackend]) -> AsyncGenerator[MeteredBackend]:
    async with inline_backend(options) as backend:
        made.append(MeteredBackend(backend))
        yield made[-1]


async def _mark(
    trainer: StandInTrainer,
    coordinator: Coordinator,
    nodes: list[_Metered],
    times: GroupTimes,
    due: Callable[[], bool],
) -> _Mark:
    """Wait for `due`, which becomes true when an update ends, and read all counters."""
    groups = coordinator.state.core.groups
    while not due():
        times.look({group.group_id for group in groups.of_kind("train") if group.state is GroupState.ACTIVE})
        for node in nodes:
            if node.running.error is not None:
                raise EchoError(f"a node ended: {node.running.error}")
        await anyio.sleep(0.005)
    core = coordinator.state.core
    return _Mark(
        at=trainer.spans[-1][1],
        updates=len(trainer.spans),
        counters={scope: core.counters.of(scope) for scope in (DROPPED_GROUPS, DROPPED_SLOTS)},
        staleness=dict(trainer.lags),
        waiting_s=dict(coordinator.training.activity.waited_s),
        nodes=tuple(_node_mark(node) for node in nodes),
    )


def _node_mark(node: _Metered) -> _NodeMark:
    for backend in node.backends:
        backend.account()
    verdicts = node.running.verdicts
    return _NodeMark(
        completions=sum(backend.completions for backend in node.backends),
        starved_place_s=sum(backend.starved_place_s for backend in node.backends),
        accepted=verdicts["accepted"],
        refused=sum(verdicts.values()) - verdicts["accepted"],
    )


def _difference(
    first: _Mark,
    last: _Mark,
    trainer: StandInTrainer,
    nodes: list[_Metered],
    times: GroupTimes,
    *,
    status_busy_share: float,
) -> Measured:
    seconds = last.at - first.at
    spans = trainer.spans[first.updates : last.updates]
    return Measured(
        seconds=seconds,
        updates=last.updates - first.updates,
        busy_share=sum(end - began for began, end in spans) / seconds,
        status_busy_share=status_busy_share,
        waiting_s=_minus(last.waiting_s, first.waiting_s),
        staleness=_minus(last.staleness, first.staleness),
        trained_groups=sum(len(batch.groups) for batch in trainer.trained[first.updates : last.updates]),
        group_time_s=times.within(first.at, last.at),
        dropped_groups=_minus(last.counters[DROPPED_GROUPS], first.counters[DROPPED_GROUPS]),
        dropped_slots=_minus(last.counters[DROPPED_SLOTS], first.counters[DROPPED_SLOTS]),
        nodes=tuple(
            _node_figures(node.options, before, after, seconds)
            for node, before, after in zip(nodes, first.nodes, last.nodes, strict=True)
        ),
    )


def _node_figures(options: ScriptedOptions, before: _NodeMark, after: _NodeMark, seconds: float) -> NodeFigures:
    starved = (after.starved_place_s - before.starved_place_s) / (options.batch * seconds)
    refused, accepted = after.refused - before.refused, after.accepted - before.accepted
    return NodeFigures(
        nominal_rate=options.batch / options.mean_s,
        rate=(after.completions - before.completions) / (seconds * max(1e-9, 1 - starved)),
        starved_share=starved,
        refused_share=refused / max(1, refused + accepted),
    )


def _minus(last: dict[K, V], first: dict[K, V]) -> dict[K, V]:
    return {key: value - first[key] if key in first else value for key, value in last.items()}
