"""Leaving in good order: what it waits for is said while it lasts."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio

TELL_EVERY_S = 2.0


@asynccontextmanager
async def told_while_leaving(
    say: Callable[[str], None], under_way: Callable[[], tuple[int, int]], *, limit_s: float
) -> AsyncGenerator[None]:
    """Say what leaving waits for at once, and every two seconds when that has changed. `under_way`: see `words`."""

    async def tell() -> None:
        told = ""
        while True:
            now = words(*under_way())
            if now != told:
                say(f"leaving: {now}" if told else f"leaving, in about {limit_s:.0f} s at most: {now}")
                told = now
            await anyio.sleep(TELL_EVERY_S)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(tell)
        try:
            yield
        finally:
            tasks.cancel_scope.cancel()


def words(running: int, unanswered: int) -> str:
    """Return what is waited for: completions that are being sampled, finished ones without a verdict."""
    parts = [f"{running} running completions"] if running else []
    parts += [f"verdicts on {unanswered} finished ones"] if unanswered else []
    return f"waiting for {' and '.join(parts)}" if parts else "handing work back"
