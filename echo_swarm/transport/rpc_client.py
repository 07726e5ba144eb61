"""The calling side of `rpc`: one long-lived stream to one peer, many calls in flight.

    call ──► Outbox ──► stream ──► peer          at most `max_outstanding` calls, the rest wait for a place
    call ◄── _Waiting ◄── reader task ◄── peer   answers in any order, matched by call id

A caller that is cancelled or late forgets its call; the stream and the other calls do not notice. When the stream
is lost, all calls in flight fail at once and the next call opens a new one.
"""

import itertools
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import TaskGroup

from echo_swarm.codec import Limits
from echo_swarm.errors import EchoError, MalformedMessage, PeerUnreachable, RemoteError, Unanswered
from echo_swarm.identity import PeerId
from echo_swarm.transport.base import Host
from echo_swarm.transport.frames import Body, Frame, Kind, body_bytes, encode_frame
from echo_swarm.transport.link import Link, frame_overdue
from echo_swarm.wire import clean

FRAME_OVERHEAD_BYTES = 256
"""What a frame adds to its payload: kind, call id, method and lengths."""


@dataclass(slots=True)
class _Waiting:
    """A call in flight."""

    done: anyio.Event = field(default_factory=anyio.Event)
    payload: dict[str, Any] | None = None
    error: EchoError | None = None


class RpcClient:
    """Calls one protocol of one peer. Use as `async with RpcClient(...) as client`."""

    def __init__(
        self,
        host: Host,
        peer: PeerId,
        protocol: str,
        *,
        max_reply_bytes: int,
        max_request_bytes: int = 16 << 20,
        max_outstanding: int = 64,
        ping_every_s: float = 10.0,
        silent_after_s: float = 20.0,
        frame_timeout_s: float = 30.0,
    ) -> None:
        """Describe the client; nothing is opened before the first call.

        Args:
            host: opens the streams.
            peer: whom to call.
            protocol: stream protocol id.
            max_reply_bytes: payload of an answer; a longer one ends the stream.
            max_request_bytes: payload of a call; a longer one is refused before it is sent.
            max_outstanding: calls in flight; more wait, within their own deadlines.
            ping_every_s: a stream is never idle for longer.
            silent_after_s: a peer that does not react to a ping, or takes no data, for this long is lost.
            frame_timeout_s: how long one answer may take to arrive, plus its size at 32 KiB/s.

        """
        self.peer = peer
        self._host = host
        self._protocol = protocol
        self._limits = Limits(max_bytes=max_reply_bytes + FRAME_OVERHEAD_BYTES, max_depth=16)
        self._max_frame_bytes = max_request_bytes + FRAME_OVERHEAD_BYTES
        self._slots = anyio.Semaphore(max_outstanding, fast_acquire=True)
        self._ping_every_s = ping_every_s
        self._silent_after_s = silent_after_s
        self._frame_timeout_s = frame_timeout_s
        self._ids = itertools.count(1)
        self._opening = anyio.Lock(fast_acquire=True)
        self._connection: _Connection | None = None
        self._tasks: TaskGroup | None = None
        self._bytes_before = (0, 0)

    async def __aenter__(self) -> Self:
        """Start the task group that will own the stream."""
        self._tasks = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the stream. Calls in flight fail with PeerUnreachable."""
        tasks, self._tasks = self._tasks, None
        if tasks is not None:
            tasks.cancel_scope.cancel()
            # Not given the error: a task group would wrap it in an exception group on its way to the caller.
            await tasks.__aexit__(None, None, None)

    @property
    def connected(self) -> bool:
        """Whether a stream is open, as far as we know."""
        return self._living is not None

    @property
    def bytes_in(self) -> int:
        """Bytes received so far, over all streams."""
        return self._bytes_before[0] + (self._connection.link.reader.bytes_in if self._connection else 0)

    @property
    def bytes_out(self) -> int:
        """Bytes sent so far, over all streams."""
        return self._bytes_before[1] + (self._connection.link.outbox.bytes_out if self._connection else 0)

    async def call(self, method: str, payload: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Call a method and return the payload of its answer.

        Raises:
            PeerUnreachable: no stream, the stream was lost, or no answer within `timeout_s`. The call may or may not
                have been carried out.
            RemoteError: the peer answered with an error.
            MalformedMessage: the request is too large, or the peer broke the protocol.

        """
        call_id = next(self._ids)
        body = encode_frame(Kind.CALL, call_id, method, payload)
        if (size := body_bytes(body)) > self._max_frame_bytes:
            raise MalformedMessage(f"request {method} of {size} bytes, limit {self._max_frame_bytes}")
        kind: type[PeerUnreachable] = PeerUnreachable
        try:
            with anyio.fail_after(timeout_s):
                async with self._slots:
                    connection = self._living or await self._connected(timeout_s)
                    kind = Unanswered
                    return await connection.ask(call_id, body)
        except TimeoutError as e:
            raise kind(f"{self.peer} gave no answer to {method!r} within {timeout_s:g} s") from e

    @property
    def _living(self) -> "_Connection | None":
        return self._connection if self._connection is not None and self._connection.link.alive else None

    async def _connected(self, timeout_s: float) -> "_Connection":
        async with self._opening:
            if living := self._living:
                return living
            stream = await self._host.open_stream(self.peer, self._protocol, timeout_s=timeout_s)
            if self._tasks is None:
                with anyio.CancelScope(shield=True):
                    await stream.aclose()
                raise PeerUnreachable(f"the client for {self.peer} is closed")
            self._bytes_before = (self.bytes_in, self.bytes_out)
            self._connection = _Connection(
                self.peer,
                Link(stream, self._limits),
                ping_every_s=self._ping_every_s,
                silent_after_s=self._silent_after_s,
                frame_timeout_s=self._frame_timeout_s,
            )
            self._tasks.start_soon(self._connection.run)
            return self._connection


class _Connection:
    """One stream and the calls in flight on it."""

    def __init__(
        self, peer: PeerId, link: Link, *, ping_every_s: float, silent_after_s: float, frame_timeout_s: float
    ) -> None:
        self.link = link
        self._peer = peer
        self._ping_every_s = ping_every_s
        self._silent_after_s = silent_after_s
        self._frame_timeout_s = frame_timeout_s
        self._waiting: dict[int, _Waiting] = {}
        self._ping_queued = False
        self._ping_written_at: float | None = None

    async def run(self) -> None:
        """Own the stream until it ends, then fail the calls that still wait."""
        try:
            tick_s = min(self._ping_every_s, self._silent_after_s, self._frame_timeout_s) / 4
            await self.link.run(self._on_frame, self._overdue, tick_s=tick_s)
        finally:
            self.link.end("the client was closed")
            kind = MalformedMessage if self.link.malformed else PeerUnreachable
            for waiting in self._waiting.values():
                waiting.error = kind(f"lost the stream to {self._peer}: {self.link.end_reason}")
                waiting.done.set()

    async def ask(self, call_id: int, body: Body) -> dict[str, Any]:
        """Send one call and wait for its answer. May be cancelled at any time."""
        if not self.link.alive:
            raise PeerUnreachable(f"lost the stream to {self._peer}: {self.link.end_reason}")
        waiting = self._waiting[call_id] = _Waiting()
        token = self.link.outbox.put(body)
        try:
            await waiting.done.wait()
        finally:
            del self._waiting[call_id]
            self.link.outbox.discard(token)
        if waiting.error is not None:
            raise waiting.error
        assert waiting.payload is not None
        return waiting.payload

    async def _on_frame(self, frame: Frame, _tasks: TaskGroup) -> None:
        if frame.kind is Kind.ERROR and frame.call_id == 0:
            self.link.end(f"{clean(frame.subject)}: {_text(frame)}")
            return
        waiting = self._waiting.get(frame.call_id)
        if waiting is None or waiting.done.is_set():
            return  # An answer to a call that was given up, or a pong.
        if frame.kind is Kind.ANSWER:
            waiting.payload = frame.payload
        elif frame.kind is Kind.ERROR:
            waiting.error = RemoteError(clean(frame.subject), _text(frame))
        else:
            return
        waiting.done.set()

    def _overdue(self, now: float) -> str | None:
        """End a silent stream; ping a quiet one.

        Silence counts from a ping that was written, or from a write that is stuck: a large frame on its way out over
        a slow line keeps the ping behind it, and is no silence.
        """
        reader, outbox = self.link.reader, self.link.outbox
        if self._ping_written_at is not None and reader.received_at >= self._ping_written_at:
            self._ping_written_at = None
        since = [at for at in (self._ping_written_at, outbox.write_since) if at is not None]
        if any(now - at > self._silent_after_s and now - reader.received_at > self._silent_after_s for at in since):
            return f"silent for {now - reader.received_at:.1f} s"
        quiet_s = now - min(reader.received_at, outbox.sent_at)
        if quiet_s > self._ping_every_s and not self._ping_queued and self._ping_written_at is None:
            self._ping_queued = True
            outbox.put(encode_frame(Kind.PING, 0, "", {}), self._ping_sent)
        return frame_overdue(reader, now, self._frame_timeout_s)

    def _ping_sent(self) -> None:
        self._ping_queued = False
        self._ping_written_at = anyio.current_time()


def _text(frame: Frame) -> str:
    message = frame.payload.get("message")
    return clean(message[:1000]) if isinstance(message, str) else ""
