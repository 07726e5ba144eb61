"""The two sides of the loopback benchmark: a backend child fed directly, and a whole node that works for a coordinator.

Both finish the same completions, and both are measured in the same way (`Window`): from finished completions, after a
warm-up, while work never runs out.
"""

import itertools
import sqlite3
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import psutil

from echo_coordinator.config import RunSettings
from echo_coordinator.demo.processes import Peer
from echo_coordinator.demo.swarm import STARTUP_S, Swarm
from echo_coordinator.state.seeds import member_seed
from echo_node.backends.base import Completion, GenerationRequest, PolicyFiles
from echo_node.backends.child import ChildBackend
from echo_node.backends.options import EngineOptions
from echo_node.hardware import choose
from echo_node.status import LocalStatus
from echo_swarm.checkpoint.trust import check_run_manifest
from echo_swarm.codec import unpack_u32
from echo_swarm.errors import BackendFailed
from echo_swarm.invite import parse
from echo_swarm.manifest import RunManifest

CHILD = "echo_node.backends.serve"
DRAIN_S = 300.0
LOOK_S = 1.0
WARM_UP_BATCHES = 2
"""Completions before a window, in batches: the first all begin at once, with their prompts."""

Arrivals = list[tuple[float, int]]
"""When each completion was finished (seconds since 1970) and its tokens, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One side in one round."""

    tokens_per_s: float
    completions: int
    """Seen in the window."""
    cpu_shares: dict[str, float]
    """Processors that each group of processes used, on average: 1 is one core all the time."""

    @property
    def tokens_per_child_cpu_s(self) -> float:
        """Tokens for each second of processor time of the child."""
        return self.tokens_per_s / self.cpu_shares["child"]


def steady_rate(arrivals: Arrivals, batch: int) -> float:
    """Return tokens a second over as many whole batches as there are.

    Completions of equal length that run side by side finish in bursts, in the same pattern batch after batch. From one
    completion to the one that finishes so many whole batches later, the pattern cancels out. The median over all
    places to begin at.
    """
    whole = (len(arrivals) - batch // 2) // batch * batch
    if whole < batch:
        raise BackendFailed(f"{len(arrivals)} completions are too few for a batch of {batch}; measure for longer")
    rates: list[float] = []
    for first in range(len(arrivals) - whole):
        part = arrivals[first : first + whole + 1]
        rates.append(sum(tokens for _, tokens in part[1:]) / (part[-1][0] - part[0][0]))
    return statistics.median(rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """When the node was measured in one round; what came in then is read when the coordinator has ended."""

    began_at: float
    """Seconds since 1970."""
    ended_at: float
    cpu_shares: dict[str, float]


class Meter:
    """Processor time of groups of processes since it was made."""

    def __init__(self, groups: dict[str, list[psutil.Process]]) -> None:
        self._groups = groups
        self._began_s = time.monotonic()
        self._before = {name: _cpu_s(processes) for name, processes in groups.items()}

    def shares(self) -> dict[str, float]:
        """Return processors used on average, by group."""
        passed_s = time.monotonic() - self._began_s
        return {name: (_cpu_s(p) - self._before[name]) / passed_s for name, p in self._groups.items()}


def _cpu_s(processes: Iterable[psutil.Process]) -> float:
    total = 0.0
    for process in processes:
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all below it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


@dataclass(frozen=True, slots=True)
class Ledger:
    """What the coordinator has on disk. It keeps the file to itself while it runs."""

    path: Path
    settings: RunSettings

    def arrivals(self, span: "Span") -> Arrivals:
        """Return when accepted completions reached the coordinator."""
        query = "SELECT received_at, LENGTH(token_ids) / 4 FROM trajectories WHERE received_at BETWEEN ? AND ?"
        return sorted(self._read(query, span.began_at, span.ended_at))

    def requests(self) -> list[GenerationRequest]:
        """Return what nodes are leased, in order, the seeds included."""
        work, found = self.settings.work, list[GenerationRequest]()
        for group_id, prompt_ids in self._read(
            "SELECT group_id, prompt_ids FROM groups WHERE kind = 'train' ORDER BY group_id"
        ):
            found += [
                GenerationRequest(
                    request_id=len(found) + member,
                    prompt_ids=tuple(unpack_u32(prompt_ids)),
                    max_tokens=work.max_tokens,
                    temperature=work.temperature,
                    seed=member_seed(work.seed, group_id, member, 0),
                )
                for member in range(work.group_size)
            ]
        return found

    def _read(self, query: str, *values: float) -> list[Any]:
        database = sqlite3.connect(f"{self.path.resolve().as_uri()}?mode=ro", uri=True)
        try:
            return database.execute(query, values).fetchall()
        finally:
            database.close()


async def measure_alone(backend: ChildBackend, requests: Iterator[GenerationRequest], window_s: float) -> Window:
    """Keep two batches of requests in the child; it never waits for anybody."""
    batch = backend.report.batch
    await backend.submit(list(itertools.islice(requests, 2 * batch)))
    outstanding, arrivals = 2 * batch, Arrivals()
    meter, began = Meter({}), 0.0
    while outstanding:
        outcome = await backend.next_outcome()
        if not isinstance(outcome, Completion):
            raise BackendFailed(outcome.reason)
        outstanding -= 1
        now = time.time()
        arrivals.append((now, len(outcome.token_ids)))
        if len(arrivals) == WARM_UP_BATCHES * batch:
            meter, began = Meter({"child": family(backend.pid), "feeding it": [psutil.Process()]}), now
        if began and now >= began + window_s:
            break
        await backend.submit([next(requests)])
        outstanding += 1
    shares = meter.shares()
    for _ in range(outstanding):
        await backend.next_outcome()
    within = [arrival for arrival in arrivals if arrival[0] >= began]
    return Window(tokens_per_s=steady_rate(within, batch), completions=len(within), cpu_shares=shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedNode:
    """A running `echo-node join`."""

    peer: Peer
    status_path: Path

    def status(self) -> LocalStatus | None:
        """Return what it last wrote down about itself."""
        with suppress(OSError, ValueError):
            return LocalStatus.model_validate_json(self.status_path.read_bytes())
        return None

    def groups(self, coordinator: Peer) -> dict[str, list[psutil.Process]]:
        """Return its processes and the coordinator's, by what they are for."""
        below = family(self.peer.process.pid)
        child = next(process for process in below if CHILD in process.cmdline())
        child_family = family(child.pid)
        rest = [process for process in below if process not in child_family]
        return {"child": child_family, "node": rest, "coordinator": family(coordinator.process.pid)}


async def start_node(swarm: Swarm, invite: str, name: str, flags: list[str]) -> JoinedNode:
    """Start a node and return once it has loaded version 0. Raises BackendFailed when it does not."""
    state = swarm.folder / "nodes" / name
    options = ["--state-dir", str(state), "--listen", "/ip4/127.0.0.1/tcp/0", *flags]
    peer = swarm.peers.start(name, "echo_node.cli", ["join", "--role", "inference", *options, invite])
    node = JoinedNode(peer=peer, status_path=state / "runs" / parse(invite).run / "status.json")
    with anyio.move_on_after(STARTUP_S):
        while (status := node.status()) is None or status.loaded_version is None:
            swarm.look()
            await anyio.sleep(LOOK_S)
        return node
    raise BackendFailed(f"{name} was not ready within {STARTUP_S:.0f} s (log: {peer.log_path})")


async def measure_node(swarm: Swarm, coordinator: Peer, node: JoinedNode, window_s: float) -> Span:
    """Let the paused run go on for a while; at the end it is paused, and the node has nothing left."""
    status = node.status()
    assert status is not None
    wanted = (await swarm.status()).accepted + WARM_UP_BATCHES * status.batch
    await swarm.resume()
    await _accepted(swarm, wanted)
    meter, began_at = Meter(node.groups(coordinator)), time.time()
    await anyio.sleep(window_s)
    shares, ended_at = meter.shares(), time.time()
    await swarm.pause()
    await _drained(swarm)
    return Span(began_at=began_at, ended_at=ended_at, cpu_shares=shares)


async def _accepted(swarm: Swarm, wanted: int) -> None:
    while True:
        swarm.look()
        status = await swarm.status()
        if status.accepted >= wanted:
            return
        await anyio.sleep(LOOK_S)


async def _drained(swarm: Swarm) -> None:
    with anyio.fail_after(DRAIN_S):
        while True:
            status = await swarm.status()
            if not any(node.in_flight for node in status.nodes):
                return
            await anyio.sleep(LOOK_S)


def seen_by_coordinator(ledger: Ledger, span: Span, batch: int) -> Window:
    """Return what a node delivered in a span."""
    arrivals = ledger.arrivals(span)
    rate = steady_rate(arrivals, batch)
    return Window(tokens_per_s=rate, completions=len(arrivals), cpu_shares=span.cpu_shares)


def read_run(swarm: Swarm, invite: str) -> RunManifest:
    """Return the run as nodes see it."""
    joined = parse(invite)
    return check_run_manifest(swarm.run.run_manifest.read_bytes(), run_id=joined.run, publisher_key=joined.key).message


def as_node_chooses(option: str, run: RunManifest, *, python: str) -> EngineOptions:
    """Return a backend's settings as `echo-node join --backend OPTION` would complete them."""
    return choose(option, run, python=python).options


def fetched_policy(node: JoinedNode, run: RunManifest) -> PolicyFiles:
    """Return the files that a node has fetched, for another child to load."""
    (artifact,) = [*node.status_path.parent.glob("v*/*.safetensors"), *node.status_path.parent.glob("v*/*.gguf")]
    return PolicyFiles(
        policy_version=0,
        artifact=artifact,
        artifact_digest=bytes(32),
        model_config_json=run.model_config_json,
        end_token_ids=run.end_token_ids,
        vocabulary_size=run.vocabulary_size,
        max_prompt_tokens=run.max_prompt_tokens,
        max_completion_tokens=run.max_completion_tokens,
    )
