"""`echo-coordinator start`: the coordinator on hivemind's host and DHT, with its display and signals."""

import logging
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

import anyio
import anyio.to_thread
from rich.console import Console
from rich.live import Live

from echo_coordinator.commands.look import Look
from echo_coordinator.commands.network import open_network
from echo_coordinator.commands.progress import progress_line
from echo_coordinator.config import RunSettings, load_settings
from echo_coordinator.coordinator import Coordinator, run_coordinator
from echo_coordinator.ending import ending_noted
from echo_coordinator.loops.sparing import Sparing
from echo_coordinator.run_folder import RunFolder
from echo_coordinator.run_keys import load_run_key
from echo_swarm.checkpoint.files import write_atomically
from echo_swarm.checkpoint.known_peers import read_known
from echo_swarm.clock import SystemClock
from echo_swarm.collector import calm_collector
from echo_swarm.directory.base import Directory
from echo_swarm.errors import EchoError, LocalFault
from echo_swarm.identity import Identity
from echo_swarm.render import render_run_status
from echo_swarm.ticker import Ticker
from echo_swarm.transport.base import Host

log = logging.getLogger(__name__)

LINE_EVERY_S = 10.0
NOTE_EVERY_S = 10.0
LOG_BYTES = 10_000_000
LOG_FILES = 3
"""coordinator.log, coordinator.log.1 and coordinator.log.2."""
GRACE_S = 30.0
"""After a signal, for the update under way; then the coordinator ends and the next start makes it up."""


LOOP = {"use_uvloop": True}
"""hivemind brings uvloop; a push costs about a quarter less processor time on it (benchmarks/intake.py)."""


def start_run(root: Path, *, live: bool, take_over: bool = False) -> int:
    """Run the coordinator of a run until it has finished or is told to stop. Returns the exit code."""
    folder = RunFolder(root)
    folder.require()
    with folder.locked(), ending_noted(folder):
        _log_to(folder)
        settings = load_settings(folder)
        identity = load_run_key(folder, settings.run.id)
        try:
            anyio.run(_start, folder, settings, identity, live, take_over, backend_options=LOOP)
        except* EchoError as group:
            raise _first(group) from None
    return 0


def _log_to(folder: RunFolder) -> None:
    """Write what is logged to RUN/logs/coordinator.log, and no more than LOG_FILES of LOG_BYTES of it."""
    try:
        folder.logs.mkdir(exist_ok=True)
        handler = RotatingFileHandler(
            folder.logs / "coordinator.log", maxBytes=LOG_BYTES, backupCount=LOG_FILES - 1, encoding="utf-8"
        )
    except OSError as e:
        raise LocalFault(f"cannot write {folder.logs / 'coordinator.log'}: {e.strerror}") from e
    logging.basicConfig(
        handlers=[handler], level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


async def _start(folder: RunFolder, settings: RunSettings, identity: Identity, live: bool, take_over: bool) -> None:
    console = Console()
    console.print(f"run {settings.run.name} ({settings.run.id}) is starting ...", soft_wrap=True)
    again = f"stopped; continue with: echo-coordinator start {folder.root}"
    stop, ticker = _Stop(), Ticker(_say)
    async with anyio.create_task_group() as signals:
        signals.start_soon(_handle_signals, stop)
        signals.start_soon(ticker.run)
        with stop.starting:
            ticker.begin("joining the network")
            async with (
                open_network(settings, identity, read_known(folder.peers)) as (host, directory),
                _begun(folder, settings, identity, host, directory, take_over, ticker) as coordinator,
            ):
                stop.coordinator = coordinator
                calm_collector()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(_display, coordinator, console, live, ticker)
                    tasks.start_soon(_note_status, coordinator)
                    await coordinator.ended.wait()
                    tasks.cancel_scope.cancel()
                status = coordinator.reporter.status()
            words = "finished" if coordinator.training.done else again
            again = f"version {status.policy_version}, {status.updates} updates, {words}"
        signals.cancel_scope.cancel()
    console.print(again, soft_wrap=True)


def _say(line: str) -> None:
    print(line, flush=True)


@asynccontextmanager
async def _begun(
    folder: RunFolder,
    settings: RunSettings,
    identity: Identity,
    host: Host,
    directory: Directory,
    take_over: bool,
    ticker: Ticker,
) -> AsyncGenerator[Coordinator]:
    """Run the coordinator, after a look for another one with this key."""
    look = Look(folder, settings.run.id, identity, SystemClock(), say=_say)
    ticker.begin("looking whether another coordinator of this run is live")
    other = await look.before_start(host, directory, take_over=take_over)
    ticker.begin("opening the run, starting trainer and scorers")
    async with run_coordinator(folder, settings, identity, host, directory, take_over=take_over) as coordinator:
        if other is not None:
            await look.tell(other, coordinator.fence.raw)
        yield coordinator


class _Stop:
    """What signals do. Before the coordinator runs, the first one ends the start."""

    def __init__(self) -> None:
        self.starting = anyio.CancelScope()
        self.coordinator: Coordinator | None = None


async def _handle_signals(stop: _Stop) -> None:
    """First signal: stop after the update under way, within GRACE_S. Second: at once."""
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            if stop.coordinator is None:
                stop.starting.cancel()
                return
            print("stopping after the update under way; once more to end at once", file=sys.stderr, flush=True)
            stop.coordinator.request_stop()
            with anyio.move_on_after(GRACE_S):
                await anext(signals)
            stop.coordinator.ended.set()
            return


async def _note_status(coordinator: Coordinator) -> None:
    """Write the status down now and then, for `status` after a crash."""
    while True:
        await anyio.sleep(NOTE_EVERY_S)
        status = (await coordinator.reporter.status_in_slices()).model_dump_json(indent=2).encode()
        try:
            await anyio.to_thread.run_sync(write_atomically, coordinator.folder.last_status, status)
        except LocalFault as e:
            log.warning("the status could not be written down: %s", e)


async def _display(coordinator: Coordinator, console: Console, live: bool, ticker: Ticker) -> None:
    core = coordinator.state.core
    while core.versions.published is None:
        await coordinator.state.wait_changed(1.0)
    ticker.end()
    if coordinator.training.done:
        console.print(f"the run has had its {coordinator.settings.run.updates} updates; raise run.updates to go on")
        return
    if core.paused:
        console.print(f"still paused; continue with: echo-coordinator resume {coordinator.folder.root}", soft_wrap=True)
    console.print(f"version {core.versions.published} is published. Volunteers join with:\n")
    print(f"  echo-node join --role inference {coordinator.invite}\n", flush=True)
    if live:
        shown = Sparing(coordinator.reporter.making)
        with Live(console=console, refresh_per_second=2) as display:
            while True:
                display.update(render_run_status(await shown()))
                await anyio.sleep(1.0)
    before = ""
    while True:
        line = progress_line(await coordinator.reporter.status_in_slices())
        if line != before:
            print(line, flush=True)
            before = line
        await anyio.sleep(LINE_EVERY_S)


def _first(group: BaseExceptionGroup[EchoError]) -> EchoError:
    """Return the first error of a group: what went wrong, not what went wrong while cleaning up."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, EchoError)
    return error
