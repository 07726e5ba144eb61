"""Room for the answer of a call that is being handled."""

from contextvars import ContextVar

from echo_swarm.transport.room import Claim


class Call:
    """One call under way, as far as its answer's memory goes."""

    __slots__ = ("_answers", "reserved")

    def __init__(self, answers: Claim) -> None:
        """Begin with nothing; `answers` is what its stream holds."""
        self._answers = answers
        self.reserved = 0
        """Bytes held for its answer."""

    async def reserve(self, size: int) -> None:
        """Wait for room for an answer. Once a call: who holds some and waits for more could wait for ever."""
        if not self.reserved and size:
            await self._answers.take(size)
            self.reserved = size

    def settle(self, size: int) -> None:
        """Put what the answer really takes in place of what was reserved."""
        self._answers.change(size - self.reserved)
        self.reserved = size


CURRENT: ContextVar[Call] = ContextVar("call")
"""The call whose handler runs."""


async def reserve_answer(size: int) -> None:
    """In a handler: wait until an answer of about this many bytes has room, before it is read into memory."""
    call = CURRENT.get(None)
    if call is not None:
        await call.reserve(size)
