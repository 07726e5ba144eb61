"""A coordinator and nodes on one memory network."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from echo_node.backends.restart import RestartPolicy
from echo_node.config import NodeConfig
from echo_node.node import Node, NodeSeams, Outcome
from echo_node.wanted import Wanted
from echo_node.worker import OpenBackend
from echo_swarm.clock import Clock, SystemClock
from echo_swarm.directory.memory import DirectoryStore, MemoryDirectory
from echo_swarm.errors import EchoError
from echo_swarm.identity import Identity
from echo_swarm.invite import Invite
from echo_swarm.transport.memory import MemoryHost, MemoryNetwork
from tests.swarm.support.fake_coordinator import FakeCoordinator
from tests.swarm.support.puppet_backend import PuppetBackend

PATIENCE_S = 120.0
"""After this a test fails; nothing is expected to take so long."""


class SetClock:
    """The machine's clocks, each set forward or back as a test wants."""

    def __init__(self, *, wall_ahead_s: float = 0.0) -> None:
        self.wall_ahead_s = wall_ahead_s
        self.monotonic_ahead_s = 0.0

    def wall_s(self) -> float:
        return time.time() + self.wall_ahead_s

    def monotonic_s(self) -> float:
        return time.monotonic() + self.monotonic_ahead_s


async def until(condition: Callable[[], object], what: str = "") -> None:
    """Return once `condition` holds."""
    with anyio.move_on_after(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - looks at several objects, not all of which could set an event
            await anyio.sleep(0.005)
        return
    raise AssertionError(f"never happened: {what or condition}")


@dataclass(kw_only=True)
class RunningNode:
    node: Node
    host: MemoryHost
    puppet: PuppetBackend
    lines: list[str]
    outcome: Outcome | None = None
    error: EchoError | None = None
    ended: anyio.Event = field(default_factory=anyio.Event)

    async def leave(self) -> Outcome:
        self.node.stop()
        return await self.wait()

    async def wait(self) -> Outcome:
        with anyio.fail_after(PATIENCE_S):
            await self.ended.wait()
        if self.error is not None:
            raise self.error
        assert self.outcome is not None
        return self.outcome


@dataclass(kw_only=True)
class Swarm:
    folder: Path
    network: MemoryNetwork
    directory: DirectoryStore
    coordinator: FakeCoordinator

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[MemoryHost]:
        """Run the coordinator's process for the length of the block."""
        async with self.network.host(self.coordinator.identity) as host, self.coordinator.serve(host):
            yield host

    @asynccontextmanager
    async def node(
        self,
        name: str = "node",
        *,
        puppet: PuppetBackend | None = None,
        open_backend: OpenBackend | None = None,
        identity: Identity | None = None,
        invite: Invite | None = None,
        outbound_only: bool = True,
        patience_s: float | None = 60.0,
        grace_s: float = 2.0,
        restarts: RestartPolicy | None = None,
        max_outbox_bytes: int = 64 << 20,
        wanted_files: Wanted | None = None,
        clock: Clock | None = None,
        **config_fields: Any,
    ) -> AsyncGenerator[RunningNode]:
        """Run a node; leaving the block kills it."""
        puppet = puppet or PuppetBackend()
        identity = identity or Identity.from_seed(name.encode().ljust(32, b"."))
        lines: list[str] = []
        async with self.network.host(identity, outbound_only=outbound_only) as host, anyio.create_task_group() as tasks:
            clock = clock or SystemClock()
            seams = NodeSeams(
                host=host,
                directory=MemoryDirectory(self.directory, identity, clock),
                identity=identity,
                clock=clock,
                open_backend=open_backend or puppet.open,
                emit=lines.append,
                wanted_files=wanted_files or Wanted(),
                restarts=restarts or RestartPolicy(first_delay_s=0.01),
            )
            config = NodeConfig(
                state_dir=self.folder / name,
                max_outbox_bytes=max_outbox_bytes,
                patience_s=patience_s,
                **config_fields,
            )
            node = Node(config, invite or self.coordinator.invite(), seams)
            running = RunningNode(node=node, host=host, puppet=puppet, lines=lines)

            async def run() -> None:
                try:
                    running.outcome = await node.run(grace_s=grace_s)
                except EchoError as e:
                    running.error = e
                finally:
                    running.ended.set()

            tasks.start_soon(run)
            try:
                yield running
            except BaseException:
                print(f"{name}: {node.activity.headline}", *lines, sep="\n  ")  # pytest shows it beside the failure
                raise
            tasks.cancel_scope.cancel()


def make_swarm(folder: Path, *, network: MemoryNetwork | None = None, **settings: object) -> Swarm:
    return Swarm(
        folder=folder,
        network=network or MemoryNetwork(),
        directory=DirectoryStore(),
        coordinator=FakeCoordinator(folder / "coordinator", **settings),  # pyright: ignore[reportArgumentType]
    )
