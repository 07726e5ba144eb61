"""Which piece to ask of whom. Pure: time, randomness and answers are passed in.

Rarest first among a random sample, so that nodes that start together ask for different pieces and soon can serve each
other. The coordinator's uplink is the scarce thing: it is asked freely for pieces that no other source has, and for one
piece at a time of those that somebody else has too. Sources start with one request in flight and earn more. At the end,
when every missing piece is on its way, a piece that takes long is asked of a second and a third source as well, so that
a slow or silent one holds nobody up.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from random import Random

from echo_swarm.checkpoint.pieces import PieceMap, any_of
from echo_swarm.identity import PeerId

_SAMPLE = 48
"""Candidates compared for rarity: enough to avoid the common pieces, cheap however long the list is."""
_MAX_ASKERS = 3
"""Of one piece at a time, in the end game."""
_MIN_PATIENCE_S = 0.3
_QUEUE_S = 0.3
"""Requests to one source are to be answered within this. More of them would only wait in its queue, and at the end be
asked of others as well."""
_AHEAD_S = 0.25
"""A source that chooses is asked to choose about this often."""
_MOST_AHEAD = 32
_LEAST_WINDOW = 2
"""So that a source is never idle between a piece and the next request."""


@dataclass(slots=True)
class _Source:
    have: PieceMap
    most: int
    """Of the window."""
    window: int = 1
    asked: dict[int, float] = field(default_factory=dict[int, float])
    """Piece in flight → when it was asked for."""
    piece_s: float = 0.0
    """Smoothed time from asking to having."""


class PiecePlan:
    """The state of one artifact's download.

    Args:
        have: the pieces that are there; kept up to date by whoever writes them (shared with `PartialArtifact`).
        coordinator: the source to spare.
        window: requests in flight with one source.
        max_in_flight: with all; bounds memory.
        random: source of order.

    """

    def __init__(
        self, have: PieceMap, *, coordinator: PeerId | None, window: int, max_in_flight: int, random: Random
    ) -> None:
        self._have = have
        self._coordinator = coordinator
        self._window = window
        self._max_in_flight = max_in_flight
        self._random = random
        self._sources: dict[PeerId, _Source] = {}
        self._holders = [0] * have.count
        """Sources besides the coordinator that have each piece."""
        self._held = PieceMap(have.count)
        """The pieces that any has."""
        self._askers = [0] * have.count
        self._in_flight = 0
        self._free = PieceMap.of_bits(have.count, have.lacking)
        """Missing and asked of nobody."""

    def update(self, peer: PeerId, have: PieceMap) -> None:
        """Add a source, or replace what is known of its pieces."""
        source = self._sources.get(peer)
        if source is None:
            source = self._sources[peer] = _Source(have=have, most=self._window)
        else:
            if peer != self._coordinator:
                for index in source.have.differing(have):
                    self._add_holder(index, 1 if index in have else -1)
            source.have = have
            return
        self._count(peer, have, 1)

    def remove(self, peer: PeerId) -> None:
        """Forget a source; what was asked of it may be asked of others."""
        source = self._sources.pop(peer, None)
        if source is not None:
            self._count(peer, source.have, -1)
            for index in source.asked:
                self._unask(index)

    def widen(self, peer: PeerId, pieces: int) -> None:
        """Let a source that gives several pieces for one request have so many in flight; half of all at most."""
        self._sources[peer].most = max(1, min(pieces, self._max_in_flight // 2))

    @property
    def ends(self) -> bool:
        """Whether every missing piece is asked of somebody."""
        return self._free.held == 0

    @property
    def has_work(self) -> bool:
        """Whether any source has a missing piece."""
        return any(self._have.lacks_some_of(source.have) for source in self._sources.values())

    def stock(self, peer: PeerId) -> int:
        """Return how many pieces a source has that are missing and asked of nobody."""
        source = self._sources.get(peer)
        return 0 if source is None else self._free.common(source.have)

    def take(self, peer: PeerId, now_s: float) -> int | None:
        """Return the piece to ask of a source now, and count it as asked; None when there is nothing for it to do."""
        source = self._sources[peer]
        if self.is_full(peer):
            return None
        index = self._from_free(peer, source)
        if index is None:
            index = self._from_others(source, now_s)
        if index is not None:
            self._ask(source, index, now_s)
        return index

    def window(self, peer: PeerId) -> int:
        """Return how many requests a source may have in flight now."""
        source = self._sources.get(peer)
        return 0 if source is None else source.window

    def ahead(self, peer: PeerId) -> int:
        """Return how many pieces, beside those in flight, are to be chosen ahead: of a fast source more."""
        source = self._sources.get(peer)
        if source is None:
            return 0
        return max(source.window, int(min(_MOST_AHEAD, _AHEAD_S * self.pieces_per_s(peer))))

    def wanted(self, peer: PeerId, chosen: Sequence[int] = ()) -> tuple[PieceMap, int]:
        """Return the pieces that the coordinator may choose from, and how many.

        By the same rule as `take`: what nobody else has, or one piece of what others have too. Of the former, so many
        that there are some more (`ahead`) than can be asked for now: no time passes between those and the next.

        Args:
            peer: the coordinator.
            chosen: what it chose before and was not asked for yet.

        """
        source = self._sources[peer]
        pieces = PieceMap(self._have.count)
        room = min(source.window - len(source.asked), self._max_in_flight - self._in_flight)
        room += self.ahead(peer) - len(chosen)
        if room <= 0:
            return pieces, 0
        todo = self._free.bits & source.have.bits
        for index in chosen:
            todo &= ~(1 << index)
        rare = todo & ~self._held.bits
        if not rare and (source.asked or chosen):
            return pieces, 0
        pieces = PieceMap.of_bits(self._have.count, rare or todo)
        return pieces, min(room, pieces.held) if rare else min(1, pieces.held)

    def is_full(self, peer: PeerId) -> bool:
        """Whether nothing more may be asked of a source now."""
        source = self._sources[peer]
        return len(source.asked) >= source.window or self._in_flight >= self._max_in_flight

    def claim(self, peer: PeerId, index: int, now_s: float) -> bool:
        """Count a piece as asked of a source, if it is still missing and asked of nobody."""
        source = self._sources.get(peer)
        if source is None or self.is_full(peer) or index not in source.have or index not in self._free:
            return False
        self._free.discard(index)
        self._ask(source, index, now_s)
        return True

    def pieces_per_s(self, peer: PeerId) -> float:
        """Return how fast a source gives; 0 while that is not known."""
        source = self._sources[peer]
        return source.window / source.piece_s if source.piece_s > 0 else 0.0

    def room_for_run(self, peer: PeerId, limit: int) -> bool:
        """Whether a source has room for a request of `limit` pieces, or of half of its window; or nothing to do.

        Else each piece that comes would make room for one of a single piece.
        """
        source = self._sources[peer]
        room = min(source.window - len(source.asked), self._max_in_flight - self._in_flight)
        return not source.asked or room >= min(limit, max(1, source.window // 2))

    def extend(
        self, peer: PeerId, first: int, limit: int, now_s: float, *, among: Collection[int] | None = None
    ) -> range:
        """Ask for the pieces beside one that was taken, too: as long as they are no more common than it is.

        Args:
            peer: the source.
            first: the piece that was taken.
            limit: pieces in all.
            now_s: the time.
            among: which they may be; any if None.

        """

        def add(index: int) -> bool:
            suits = 0 <= index < self._have.count and self._holders[index] <= self._holders[first]
            return suits and (among is None or index in among) and self.claim(peer, index, now_s)

        low = high = first
        while high - low + 1 < limit and add(high + 1):
            high += 1
        while high - low + 1 < limit and add(low - 1):
            low -= 1
        return range(low, high + 1)

    def take_late(self, peer: PeerId, now_s: float) -> int | None:
        """Return a piece that others have been asked for too long ago, as `take` does at the end."""
        source = self._sources[peer]
        if self.is_full(peer):
            return None
        index = self._from_others(source, now_s)
        if index is not None:
            self._ask(source, index, now_s)
        return index

    def settle(self, peer: PeerId, index: int, now_s: float) -> bool:
        """Say that a request is over: answered (then `have` has the piece) or given up.

        Returns whether other sources may be asked for something now that they could not be asked for before.
        """
        source = self._sources.get(peer)
        asked_at = None if source is None else source.asked.pop(index, None)
        if source is None or asked_at is None:
            return False
        full = self._in_flight >= self._max_in_flight
        if index in self._have:
            elapsed = now_s - asked_at
            source.piece_s = elapsed if source.piece_s == 0 else 0.7 * source.piece_s + 0.3 * elapsed
            if elapsed < _QUEUE_S:
                source.window = min(source.most, source.window + 1)
            elif elapsed > 2 * _QUEUE_S:
                source.window = max(_LEAST_WINDOW, source.window - 1)
        self._unask(index)
        return full or index not in self._have

    def _ask(self, source: _Source, index: int, now_s: float) -> None:
        source.asked[index] = now_s
        self._askers[index] += 1
        self._in_flight += 1

    def _unask(self, index: int) -> None:
        self._askers[index] -= 1
        self._in_flight -= 1
        if self._askers[index] == 0 and index not in self._have:
            self._free.add(index)

    def _from_free(self, peer: PeerId, source: _Source) -> int | None:
        spare = peer == self._coordinator and len(source.asked) > 0
        left = self._free.bits & source.have.bits & ~(self._held.bits if spare else 0)
        best: int | None = None
        rarest = 0 if peer == self._coordinator else 1
        for _ in range(min(_SAMPLE, left.bit_count())):
            index = any_of(left, self._random.randrange(self._have.count))
            left ^= 1 << index
            if best is None or self._holders[index] < self._holders[best]:
                best = index
            if self._holders[best] <= rarest:
                break
        if best is not None:
            self._free.discard(best)
        return best

    def _from_others(self, source: _Source, now_s: float) -> int | None:
        """End game: the piece that others have been asked for longest, if it takes longer than it should."""
        if not self.ends:
            return None
        oldest: tuple[float, int] | None = None
        patience_s = max(_MIN_PATIENCE_S, 2 * source.piece_s)
        for other in self._sources.values():
            for index, asked_at in other.asked.items():
                slow = now_s - asked_at > patience_s and self._askers[index] < _MAX_ASKERS
                free = index in source.have and index not in source.asked and index not in self._have
                if slow and free and (oldest is None or asked_at < oldest[0]):
                    oldest = (asked_at, index)
        return None if oldest is None else oldest[1]

    def _count(self, peer: PeerId, have: PieceMap, change: int) -> None:
        if peer != self._coordinator:
            for index in have:
                self._add_holder(index, change)

    def _add_holder(self, index: int, change: int) -> None:
        self._holders[index] += change
        if self._holders[index]:
            self._held.add(index)
        else:
            self._held.discard(index)
