"""A whole run in one process: the real coordinator and real nodes on a memory network, stand-ins for the children."""

import secrets
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio

from echo_coordinator.config import EnvironmentSection, EvaluationSection, RunSection, RunSettings
from echo_coordinator.coordinator import Children, Coordinator, run_coordinator
from echo_coordinator.run_folder import RunFolder
from echo_coordinator.state.work_settings import WorkSettings
from echo_node.backends.inline import InlineBackend
from echo_node.backends.options import ScriptedOptions
from echo_node.backends.scripted import ScriptedEngine
from echo_node.config import NodeConfig
from echo_node.node import Node, NodeSeams, Outcome
from echo_node.wanted import Wanted
from echo_node.worker import OpenBackend
from echo_swarm.clock import SystemClock
from echo_swarm.directory.memory import DirectoryStore, MemoryDirectory
from echo_swarm.errors import EchoError
from echo_swarm.identity import Identity
from echo_swarm.invite import Invite
from echo_swarm.status import NodeStatus
from echo_swarm.transport.memory import MemoryNetwork
from tests.swarm.support.node_harness import until
from tests.swarm.support.stand_ins import StandInScorers, StandInTrainer, write_model


@dataclass(kw_only=True)
class RunningNode:
    node: Node
    lines: list[str] = field(default_factory=list[str])
    outcome: Outcome | None = None
    error: EchoError | None = None
    ended: anyio.Event = field(default_factory=anyio.Event)

    @property
    def verdicts(self) -> dict[str, int]:
        """The node's own count of accepted and refused completions."""
        status = self.node.status()
        return {"accepted": status.accepted, **{reason: n for reason, n in status.rejected.items() if n}}


@dataclass(kw_only=True)
class WholeRun:
    folder: RunFolder
    settings: RunSettings
    identity: Identity = field(default_factory=Identity.generate)
    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    records: DirectoryStore = field(default_factory=DirectoryStore)
    trainer: StandInTrainer = field(default_factory=StandInTrainer)
    scorers: StandInScorers = field(default_factory=StandInScorers)
    boot: str = ""
    """The coordinator's address in invites; empty for that in a network in memory."""

    @asynccontextmanager
    async def coordinator(self, *, take_over: bool = False) -> AsyncGenerator[Coordinator]:
        """Run the coordinator's process for the length of the block; again on the same folder is a restart."""
        children = Children(open_trainer=self.trainer.open, open_scorers=self.scorers.open)
        directory = MemoryDirectory(self.records, self.identity, SystemClock())
        async with (
            self.network.host(self.identity) as host,
            run_coordinator(
                self.folder, self.settings, self.identity, host, directory, children, take_over=take_over
            ) as coordinator,
        ):
            yield coordinator

    def copied(self, root: Path) -> "WholeRun":
        """Copy the folder of this run, whose coordinator does not run, with a trainer of its own."""
        shutil.copytree(self.folder.root, root)
        trainer = StandInTrainer()
        trainer.salt = 1000
        return replace(self, folder=RunFolder(root), trainer=trainer)

    @property
    def invite(self) -> Invite:
        """Good for every life of the coordinator, and before the first one."""
        address = self.boot or f"/memory/1/p2p/{self.identity.peer_id}"
        return Invite(run=self.settings.run.id, key=self.identity.public_key, boot=(address,))

    @asynccontextmanager
    async def node(
        self,
        name: str = "node",
        *,
        options: ScriptedOptions | None = None,
        open_backend: OpenBackend | None = None,
        wanted_files: Wanted | None = None,
    ) -> AsyncGenerator[RunningNode]:
        """Run a node; leaving the block kills it."""
        identity = Identity.from_seed(name.encode().ljust(32, b"."))
        lines: list[str] = []
        async with self.network.host(identity) as host, anyio.create_task_group() as tasks:
            seams = NodeSeams(
                host=host,
                directory=MemoryDirectory(self.records, identity, SystemClock()),
                identity=identity,
                clock=SystemClock(),
                open_backend=open_backend or (lambda: inline_backend(options or ScriptedOptions(batch=4))),
                emit=lines.append,
                wanted_files=wanted_files or Wanted(),
            )
            node = Node(NodeConfig(state_dir=self.folder.root.parent / name), self.invite, seams)
            running = RunningNode(node=node, lines=lines)
            tasks.start_soon(_run, running)
            try:
                yield running
            except BaseException:
                print(f"{name}: {node.activity.headline}", *lines, sep="\n  ")  # pytest shows it beside the failure
                raise
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def inline_backend(options: ScriptedOptions) -> AsyncGenerator[InlineBackend]:
    """Run the scripted engine in this process (an `OpenBackend` when bound to its options)."""
    yield InlineBackend(ScriptedEngine(options))


@asynccontextmanager
async def joined(run: WholeRun, name: str, engine: ScriptedEngine) -> AsyncGenerator[RunningNode]:
    """Run a node with this engine."""

    @asynccontextmanager
    async def open_backend() -> AsyncGenerator[InlineBackend]:
        yield InlineBackend(engine)

    async with run.node(name, open_backend=open_backend) as node:
        yield node


def status_of(coordinator: Coordinator, node: RunningNode) -> NodeStatus | None:
    """What the coordinator shows of a node; None if it does not know it."""
    peer = node.node.status().peer_id
    return next((n for n in coordinator.reporter.status().nodes if n.peer_id == peer), None)


@asynccontextmanager
async def beside(run: WholeRun, name: str) -> AsyncGenerator[RunningNode]:
    """A node that outlives coordinators."""
    async with run.node(name, options=ScriptedOptions(batch=4)) as node:
        yield node


async def published(coordinator: Coordinator, version: int) -> None:
    """Wait until the version, or a newer one, is published."""
    await until(lambda: (coordinator.state.core.versions.published or 0) >= version, f"version {version}")


async def _run(running: RunningNode) -> None:
    try:
        running.outcome = await running.node.run(grace_s=1.0)
    except EchoError as e:
        running.error = e
    finally:
        running.ended.set()


def make_run(folder: Path, *, updates: int | None = None, eval_every: int = 0, **work: Any) -> WholeRun:
    """Make a run's folder, or go on with it; `work` are settings of WorkSettings."""
    chosen = {"group_size": 4, "groups_per_update": 2, "max_tokens": 16, "beat_s": 1.0, "max_staleness": 2, **work}
    settings = RunSettings(
        run=RunSection(id=secrets.token_hex(16), name="whole-run", updates=updates),
        environment=EnvironmentSection(name="stand_in", max_prompt_tokens=16),
        work=WorkSettings(**chosen),
        evaluation=EvaluationSection(every=eval_every, prompts=4, max_wait_s=5.0),
    )
    run = WholeRun(folder=RunFolder(folder / "run"), settings=settings)
    if not run.folder.model.exists():
        write_model(run.folder.model)
    run.folder.logs.mkdir(exist_ok=True)
    return run
