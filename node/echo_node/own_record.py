"""What a peer keeps saying about itself: its record in the directory, its status on disk. Nodes and seeders alike."""

from collections.abc import Callable
from pathlib import Path

import anyio
from anyio import to_thread

from echo_node.status import LocalStatus, write_status
from echo_swarm.directory.announce import keep_announced
from echo_swarm.directory.base import Directory, peers_topic
from echo_swarm.errors import LocalFault

ANNOUNCE_S = 30.0
STATUS_S = 5.0


class OwnRecord:
    """A peer's record in the directory.

    Args:
        directory: where.
        run_id: of the run that it takes part in.
        make: returns the sealed record as it is now.

    """

    def __init__(self, directory: Directory, run_id: str, make: Callable[[], bytes]) -> None:
        self._directory = directory
        self._run_id = run_id
        self._make = make
        self._changed = anyio.Event()

    def change(self) -> None:
        """Have it announced now, rather than with the next turn."""
        self._changed.set()

    async def keep_announced(self) -> None:
        """Announce it now and then, until cancelled."""
        await keep_announced(
            self._directory, peers_topic(self._run_id), self._make, every_s=ANNOUNCE_S, changed=self._next_change
        )

    def _next_change(self) -> anyio.Event:
        if self._changed.is_set():
            self._changed = anyio.Event()
        return self._changed


async def keep_status(
    path: Path,
    status: Callable[[], LocalStatus],
    every_s: Callable[[], float],
    *,
    failed: Callable[[LocalFault], None],
    written: Callable[[], None] = lambda: None,
) -> None:
    """Write the status to disk every `every_s` seconds, STATUS_S at most, until cancelled; say how it went."""
    while True:
        try:
            await to_thread.run_sync(write_status, path, status())
        except LocalFault as e:
            failed(e)
        else:
            written()
        await anyio.sleep(min(every_s(), STATUS_S))
