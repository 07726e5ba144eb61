"""A change that several tasks wait for, each with a deadline."""

import anyio


class Signal:
    """`notify` wakes everybody who waits at that moment, `notify_one` those who wait under one name."""

    def __init__(self) -> None:
        self._event: anyio.Event | None = None
        """Of those who wait now; None when nobody does: most notices find nobody, and an event costs more than they."""
        self._named: dict[str, anyio.Event] = {}
        """Of those who waited since the last `notify`."""

    def notify(self) -> None:
        """Wake the waiters."""
        if self._event is not None:
            self._event.set()
            self._event = None
        for event in self._named.values():
            event.set()
        self._named.clear()

    def notify_one(self, name: str) -> None:
        """Wake the waiters of one name."""
        event = self._named.pop(name, None)
        if event is not None:
            event.set()

    async def wait(self, timeout_s: float, name: str | None = None) -> bool:
        """Wait for the next `notify`, or `notify_one(name)`. Returns False when `timeout_s` passed without one."""
        if name is None:
            event = self._event = self._event or anyio.Event()
        else:
            event = self._named.setdefault(name, anyio.Event())
        with anyio.move_on_after(timeout_s):
            await event.wait()
        return event.is_set()
