"""What goes on with one source of a download: learning what it has, asking it for pieces, taking what comes.

    first have ─┬─ refresh: what it has now, whom it knows of
                ├─ ask for a piece (PiecePlan, or the coordinator, says which) ──► verify, write
                │  or, of a mirror or a fast peer, for a run of pieces that lie side by side
                └─ … up to the source's window at a time

A mirror has no news and names nobody.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from echo_swarm.checkpoint.blob import BUSY, NOT_FOUND, PeerHint
from echo_swarm.checkpoint.conversation import MAX_BUSY, BrokenPromise, Conversation
from echo_swarm.checkpoint.fetch_plan import PiecePlan
from echo_swarm.checkpoint.fetch_report import FetchReport, FetchSettings
from echo_swarm.checkpoint.mirror import MAX_CONNECTIONS, MirrorClient
from echo_swarm.checkpoint.partial import PartialArtifact
from echo_swarm.checkpoint.pieces import PieceMap
from echo_swarm.checkpoint.rate import RateLimit
from echo_swarm.checkpoint.sources import SourceBook
from echo_swarm.errors import EchoError, LocalFault, MalformedMessage, PeerFault, PeerUnreachable, RemoteError
from echo_swarm.identity import PeerId
from echo_swarm.transport.base import Host

_IDLE_S = 0.25
"""At the end, when what takes long is asked of a second source, it is looked this often whether it does."""
_RARELY_S = 5.0
"""Before, whoever changes what may be asked of a source wakes it; and this is for what nobody thought of. With a dozen
sources, looking at each four times a second cost more than the pieces on a home line."""
_BEGINNINGS = 5
"""Times that a source may have nothing yet when it is asked first."""
_RUN_S = 0.01
"""What a peer gives in this time is asked for in one request: on a fast line, several pieces."""
_RUNS = 32
"""At least so many requests make up an artifact: those who start together are to get different pieces."""
_BURST_S = 0.5
"""With a limit on bytes a second, what is asked for in one request takes no longer than this, or is one piece."""
_MAX_STRIKES = 3
"""Times that a source may say it has a piece and then not give it. More than one: a piece can move while we ask."""


@dataclass(slots=True, kw_only=True)
class Common:
    """What all conversations of one download share."""

    host: Host
    partial: PartialArtifact
    plan: PiecePlan
    book: SourceBook
    settings: FetchSettings
    report: FetchReport
    rate: RateLimit
    on_piece: Callable[[PeerId, int], None]
    """Told of each verified piece that was missing."""
    on_hints: Callable[[PeerId, Sequence[PeerHint]], None]
    """Told whom a source names."""
    end: Callable[[EchoError | None], None]
    """Ends the download: with a fault, or because nothing is missing."""
    _asleep: dict[PeerId, anyio.Event] = field(default_factory=dict[PeerId, anyio.Event])
    """Of each source that there was nothing to ask of."""
    unanswered: int = 0
    """Sources that have not said yet what they have."""

    def wake(self, peer: PeerId | None = None) -> None:
        """Look again whether there is something to ask of a source; of all, without one."""
        for event in list(self._asleep.values()) if peer is None else filter(None, [self._asleep.get(peer)]):
            event.set()

    async def sleep(self, peer: PeerId, most_s: float) -> None:
        """Wait until it is worth a look what to ask of a source."""
        self._asleep[peer] = anyio.Event()
        try:
            with anyio.move_on_after(most_s):
                await self._asleep[peer].wait()
        finally:
            del self._asleep[peer]


class Exchange:
    """See the module. One source, one conversation.

    Args:
        talk: what is known of the source.
        common: what it shares with the others.

    """

    def __init__(self, talk: Conversation, common: Common) -> None:
        self._talk = talk
        self._common = common
        self._artifact = common.partial.artifact

    async def run(self) -> None:
        """Ask until told to stop (`Conversation.end`).

        Raises:
            PeerUnreachable, RemoteError, PeerFault: why it did not come to an exchange.

        """
        common = self._common
        common.unanswered += 1
        try:
            common.plan.update(self._talk.peer, await self._talk.answer(self._first_have()))
        finally:
            common.unanswered -= 1
        if isinstance(self._talk.client, MirrorClient):
            common.plan.widen(self._talk.peer, MAX_CONNECTIONS * self._talk.client.at_once)
        await self._exchange()

    async def _exchange(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._refresh)
            while True:
                if run := self._next_run(tasks):
                    tasks.start_soon(self._request, run, tasks)
                    continue
                idle_s = _IDLE_S if self._common.plan.ends else _RARELY_S
                pause_s = self._pause_s()
                await self._common.sleep(self._talk.peer, min(_IDLE_S, pause_s) if pause_s > 0 else idle_s)

    def _pause_s(self) -> float:
        """Return for how long the source is asked for nothing."""
        until_s = self._talk.busy_until_s
        resting_s = until_s - anyio.current_time() if until_s else 0.0
        return max(resting_s, self._common.rate.backlog_s())

    def _next_run(self, tasks: TaskGroup) -> Sequence[int]:
        """Return the pieces to ask of the source in one request now, and count their bytes."""
        if self._pause_s() > 0:
            return ()
        limit, peer, plan, talk = self._pieces_at_once(), self._talk.peer, self._common.plan, self._talk
        if plan.is_full(peer) or (limit > 1 and not plan.room_for_run(peer, limit)):
            return ()
        now_s, ended = anyio.current_time(), plan.ends
        first = self._next(now_s, tasks)
        among = talk.offered if talk.offers else None
        run = () if first is None else plan.extend(peer, first, limit, now_s, among=among)
        if talk.offers and len(run) > 1:
            talk.offered = [index for index in talk.offered if index not in run]
        self._common.rate.charge(self._bytes_of(run))
        if plan.ends and not ended:
            self._common.wake()  # From now on others may be asked for what is asked of somebody.
        return run

    def _pieces_at_once(self) -> int:
        """Return how many pieces to ask for in one request; a peer that gives runs gets a window for them."""
        talk, plan, piece_s = self._talk, self._common.plan, self._common.rate.duration_s(self._artifact.piece_bytes)
        if isinstance(talk.client, MirrorClient):
            limit = talk.client.at_once
        else:
            most = min(self._artifact.run_pieces, self._artifact.piece_count // _RUNS)
            limit = max(1, min(most, int(_RUN_S * plan.pieces_per_s(talk.peer))))
            if limit > 1:
                plan.widen(talk.peer, self._common.settings.window * limit)
        return limit if piece_s == 0 else max(1, min(limit, int(_BURST_S / piece_s)))

    def _bytes_of(self, run: Sequence[int]) -> int:
        return sum(self._artifact.piece_length(index) for index in run)

    def _next(self, now_s: float, tasks: TaskGroup) -> int | None:
        """Return the piece to ask of the source now."""
        talk, plan = self._talk, self._common.plan
        if not talk.offers:
            return plan.take(talk.peer, now_s)
        if not talk.choosing and 2 * len(talk.offered) <= plan.ahead(talk.peer):
            # While some are left, so that no time passes between them and the next ones.
            talk.choosing = True
            tasks.start_soon(self._ask_offer)
        while talk.offered:
            index = talk.offered[-1]
            if plan.claim(talk.peer, index, now_s):
                return talk.offered.pop()
            if plan.is_full(talk.peer):
                return None
            talk.offered.pop()
        return plan.take_late(talk.peer, now_s)

    async def _ask_offer(self) -> None:
        talk = self._talk
        wanted, count = self._common.plan.wanted(talk.peer, talk.offered)
        try:
            if count:
                timeout_s = self._common.settings.answer_timeout_s
                offered = await talk.client.offer(self._artifact.digest, wanted.pack(), count, timeout_s=timeout_s)
                talk.offered[:0] = chosen = [index for index in offered if index in wanted][:count]
                talk.offers = bool(chosen)
        except RemoteError:
            talk.offers = False  # It leaves the choice to us.
        except (PeerUnreachable, PeerFault) as e:
            talk.end(e)
        finally:
            talk.choosing = False
        if count:
            self._common.wake(talk.peer)

    async def _refresh(self) -> None:
        """Follow what the source has, and whom it knows of."""
        talk, settings, plan = self._talk, self._common.settings, self._common.plan
        pause_s = settings.greet_first_s if talk.complete else 0.0
        while True:
            await anyio.sleep(pause_s)
            before = talk.held
            try:
                have = await self._ask_have(wait_s=settings.news_wait_s)
            except (PeerUnreachable, PeerFault) as e:
                return talk.end(e)
            if have.held != before:
                plan.update(talk.peer, have)
                self._common.wake(talk.peer)
            if have.complete:
                pause_s = min(settings.greet_s, 2 * max(pause_s, settings.greet_first_s))
            elif have.held <= before:
                pause_s = settings.refresh_s
            else:
                # The less there is to ask for, the more urgent is news.
                enough = max(1, 2 * plan.window(talk.peer))
                pause_s = settings.refresh_s * min(1.0, plan.stock(talk.peer) / enough)

    async def _request(self, run: Sequence[int], tasks: TaskGroup) -> None:
        """Ask for these pieces, then for others, until there are none to ask for."""
        common, peer = self._common, self._talk.peer
        while run:
            try:
                await self._fetch(run)
            except RemoteError as e:
                await self._refused(run[0], e)
            except (PeerUnreachable, PeerFault) as e:
                return self._talk.end(e)
            except LocalFault as e:
                return common.end(e)
            finally:
                self._settle(run)
            if common.partial.have.complete:
                return common.end(None)
            run = self._next_run(tasks)
            if run and not common.plan.is_full(peer):
                common.wake(peer)  # There is room for one more.

    def _settle(self, run: Sequence[int]) -> None:
        peer, now_s = self._talk.peer, anyio.current_time()
        # Waking all for each piece would cost more than the pieces.
        if any([self._common.plan.settle(peer, index, now_s) for index in run]):
            self._common.wake()

    async def _fetch(self, run: Sequence[int]) -> None:
        talk, digest, settings = self._talk, self._artifact.digest, self._common.settings
        # With a full window each request waits for the others of the same peer.
        slowest_s = settings.window * self._bytes_of(run) / settings.min_bytes_per_s
        timeout_s = settings.answer_timeout_s + slowest_s
        owed_bytes = self._bytes_of(run)

        async def take(index: int, data: bytes) -> None:
            nonlocal owed_bytes
            owed_bytes -= len(data)
            await self._take(index, data)
            talk.heard()
            if isinstance(talk.client, MirrorClient):
                self._settle([index])
                self._common.wake(talk.peer)
            if self._common.partial.have.complete:
                self._common.end(None)

        try:
            if isinstance(talk.client, MirrorClient):
                await talk.answer(talk.client.pieces(digest, run, take, timeout_s=timeout_s))
            else:
                ask = talk.client.piece(digest, run[0], count=len(run), timeout_s=timeout_s)
                data = await talk.answer(ask)
                if len(data) > owed_bytes:
                    raise MalformedMessage(f"gave {len(data)} bytes instead of {owed_bytes}")
                await take(run[0], data)
        finally:
            self._common.rate.refund(owed_bytes)  # Did not come: others may ask for as much.

    async def _take(self, index: int, data: bytes) -> None:
        """Verify and write what came."""
        talk, report = self._talk, self._common.report
        try:
            fresh = await anyio.to_thread.run_sync(self._common.partial.write, index, data)
        except MalformedMessage:
            report.wasted_bytes += len(data)
            raise
        report.wasted_bytes += len(data) - fresh
        if not fresh:
            return
        report.bytes_by_source[talk.peer] = report.bytes_by_source.get(talk.peer, 0) + fresh
        self._common.book.delivered(talk.peer, anyio.current_time())
        talk.busy = 0
        self._common.on_piece(talk.peer, fresh)

    async def _refused(self, index: int, error: RemoteError) -> None:
        """Decide what an error frame means: wait, look again at what the source has, or stop."""
        talk = self._talk
        if error.code == BUSY and talk.busy < MAX_BUSY:
            return talk.rest(self._common.settings.retry_s)
        if error.code != NOT_FOUND:
            return talk.end(error)
        try:
            have = await self._ask_have()
        except (PeerUnreachable, PeerFault) as e:
            return talk.end(e)
        talk.strikes += index in have
        if talk.strikes >= _MAX_STRIKES:
            talk.end(BrokenPromise("says that it has pieces which it then does not give"))
        self._common.plan.update(talk.peer, have)

    async def _ask_have(self, *, wait_s: float = 0.0) -> PieceMap:
        talk = self._talk
        reply = await talk.client.have(
            self._artifact.digest,
            known=talk.held if wait_s else 0,
            wait_s=wait_s,
            # Who follows a download asks often: said once is enough.
            addresses=() if talk.held and not talk.complete else self._common.host.addresses,
            timeout_s=self._common.settings.answer_timeout_s,
        )
        self._common.on_hints(talk.peer, reply.peers)
        have = PieceMap.unpack(self._artifact.piece_count, reply.pieces)
        talk.held, talk.complete = have.held, have.complete
        return have

    async def _first_have(self) -> PieceMap:
        """Ask for the first time. Who is told of a version at the same time as we are may begin a moment later."""
        for left in reversed(range(_BEGINNINGS)):
            try:
                return await self._ask_have()
            except RemoteError as e:
                if e.code != NOT_FOUND or not left:
                    raise
                await anyio.sleep(self._common.settings.greet_first_s)
        raise AssertionError("unreachable")
