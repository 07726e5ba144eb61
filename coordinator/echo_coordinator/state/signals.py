"""A change that several tasks wait for, each with a deadline."""

import anyio


class Signal:
    """`notify` wakes everybody who waits at that moment."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def notify(self) -> None:
        """Wake the waiters."""
        self._event.set()
        self._event = anyio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the next `notify`. Returns False when `timeout_s` passed without one."""
        event = self._event
        with anyio.move_on_after(timeout_s):
            await event.wait()
        return event.is_set()
