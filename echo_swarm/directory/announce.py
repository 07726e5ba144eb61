"""Keeps a record announced for as long as its maker runs."""

from collections.abc import Callable

import anyio

from echo_swarm.directory.base import Directory

RETRY_S = 5.0
"""After an announcement that nobody took, when `every_s` is longer."""


async def keep_announced(
    directory: Directory,
    topic: str,
    make_record: Callable[[], bytes],
    *,
    every_s: float,
    ttl_s: float | None = None,
    changed: Callable[[], anyio.Event] | None = None,
) -> None:
    """Announce `make_record()` now and then again, until cancelled.

    Args:
        directory: where.
        topic: of the record.
        make_record: returns the sealed record as it is now.
        every_s: time between announcements.
        ttl_s: lifetime of each; three times `every_s` if None, so that two may be lost.
        changed: returns an event whose setting brings the next announcement forward.

    """
    while True:
        event = changed() if changed is not None else anyio.Event()
        taken = await directory.announce(topic, make_record(), ttl_s=ttl_s or 3 * every_s)
        with anyio.move_on_after(every_s if taken else min(every_s, RETRY_S)):
            await event.wait()
