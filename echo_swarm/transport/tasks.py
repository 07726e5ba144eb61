"""Task groups for things that live as long as a block."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup


@asynccontextmanager
async def background_tasks() -> AsyncGenerator[TaskGroup]:
    """Yield a task group that is cancelled when the block ends.

    Unlike in a plain task group, what the block raises reaches the caller as it is, not inside an exception group.
    """
    tasks = anyio.create_task_group()
    await tasks.__aenter__()
    try:
        yield tasks
    finally:
        tasks.cancel_scope.cancel()
        await tasks.__aexit__(None, None, None)
