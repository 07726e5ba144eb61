"""All streams of a server together: who makes room for another when places or memory are used up.

Identities are free, so no rule here counts by peer. Places go from the stream that was of no use for longest. Memory
goes from the stream that would need longest to give its own back at the pace it shows: whoever sends or reads at a fair
pace keeps it, and holding much without doing so helps nobody for longer than a few seconds.
"""

import logging
import math
from collections.abc import Iterator
from typing import Protocol

import anyio

from echo_swarm.transport.link import Link
from echo_swarm.transport.room import Claim, Room
from echo_swarm.transport.traffic import TrafficLedger

logger = logging.getLogger(__name__)

CALL_BYTES = 4096
"""What a call takes beside its request's bytes: a task, and the decoded request."""
FAIR_CALLS = 6
"""Calls that a stream may have under way whatever others wait for; all streams together have room for as many."""
_SLOW = 5.0
"""A stream is slow if it would need this many times `crowded_s` more."""
_TELL_EVERY_S = 60.0
_MAX_LEAVING = 64
"""Streams that made room and are being closed, beside `max_streams`."""


class Member(Protocol):
    """One stream, as seen from here."""

    link: Link
    requests: Claim
    answers: Claim
    calls: int
    """Requests arriving, being handled, or with an answer not yet written."""
    used_at_s: float
    leaving: bool

    @property
    def in_use(self) -> bool:
        """Whether a call is under way that counts as use."""
        ...

    def arriving_s(self, now: float) -> float:
        """How much longer the request that arrives will take at the pace so far, or takes than is fair; else 0."""
        ...

    def writing_s(self, now: float) -> float:
        """The same of the answers that wait to be written."""
        ...


class Crowd:
    """The streams of one server, and what they have in common."""

    def __init__(
        self,
        traffic: TrafficLedger,
        max_streams: int,
        max_bytes: int,
        largest: int,
        settled_s: float,
        crowded_s: float,
    ) -> None:
        """Begin empty. `largest`: bytes of the longest request; the rest as `RpcServer` says."""
        self.members: set[Member] = set()
        self.leaving = 0
        """Members that made room and are being closed."""
        self.crowded_s = crowded_s
        # Two halves: a request may wait for room for its answer, and an answer waits for nothing but its reader.
        self.requests = Room(max(max_bytes // 2, largest + CALL_BYTES))
        """Bytes of requests that are received or handled, with what their handling takes."""
        self.answers = Room(max_bytes // 2)
        """Bytes of answers that are not written."""
        self._told_at = -math.inf
        self._traffic = traffic
        self._max_streams = max_streams
        self._settled_s = settled_s

    def admits(self) -> bool:
        """Return whether one more stream may be served, after ending the longest unused one if that is needed."""
        if len(self.members) - self.leaving < self._max_streams:
            return True
        if self.leaving >= _MAX_LEAVING:
            return False
        idle = [member for member in self.members if not member.leaving and not member.in_use]
        oldest = min(idle, key=lambda member: member.used_at_s, default=None)
        if oldest is None or anyio.current_time() - oldest.used_at_s < self._settled_s:
            return False
        self._traffic.evicted_streams += 1
        self._end(oldest, "not in use, and others need the place")
        return True

    def make_room(self, now: float) -> None:
        """End slow streams if somebody waits for memory that they hold. Cheap while nobody waits."""
        for room in (self.requests, self.answers):
            if room.blocked_since is None or now - room.blocked_since < self.crowded_s:
                continue
            room.looked_at = now
            missing = room.missing
            before = self._traffic.crowded_streams
            for held, member in self._slowest(room, now):
                if missing <= 0:
                    break
                missing -= held
                self._traffic.crowded_streams += 1
                self._end(member, "slow with what it held while others waited for room")
            self._tell(room, self._traffic.crowded_streams - before, now)

    def _tell(self, room: Room, ended: int, now: float) -> None:
        if ended and now - self._told_at > _TELL_EVERY_S:
            self._told_at = now
            total = self._traffic.crowded_streams
            logger.warning(
                "%d bytes for peers are in use and others waited: %d slow streams were ended (%d so far)",
                room.max_bytes,
                ended,
                total,
            )

    def _slowest(self, room: Room, now: float) -> Iterator[tuple[int, Member]]:
        """Yield (bytes held, stream), the slowest first; then those with more calls under way than is fair."""
        staying = [member for member in self.members if not member.leaving]
        if room is self.requests:
            rated = [(member.arriving_s(now), member.requests.held, member) for member in staying]
        else:
            rated = [(member.writing_s(now), member.answers.held, member) for member in staying]
        slow = [entry for entry in rated if entry[0] > _SLOW * self.crowded_s]
        yield from ((held, member) for _, held, member in sorted(slow, key=lambda entry: -entry[0]))
        if room is self.requests:
            many = [entry for entry in rated if entry[2].calls > FAIR_CALLS and not entry[2].leaving]
            yield from ((held, member) for _, held, member in sorted(many, key=lambda entry: -entry[1]))

    def _end(self, member: Member, reason: str) -> None:
        member.leaving = True
        self.leaving += 1
        member.link.end(reason)
