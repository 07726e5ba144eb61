"""`echo-coordinator start`: the coordinator on hivemind's host and DHT, with its display and signals."""

import logging
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from anyio.abc import TaskGroup
from rich.console import Console
from rich.live import Live

from echo_coordinator.config import RunSettings, load_settings
from echo_coordinator.coordinator import Coordinator, run_coordinator
from echo_coordinator.progress import progress_line
from echo_coordinator.run_folder import RunFolder
from echo_swarm.directory.base import Directory
from echo_swarm.errors import EchoError
from echo_swarm.identity import Identity, load
from echo_swarm.render import render_run_status
from echo_swarm.transport.base import Host

LINE_EVERY_S = 10.0
GRACE_S = 30.0
"""After a signal, for the update under way; then the coordinator ends and the next start makes it up."""


def start_run(root: Path, *, live: bool) -> int:
    """Run the coordinator of a run until it has finished or is told to stop. Returns the exit code."""
    folder = RunFolder(root)
    folder.require()
    settings = load_settings(folder)
    identity = load(folder.key)
    folder.logs.mkdir(exist_ok=True)
    logging.basicConfig(
        filename=folder.logs / "coordinator.log",
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    with folder.locked():
        try:
            anyio.run(_start, folder, settings, identity, live)
        except* EchoError as group:
            raise _first(group) from None
    return 0


async def _start(folder: RunFolder, settings: RunSettings, identity: Identity, live: bool) -> None:
    console = Console()
    async with (
        open_network(settings, identity) as (host, directory),
        run_coordinator(folder, settings, identity, host, directory) as coordinator,
    ):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_handle_signals, coordinator, tasks)
            tasks.start_soon(_display, coordinator, console, live)
            await coordinator.ended.wait()
            tasks.cancel_scope.cancel()
        status = coordinator.reporter.status()
    words = "finished" if coordinator.training.done else f"stopped; continue with: echo-coordinator start {folder.root}"
    console.print(f"version {status.policy_version}, {status.updates} updates, {words}")


@asynccontextmanager
async def open_network(settings: RunSettings, identity: Identity) -> AsyncGenerator[tuple[Host, Directory]]:
    """Open the host and the DHT node of the coordinator."""
    from echo_swarm.directory.dht import open_dht_directory
    from echo_swarm.transport.hivemind import open_hivemind_host

    network = settings.network
    async with (
        open_hivemind_host(
            identity, listen=network.listen, announce=network.announce, bootstrap=network.bootstrap, many_peers=True
        ) as host,
        open_dht_directory(host, identity, client_mode=False, bootstrap=network.bootstrap) as directory,
    ):
        yield host, directory


async def _handle_signals(coordinator: Coordinator, tasks: TaskGroup) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            if coordinator.state.core.stopping:
                break
            print("stopping after the update under way; once more to end at once", file=sys.stderr, flush=True)
            coordinator.request_stop()
            tasks.start_soon(_end_after_grace, coordinator)
    coordinator.ended.set()


async def _end_after_grace(coordinator: Coordinator) -> None:
    await anyio.sleep(GRACE_S)
    coordinator.ended.set()


async def _display(coordinator: Coordinator, console: Console, live: bool) -> None:
    core = coordinator.state.core
    console.print(f"run {coordinator.settings.run.name} ({core.facts.run_id}) is starting ...")
    while core.versions.published is None:
        await coordinator.state.wait_changed(1.0)
    console.print(f"version {core.versions.published} is published. Volunteers join with:\n")
    print(f"  echo-node join --role inference {coordinator.invite}\n", flush=True)
    if live:
        with Live(console=console, refresh_per_second=2) as display:
            while True:
                display.update(render_run_status(coordinator.reporter.status()))
                await anyio.sleep(1.0)
    shown = ""
    while True:
        line = progress_line(coordinator.reporter.status())
        if line != shown:
            print(line, flush=True)
            shown = line
        await anyio.sleep(LINE_EVERY_S)


def _first(group: BaseExceptionGroup[EchoError]) -> EchoError:
    """Return the first error of a group: what went wrong, not what went wrong while cleaning up."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, EchoError)
    return error
