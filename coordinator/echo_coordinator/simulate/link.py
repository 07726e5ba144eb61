"""A modelled node's connection to the coordinator: hello, calls, and again after a loss."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

from echo_coordinator.simulate.network import Wire
from echo_coordinator.simulate.place import Place
from echo_swarm.errors import PeerUnreachable, RemoteError
from echo_swarm.identity import PeerId
from echo_swarm.work import BackendReport, Hello, Role, Welcome

CALL_TIMEOUT_S = 20.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 15.0


class SimLink:
    """One process's connection."""

    def __init__(self, place: Place, peer: PeerId, hear: Callable[[int | None], None]) -> None:
        """Describe it; `hear` is told the newest version in each welcome."""
        self._place = place
        self._hear = hear
        self._wire = Wire(index=place.index, peer=peer, delay_s=place.delay_s)
        self._instance = place.draws.randbytes(16)
        self.up = asyncio.Event()
        self._down = asyncio.Event()
        self.beat_s = 3.0

    async def call(self, method: str, request: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Call the coordinator; a failure takes the connection down. Raises PeerUnreachable, RemoteError."""
        try:
            return await self._place.network.call(self._wire, method, request, timeout_s)
        except PeerUnreachable as e:
            self._take_down(str(e))
            raise
        except RemoteError as e:
            if e.code == "hello_first":
                self._take_down(str(e))
                raise PeerUnreachable(str(e)) from e
            raise

    async def run(self) -> None:
        """Keep it up, until cancelled."""
        place, pause_s = self._place, _FIRST_PAUSE_S
        while True:
            try:
                reply = await place.network.call(self._wire, "hello", self._hello(), CALL_TIMEOUT_S)
            except (PeerUnreachable, RemoteError):
                await self._pause(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
                continue
            welcome = cast(Welcome, reply)
            self.beat_s, pause_s = welcome.beat_s, _FIRST_PAUSE_S
            if welcome.head_manifest is not None:
                self._hear(int.from_bytes(welcome.head_manifest, "big"))
            self._down.clear()
            self.up.set()
            await self._down.wait()
            await self._pause(_FIRST_PAUSE_S)

    def _take_down(self, why: str) -> None:
        if self.up.is_set():
            self.up.clear()
            self._down.set()
            self._wire.break_off(why)

    def _hello(self) -> Hello:
        place = self._place
        return Hello(
            run_id=place.run_id,
            software="simulated",
            role=Role.INFERENCE,
            instance=self._instance,
            wall_s=place.clock.wall_s(),
            backend=BackendReport(
                backend="scripted", build="simulated", precision="float32", device="none", batch=place.swarm.places
            ),
            addresses=(),
        )

    async def _pause(self, full_s: float) -> None:
        await asyncio.sleep(full_s * (1.0 - 0.5 * self._place.draws.random()))
