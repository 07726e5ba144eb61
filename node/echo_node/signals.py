"""What the signals that end a process do to a node: the first leaves in good order, the second ends it at once."""

import os
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

import anyio

FORCED_EXIT = 130
"""After a second signal, as for an interrupted program."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """What a first signal does: before the node runs, end; then, leave in order."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call


async def listen(stop: Stop, emit: Callable[[str], None]) -> None:
    """First signal: leave in order. Second: at once. For ever; a task of its own."""
    if os.name != "posix":  # pragma: no cover - there, Ctrl+C raises KeyboardInterrupt
        return
    with caught_signals() as signals:
        await signals.first()
        emit("stopping; Ctrl+C again ends it at once, and leaves unfinished work to run out")
        stop.call()
        await anyio.sleep_forever()


class Signals:
    """Ctrl+C and SIGTERM, counted where they arrive: the second one works even while the event loop is busy."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._pid = os.getpid()
        self.seen = 0

    def arrived(self, _number: int, _frame: FrameType | None) -> None:
        """Note a signal. Children are tied to this process: what it leaves behind when it ends, ends too."""
        if os.getpid() != self._pid:
            return
        self.seen += 1
        if self.seen > 1:
            os._exit(FORCED_EXIT)
        self._writer.send(b"x")

    async def first(self) -> None:
        """Wait for the first signal."""
        if not self.seen:
            await anyio.wait_readable(self._reader)

    def close(self) -> None:
        """Let go of the sockets."""
        self._reader.close()
        self._writer.close()


@contextmanager
def caught_signals() -> Generator[Signals]:
    """Catch both signals for the length of the block; call inside the event loop, which takes SIGINT when it starts."""
    signals = Signals()
    before = {number: signal.signal(number, signals.arrived) for number in _SIGNALS}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signals.close()
