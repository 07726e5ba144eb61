"""What a person sees while the node takes part: one live line on a terminal, plain lines elsewhere."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from datetime import datetime

import anyio
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from echo_node.status import LocalStatus, held_words
from echo_node.transfer_view import TransferNow, TransferView
from echo_swarm.clock import Clock
from echo_swarm.render import size
from echo_swarm.work import Role

REFRESH_S = 0.5
PLAIN_EVERY_S = 60.0
"""Without a terminal, progress is printed this often, and only if there was any."""
TRANSFER_EVERY_S = 10.0
"""The same for a version on its way."""
_BAR_CELLS = 20

EARLY_S = 10.0
"""And this often until something was accepted: a first load can take minutes."""


class Display:
    """Prints lines, and keeps a line of progress below them where there is a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def emit(self, line: str) -> None:
        """Print one line with the time of day."""
        stamp = datetime.now().strftime("%H:%M:%S")
        self._console.print(Text.assemble((stamp, "dim"), " ", line), soft_wrap=True)

    @asynccontextmanager
    async def progress(
        self, status: Callable[[], LocalStatus], clock: Clock, transfers: TransferView | None = None
    ) -> AsyncGenerator[None]:
        """Show `status`, and the transfer under way, again and again for the length of the block."""
        transfers = transfers or TransferView()
        async with anyio.create_task_group() as tasks:
            if self._console.is_terminal:
                tasks.start_soon(self._live, status, clock, transfers)
            else:
                tasks.start_soon(self._plain, status)
                tasks.start_soon(self._plain_transfers, clock, transfers)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    async def _live(self, status: Callable[[], LocalStatus], clock: Clock, transfers: TransferView) -> None:
        spinner = Spinner("dots", "starting")
        with Live(spinner, console=self._console, transient=True) as live:
            while True:
                spinner.update(text=Text(progress_line(status())))
                now = transfers.look(clock.monotonic_s())
                live.update(spinner if now is None else Group(spinner, transfer_bar(now)))
                await anyio.sleep(REFRESH_S)

    async def _plain_transfers(self, clock: Clock, transfers: TransferView) -> None:
        while True:
            await anyio.sleep(TRANSFER_EVERY_S)
            if (now := transfers.look(clock.monotonic_s())) is not None:
                self.emit(str(now))

    async def _plain(self, status: Callable[[], LocalStatus]) -> None:
        told = ""
        while True:
            now = status()
            line = progress_line(now)
            # Waits are told, rarely, by themselves.
            if line != told and (now.accepted or now.role == Role.SEEDER or not now.state.startswith("waiting")):
                self.emit(line)
                told = line
            await anyio.sleep(PLAIN_EVERY_S if now.accepted else EARLY_S)


def transfer_bar(now: TransferNow) -> Table:
    """Return a bar and what it stands for, in one line where the terminal is wide enough."""
    grid = Table.grid(padding=(0, 1))
    grid.add_row(ProgressBar(total=1.0, completed=now.share, width=_BAR_CELLS), Text(str(now)))
    return grid


def progress_line(status: LocalStatus) -> str:
    """Return version, state, speed and verdicts in one line; of a seeder, what it holds and has served."""
    if status.role == Role.SEEDER:
        return f"{held_words(status)} · {status.state} · {size(status.bytes_served)} served"
    version = "no version" if status.loaded_version is None else f"version {status.loaded_version}"
    if status.head_version is not None and status.loaded_version not in (None, status.head_version):
        version += f" (newest {status.head_version})"
    rejected = sum(status.rejected.values())
    verdicts = f"{status.accepted} accepted" + (f", {rejected} not" if rejected else "")
    waiting = f", {status.pending} unanswered" if status.pending else ""
    return f"{version} · {status.state} · {status.tokens_per_s:.0f} tokens/s · {verdicts}{waiting}"
