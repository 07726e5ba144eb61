"""What the signals that end a process do to a node."""

import os
import signal
from collections.abc import Callable

import anyio

FORCED_EXIT = 130
"""After a second signal, as for an interrupted program."""


class Stop:
    """What a first signal does: before the node runs, end; then, leave in order."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call


async def listen(stop: Stop) -> None:
    """First signal: leave in order. Second: at once."""
    if os.name != "posix":  # pragma: no cover - there, Ctrl+C raises KeyboardInterrupt
        return
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        seen = 0
        async for _ in signals:
            seen += 1
            if seen > 1:
                os._exit(FORCED_EXIT)
            stop.call()
