"""One stream that carries frames both ways: a reader, a writer and a watchdog that live and die together.

    stream ──► FrameReader ──► on_frame        (the owner's; may wait, and then nothing more is read)
    owner  ──► Outbox      ──► stream
    watchdog: asks `overdue` now and then, ends the link with its reason

All reads and writes happen in these three tasks. Reads are cancelled only when the link ends anyway: under some
hosts a cancelled read or write would corrupt the connection.
"""

from collections.abc import Awaitable, Callable

import anyio
from anyio.abc import ByteStream, TaskGroup

from echo_swarm.codec import Limits
from echo_swarm.errors import MalformedMessage
from echo_swarm.transport.frames import Frame, FrameReader, Kind, Outbox, encode_frame

MIN_BYTES_PER_S = 32 * 1024
"""A frame may take as long as a slow volunteer's uplink needs for its announced size, on top of the frame deadline."""
_GOODBYE_S = 1.0
"""How long a last error frame may hold up the end of a stream."""


class Link:
    """Runs one framed stream until it ends, and keeps the reason."""

    def __init__(self, stream: ByteStream, limits: Limits) -> None:
        self._stream = stream
        self._scope = anyio.CancelScope()
        self.reader = FrameReader(stream, limits)
        self.outbox = Outbox(stream)
        self.alive = True
        self.end_reason = ""
        """Why the link ended; empty while it lives."""
        self.malformed = False
        """Whether it ended because the peer broke the protocol."""
        self._pong_queued = False

    async def run(
        self,
        on_frame: Callable[[Frame, TaskGroup], Awaitable[None]],
        overdue: Callable[[float], str | None],
        *,
        tick_s: float,
    ) -> None:
        """Serve the stream until it ends; then close it. Raises only what `on_frame`'s tasks raise.

        Args:
            on_frame: called for each frame; may start tasks in the group, which are cancelled at the end. Pings are
                answered before.
            overdue: given the time, says why the link must end now, or None.
            tick_s: how often `overdue` is asked.

        """
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._write)
                    tasks.start_soon(self._watch, overdue, tick_s)
                    await self._read(on_frame, tasks)
                    tasks.cancel_scope.cancel()
            await self._say_goodbye()
        finally:
            self.end(self.end_reason or "closed")
            self.reader.drop()
            self.outbox.drop()
            with anyio.CancelScope(shield=True):
                await self._stream.aclose()

    def end(self, reason: str) -> None:
        """End the link, from any task."""
        if self.alive:
            self.alive = False
            self.end_reason = reason
        self._scope.cancel()

    async def _read(self, on_frame: Callable[[Frame, TaskGroup], Awaitable[None]], tasks: TaskGroup) -> None:
        try:
            while True:
                frame = await self.reader.receive()
                if frame.kind is Kind.PING:
                    self._pong(frame.call_id)
                await on_frame(frame, tasks)
        except MalformedMessage as e:
            self.malformed = True
            self.end(str(e))
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            self.end("the stream was closed")

    async def _write(self) -> None:
        try:
            await self.outbox.pump()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            self.end("the stream was closed")

    async def _watch(self, overdue: Callable[[float], str | None], tick_s: float) -> None:
        while True:
            await anyio.sleep(tick_s)
            reason = overdue(anyio.current_time())
            if reason is not None:
                self.end(reason)

    def _pong(self, call_id: int) -> None:
        # One at a time: a flood of pings must not fill the outbox.
        if not self._pong_queued:
            self._pong_queued = True
            self.outbox.put(encode_frame(Kind.PONG, call_id, "", {}), self._pong_sent)

    def _pong_sent(self) -> None:
        self._pong_queued = False

    async def _say_goodbye(self) -> None:
        """Tell a peer that broke the protocol what was wrong, if it still listens and no write was cut short."""
        if not self.malformed or self.outbox.write_since is not None:
            return
        parting = Outbox(self._stream)
        parting.put(encode_frame(Kind.ERROR, 0, "malformed", {"message": self.end_reason[:500]}))
        with anyio.move_on_after(_GOODBYE_S):
            try:
                await parting.drain()
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return


def frame_overdue(reader: FrameReader, now: float, frame_timeout_s: float) -> str | None:
    """Say whether the frame that is arriving takes too long: slower than any honest uplink, or stopped half-way."""
    if reader.frame_since is None:
        return None
    allowed_s = frame_timeout_s + reader.frame_bytes / MIN_BYTES_PER_S
    if now - reader.frame_since <= allowed_s:
        return None
    return f"a frame was not complete after {allowed_s:.1f} s"
