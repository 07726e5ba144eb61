"""Tasks of one simulated process: started in order, ended in order, all at once."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Crew:
    """What a process does. Not an anyio task group: that cancels in the order of addresses, another one each time."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        """Describe it; `failed` is told what a task raised: no part of a simulation may fail unseen."""
        self._failed = failed
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._timers: dict[asyncio.TimerHandle, None] = {}
        self.stopped = False

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a task until it ends or the crew is stopped."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def later(self, delay_s: float, act: Callable[[], object]) -> None:
        """Do something after a while, unless the crew is stopped before."""

        def due() -> None:
            self._timers.pop(handle, None)
            try:
                act()
            except Exception as e:  # noqa: BLE001 - whatever it is, the simulation ends with it
                self._failed(e)

        handle = asyncio.get_running_loop().call_later(delay_s, due)
        self._timers[handle] = None

    def stop(self) -> list[asyncio.Task[Any]]:
        """Kill everything. Returns the tasks, which end in a moment."""
        self.stopped = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return tasks

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)
