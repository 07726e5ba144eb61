"""Between nodes and coordinator: calls that take time, get lost, arrive twice, or wait behind a partition.

One connection a node, as in reality: a call that fails takes it down, and with it all others that wait on it.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from echo_coordinator.simulate.crew import Crew
from echo_coordinator.simulate.scenario import Faults
from echo_swarm.errors import EchoError, LocalFault, PeerUnreachable, RemoteError
from echo_swarm.identity import PeerId
from echo_swarm.wire import Message


class Server(Protocol):
    """The coordinator's end."""

    @property
    def life(self) -> int | None:
        """Number of the process that answers now; None while there is none."""
        ...

    def handle(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a request until it ends or the process is killed."""
        ...

    async def answer(self, peer: PeerId, method: str, request: Message) -> Message:
        """Answer a request."""
        ...


@dataclass(slots=True, eq=False)
class Wire:
    """A node process's connection."""

    index: int
    peer: PeerId
    delay_s: float
    """Mean, one way."""
    waiting: dict["asyncio.Future[Message]", None] = field(default_factory=dict["asyncio.Future[Message]", None])

    def break_off(self, why: str) -> None:
        """Fail all calls that wait."""
        for future in list(self.waiting):
            if not future.done():
                future.set_exception(PeerUnreachable(why))
        self.waiting.clear()


class Network:
    """All connections."""

    def __init__(self, faults: Faults, draws: random.Random, server: Server, crew: Crew) -> None:
        self._faults = faults
        self._draws = draws
        self._server = server
        self._crew = crew
        self.cut_off: set[int] = set()
        """Nodes behind a partition."""
        self.calls = 0
        self.lost = 0

    async def call(self, wire: Wire, method: str, request: Message, timeout_s: float) -> Message:
        """Call the coordinator.

        Raises:
            PeerUnreachable: no answer within `timeout_s`, or the connection broke.
            RemoteError: its answer.

        """
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        wire.waiting[future] = None
        self.calls += 1
        lost = self._draws.random() < self._faults.loss
        self.lost += lost
        fate = "delivered" if not lost else "request lost" if self._draws.random() < 0.5 else "reply lost"
        if self._server.life is None:
            self._later(wire, lambda: _fail(future, "nobody listens"))
        elif fate != "request lost":
            self._send(wire, method, request, future, fate)
            if self._draws.random() < self._faults.duplicate:
                self._send(wire, method, request, future, "reply lost")
        timer = asyncio.get_running_loop().call_later(timeout_s, _fail, future, f"no answer within {timeout_s:.0f} s")
        try:
            return await future
        finally:
            timer.cancel()
            wire.waiting.pop(future, None)

    def _send(self, wire: Wire, method: str, request: Message, future: "asyncio.Future[Message]", fate: str) -> None:
        life = self._server.life

        def arrive() -> None:
            if wire.index not in self.cut_off and self._server.life == life:
                self._server.handle(serve())

        async def serve() -> None:
            outcome: Message | EchoError
            try:
                outcome = await self._server.answer(wire.peer, method, request)
            except RemoteError as e:
                outcome = e
            except LocalFault as e:
                outcome = RemoteError("unavailable", str(e))
            except EchoError as e:
                outcome = RemoteError("malformed", str(e))
            if fate == "delivered" and wire.index not in self.cut_off:
                self._later(wire, lambda: _settle(future, outcome))

        self._later(wire, arrive)

    def _later(self, wire: Wire, act: Callable[[], object]) -> None:
        mean_s = wire.delay_s
        # Half of it is distance, the rest is queues.
        self._crew.later(mean_s / 2 + (self._draws.expovariate(2 / mean_s) if mean_s else 0.0), act)


def _fail(future: "asyncio.Future[Message]", why: str) -> None:
    if not future.done():
        future.set_exception(PeerUnreachable(why))


def _settle(future: "asyncio.Future[Message]", outcome: Message | EchoError) -> None:
    if future.done():
        return
    if isinstance(outcome, EchoError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
