"""Room for the answer of a call that is being handled."""

from contextvars import ContextVar

import anyio

from echo_swarm.transport.room import Claim


class Call:
    """One call under way, as far as its answer's memory goes."""

    __slots__ = ("_answers", "reserved")

    def __init__(self, answers: Claim) -> None:
        """Begin with nothing; `answers` is what its stream holds."""
        self._answers = answers
        self.reserved = 0
        """Bytes held for its answer."""

    def reserve_now(self, size: int) -> bool:
        """Reserve room for an answer if nobody needs to wait for it."""
        if self.reserved or not size:
            return True
        if self._answers.take_now(size):
            self.reserved = size
            return True
        return False

    async def reserve(self, size: int) -> None:
        """Wait for room for an answer. Once a call: who holds some and waits for more could wait for ever."""
        if not self.reserve_now(size):
            await self._answers.take(size)
            self.reserved = size

    def settle(self, size: int) -> None:
        """Put what the answer really takes in place of what was reserved."""
        self._answers.change(size - self.reserved)
        self.reserved = size


CURRENT: ContextVar[Call] = ContextVar("call")
"""The call whose handler runs."""


async def reserve_answer(size: int, *, max_wait_s: float) -> None:
    """In a handler: wait until an answer of about this many bytes has room, before it is read into memory.

    Raises:
        TimeoutError: it had none within `max_wait_s`.

    """
    call = CURRENT.get(None)
    if call is not None and not call.reserve_now(size):
        with anyio.fail_after(max_wait_s):
            await call.reserve(size)
