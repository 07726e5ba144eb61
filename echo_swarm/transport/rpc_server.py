"""The answering side of `rpc`: serves one protocol to many peers, none of which can hurt another.

    stream ──► reader ──► handler task per call ──► Outbox ──► stream
                 ▲                          ▲         │
                 │                          └─ waits while unread answers fill their half of the memory
                 └── waits while the peer's share of calls or bytes is used up, or arriving and handled requests fill
                     theirs; a share is free again once its answer is written

Bounds: streams in all and a peer, calls and request bytes in flight a peer, bytes in flight in all (`room`), size and
arrival time of a frame, and how long a peer may stay silent or leave answers unread. When all streams or all memory are
taken, some streams end for the others (`crowd`): identities are free, so whoever only holds must not keep others out.
"""

import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import anyio
from anyio.abc import ByteStream, TaskGroup

from echo_swarm.codec import Limits
from echo_swarm.errors import LocalFault, PeerFault, RemoteError, Unavailable, UsageError
from echo_swarm.identity import PeerId
from echo_swarm.transport.base import Host
from echo_swarm.transport.call import CURRENT, Call
from echo_swarm.transport.crowd import CALL_BYTES, Crowd
from echo_swarm.transport.frames import WRITE_BYTES, Body, Frame, Kind, body_bytes, encode_frame
from echo_swarm.transport.link import Link, frame_overdue
from echo_swarm.transport.room import Claim
from echo_swarm.transport.rpc_client import FRAME_OVERHEAD_BYTES
from echo_swarm.transport.rpc_errors import error_code, error_frame
from echo_swarm.transport.traffic import Share, TrafficLedger

logger = logging.getLogger(__name__)

Method = Callable[[PeerId, dict[str, Any]], Awaitable[dict[str, Any]]]
"""Answers one call of an authenticated peer. What it raises becomes an error frame; see `error_code`."""

_KEEPALIVE_S = 5.0
"""A peer whose calls we are working on hears from us this often, also when its share is used up and we do not read."""
_FINISH_S = 2.0
"""How long calls that are to be finished may hold up the end of the server."""
_HEAD_START_BYTES = 1 << 16
"""A request that comes slowly is measured as if this much of it had come at once."""
_FAIR_BYTES_PER_S = 1 << 20
"""What takes longer than at this pace is slow, even if little of it is missing."""
MAX_BYTES = 256 << 20
"""Of all peers together, unless said otherwise."""


class RpcServer:
    """Serves methods over a host's streams. Use as `async with RpcServer(...) as server`, or call `serve()`."""

    def __init__(
        self,
        host: Host,
        protocol: str,
        *,
        max_request_bytes: int,
        max_reply_bytes: int = 16 << 20,
        max_in_flight_per_peer: int = 64,
        max_bytes_in_flight_per_peer: int | None = None,
        max_streams_per_peer: int = 4,
        max_streams: int = 4096,
        max_bytes: int = MAX_BYTES,
        idle_timeout_s: float = 60.0,
        frame_timeout_s: float = 30.0,
        settled_s: float = 1.0,
        crowded_s: float = 1.0,
    ) -> None:
        """Describe the server.

        Args:
            host: accepts the streams; its task group runs them.
            protocol: stream protocol id.
            max_request_bytes: payload of a call; a longer one ends the stream before it is read.
            max_reply_bytes: a handler that answers more has a bug; the caller gets `internal`.
            max_in_flight_per_peer: calls being handled or answered; more are not read off the stream.
            max_bytes_in_flight_per_peer: the same by size of requests; four of the largest if None.
            max_streams_per_peer: further ones are closed at once.
            max_streams: of all peers together; one that is not in use ends when another peer needs its place.
            max_bytes: in flight of all peers: half for requests that arrive or are handled, half for unread answers.
            idle_timeout_s: a stream with nothing in flight that says nothing is closed. Clients ping every 10 s.
            frame_timeout_s: for a frame to arrive (plus its size at 32 KiB/s), and for an answer to be taken.
            settled_s: a stream opened or used so lately makes no room: its next call may be on its way.
            crowded_s: how long somebody may wait for memory before slow streams that hold some are ended.

        """
        self.traffic = TrafficLedger()
        """What came and went, by peer and by method."""
        self._host = host
        self._protocol = protocol
        self._limits = Limits(max_bytes=max_request_bytes + FRAME_OVERHEAD_BYTES, max_depth=16)
        self._max_reply_bytes = max_reply_bytes
        self._max_calls = max_in_flight_per_peer
        self._max_bytes = max_bytes_in_flight_per_peer or 4 * self._limits.max_bytes
        self._max_streams_per_peer = max_streams_per_peer
        self.crowd = Crowd(self.traffic, max_streams, max_bytes, self._limits.max_bytes, settled_s, crowded_s)
        """Its streams, and the memory that they share."""
        self._idle_timeout_s = idle_timeout_s
        self._frame_timeout_s = frame_timeout_s
        self._methods: dict[str, Method] = {}
        self._finished: set[str] = set()
        self._waiting: set[str] = set()
        self._longest: dict[str, int] = {}
        self._shares: dict[PeerId, Share] = {}
        self._sessions: set[_Session] = set()
        self.closed = False
        """Whether it ends."""

    def method(self, name: str, handler: Method, *, finish: bool = False, waits: bool = False) -> None:
        """Answer calls of `name` with `handler`.

        Args:
            name: as the caller gives it.
            handler: answers.
            finish: whether a call under way is answered before the server ends, rather than cut off: for one whose
                effect lasts, so that the caller need not ask again later what became of it.
            waits: whether most of a call's time is waiting for news: it does not count as use of its stream.

        """
        self._methods[name] = handler
        if waits:
            self._waiting.add(name)
        if finish:
            self._finished.add(name)

    async def serve(self) -> None:
        """Accept streams from now on."""
        await self._host.serve(self._protocol, self._on_stream)

    async def __aenter__(self) -> Self:
        """Accept streams from now on."""
        await self.serve()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Accept no more streams, answer what is to be finished, and end all streams."""
        self.closed = True
        with anyio.move_on_after(_FINISH_S, shield=True):
            for session in [session for session in self._sessions if session.unfinished]:
                await session.settled.wait()
        for session in tuple(self._sessions):
            session.link.end("the server was closed")

    @property
    def stream_count(self) -> int:
        """Open streams."""
        return len(self._sessions)

    async def _on_stream(self, stream: ByteStream, peer: PeerId) -> None:
        share = self._shares.get(peer) or Share(max_calls=self._max_calls, max_bytes=self._max_bytes)
        if self.closed or share.streams >= self._max_streams_per_peer or not self.crowd.admits():
            self.traffic.refused_streams += 1
            return
        self._shares[peer] = share
        share.streams += 1
        session = _Session(self, peer, Link(stream, self._limits), share)
        self._sessions.add(session)
        self.crowd.members.add(session)
        try:
            await session.run()
        finally:
            self._sessions.discard(session)
            self.crowd.members.discard(session)
            self.crowd.leaving -= session.leaving
            share.streams -= 1
            if share.streams == 0:
                del self._shares[peer]

    def is_use(self, method: str) -> bool:
        """Whether a call of a method counts as use of its stream."""
        return method in self._methods and method not in self._waiting

    async def answer(self, peer: PeerId, frame: Frame, call: Call) -> Body:
        """Carry out one call and return the frame that answers it, once there is room for it."""
        handler = self._methods.get(frame.subject)
        if handler is None:
            return error_frame(frame.call_id, "unknown_method", f"no method {frame.subject!r}")
        try:
            payload = await handler(peer, frame.payload)
            # As the longest so far: until here, the payloads of all answers share their manifests and the like.
            await call.reserve(self._longest.get(frame.subject, 0))
            body = encode_frame(Kind.ANSWER, frame.call_id, "", payload)
        except (PeerFault, UsageError, Unavailable) as e:
            return error_frame(frame.call_id, error_code(e), e.message if isinstance(e, RemoteError) else str(e))
        except LocalFault as e:
            logger.warning("%s of %s failed: %s", frame.subject, peer, e)
            return error_frame(frame.call_id, "unavailable", str(e))
        except Exception:
            logger.exception("%s of %s failed", frame.subject, peer)
            return error_frame(frame.call_id, "internal", "internal error")
        size = body_bytes(body)
        if size > self._max_reply_bytes:
            logger.error("%s answered %d bytes, limit %d", frame.subject, size, self._max_reply_bytes)
            return error_frame(frame.call_id, "internal", "internal error")
        self._longest[frame.subject] = max(size, self._longest.get(frame.subject, 0))
        return body

    def is_finished(self, method: str) -> bool:
        """Whether calls of a method are answered before the server ends."""
        return method in self._finished

    def count(self, peer: PeerId, method: str, bytes_in: int, bytes_out: int) -> None:
        """Count one answered call."""
        name = method if method in self._methods else "unknown"
        self.traffic.count(peer, name, bytes_in, bytes_out)

    def overdue(self, link: Link, calls: int, now: float) -> str | None:
        """Say why a stream must end, or None."""
        write_since = link.outbox.write_since
        if write_since is not None and now - write_since > self._frame_timeout_s:
            return f"took no data for {now - write_since:.1f} s"
        idle_since = max(link.reader.received_at, link.outbox.sent_at)
        if calls == 0 and write_since is None and now - idle_since > self._idle_timeout_s:
            return f"idle for {now - idle_since:.1f} s"
        return frame_overdue(link.reader, now, self._frame_timeout_s)

    @property
    def tick_s(self) -> float:
        """How often deadlines are looked at."""
        return min(self._idle_timeout_s, self._frame_timeout_s, _KEEPALIVE_S, 4 * self.crowd.crowded_s) / 4


class _Session:
    """One incoming stream."""

    def __init__(self, server: RpcServer, peer: PeerId, link: Link, share: Share) -> None:
        self.link = link
        self._server = server
        self._peer = peer
        self._share = share
        self.calls = 0
        self._bytes = 0
        self.requests = Claim(server.crowd.requests, share.requests)
        self.answers = Claim(server.crowd.answers, share.answers)
        self._arriving = 0
        """Bytes claimed for the request that arrives; 0 when it is a small one, or none."""
        self._bytes_before = 0
        """Received when its claim was granted."""
        link.reader.admit = self._admit
        self.unfinished = 0
        """Calls under way that the end of the server waits for."""
        self.settled = anyio.Event()
        """Set once nothing is unfinished after the server was closed, or when the stream has ended."""
        self._keepalive_queued = False
        self._uses = 0
        self.used_at_s = anyio.current_time()
        """When it was opened, or the last call that is use of it ended."""
        self.leaving = False
        """Whether it makes room for another."""

    @property
    def in_use(self) -> bool:
        """Whether a call is under way that counts as use."""
        return self._uses > 0

    async def run(self) -> None:
        """Serve until the stream ends."""
        try:
            await self.link.run(self._on_frame, self._overdue, tick_s=self._server.tick_s)
        finally:
            self.settled.set()
            self._share.release(self.calls, self._bytes)
            self.requests.end()
            self.answers.end()
            if self.link.malformed:
                self._server.traffic.malformed_streams += 1
            logger.debug("stream of %s ended: %s", self._peer, self.link.end_reason)

    async def _admit(self, size: int) -> None:
        """Wait until a request of `size` bytes may take up memory; what it is does not show before it is read."""
        await self._share.acquire(size)
        self.calls += 1
        self._bytes += size
        await self.requests.take(size + CALL_BYTES)
        self._arriving = size + CALL_BYTES
        self._bytes_before = self.link.reader.bytes_in

    async def _on_frame(self, frame: Frame, tasks: TaskGroup) -> None:
        size = self.link.reader.frame_bytes
        if frame.kind is Kind.CALL and not self._arriving:
            await self._admit(size)
        claimed, self._arriving = self._arriving, 0
        if frame.kind is not Kind.CALL:
            if claimed:  # A pong, or something a server does not expect; harmless.
                self.requests.change(-claimed)
                self._settle(size)
            return
        self._uses += self._server.is_use(frame.subject)
        self.unfinished += self._server.is_finished(frame.subject)
        tasks.start_soon(self._handle, frame, size)

    async def _handle(self, frame: Frame, size: int) -> None:
        call = Call(self.answers)
        CURRENT.set(call)
        body = await self._server.answer(self._peer, frame, call)
        call.settle(body_bytes(body))
        self.requests.change(-size - CALL_BYTES)
        method = frame.subject  # Not the frame: its payload must not stay until the answer is read.
        self._server.count(self._peer, method, size, call.reserved)

        def written() -> None:
            if self._server.is_use(method):
                self._uses -= 1
                self.used_at_s = anyio.current_time()
            self.unfinished -= self._server.is_finished(method)
            if self._server.closed and not self.unfinished:
                self.settled.set()
            self.answers.change(-call.reserved)
            self._settle(size)

        self.link.outbox.put(body, written)

    def _settle(self, size: int) -> None:
        self.calls -= 1
        self._bytes -= size
        self._share.release(1, size)

    def arriving_s(self, now: float) -> float:
        """How much longer the request that arrives will take at the pace so far, or takes than is fair; else 0."""
        reader = self.link.reader
        if not self._arriving or reader.frame_since is None:
            return 0.0
        # As if some had come before: a small frame may well stop for a moment.
        come = reader.bytes_in - self._bytes_before + _HEAD_START_BYTES
        age_s = now - reader.frame_since
        at_this_pace_s = age_s * max(0, reader.frame_bytes - come) / come
        return max(at_this_pace_s, age_s - reader.frame_bytes / _FAIR_BYTES_PER_S)

    def writing_s(self, now: float) -> float:
        """The same of the answers that wait to be written."""
        since = self.link.outbox.write_since
        return 0.0 if since is None else (now - since) * max(1.0, self.answers.held / WRITE_BYTES)

    def _overdue(self, now: float) -> str | None:
        self._server.crowd.make_room(now)
        if self.calls and now - self.link.outbox.sent_at > _KEEPALIVE_S and not self._keepalive_queued:
            self._keepalive_queued = True
            self.link.outbox.put(encode_frame(Kind.PONG, 0, "", {}), self._keepalive_sent)
        return self._server.overdue(self.link, self.calls, now)

    def _keepalive_sent(self) -> None:
        self._keepalive_queued = False
