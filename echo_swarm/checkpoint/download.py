"""Getting the missing pieces of one artifact from whoever has them.

    discover ──► one conversation per source ──► up to `window` requests each ──► thread: verify, write
      ▲  ▲             │ PiecePlan says what to ask (the coordinator chooses itself)  │
      │  └── failed ───┴──────────────── pieces, wake-ups ◄───────────────────────────┘
      └── who else is after it: sources say, and whoever asked this peer

All conversations run at once, so a slow, silent or lying source costs its own time only; the total is no sum of
deadlines. The first local fault (full disk) ends everything.
"""

from collections.abc import Callable, Sequence
from random import Random

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from echo_swarm.checkpoint.blob import BUSY, NOT_FOUND, BlobClient
from echo_swarm.checkpoint.conversation import MAX_BUSY, Conversation, note_silent
from echo_swarm.checkpoint.fetch_plan import PiecePlan
from echo_swarm.checkpoint.fetch_report import FetchReport, FetchSettings, Grudges, SourcesExhausted
from echo_swarm.checkpoint.hints import Hints
from echo_swarm.checkpoint.interest import InterestBook
from echo_swarm.checkpoint.partial import PartialArtifact
from echo_swarm.checkpoint.pieces import PieceMap
from echo_swarm.checkpoint.rate import RateLimit
from echo_swarm.checkpoint.sources import Providers, SourceBook
from echo_swarm.errors import EchoError, LocalFault, MalformedMessage, PeerFault, PeerUnreachable, RemoteError
from echo_swarm.identity import PeerId
from echo_swarm.transport.base import Host

_IDLE_S = 0.25
"""A source that has nothing for us is looked at again after this time, or when a piece arrives."""
_BEGINNINGS = 5
"""Times that a source may have nothing yet when it is asked first."""
_LOOK_S = 0.1
"""How often it is looked who asked us."""
_MAX_STRIKES = 3
"""Times that a source may say it has a piece and then not give it. More than one: a piece can move while we ask."""
_PROVIDERS_TIMEOUT_S = 10.0


class Download:
    """One go at completing a `PartialArtifact`."""

    def __init__(
        self,
        *,
        host: Host,
        partial: PartialArtifact,
        sources: Providers,
        coordinator: PeerId | None,
        settings: FetchSettings,
        grudges: Grudges,
        random: Random,
        report: FetchReport,
        on_piece: Callable[[PeerId, int], None],
        interest: InterestBook,
        rate: RateLimit,
    ) -> None:
        self._host = host
        self._partial = partial
        self._artifact = partial.artifact
        self._sources = sources
        self._settings = settings
        self._grudges = grudges
        self._report = report
        self._on_piece = on_piece
        self._interest = interest
        self._rate = rate
        self._coordinator = coordinator
        in_memory = max(1, settings.max_in_flight_bytes // self._artifact.piece_bytes)
        self._plan = PiecePlan(
            partial.have,
            coordinator=coordinator,
            window=settings.window,
            max_in_flight=min(settings.max_in_flight, in_memory),
            random=random,
        )
        self._book = SourceBook.of(settings, coordinator)
        self._talks: dict[PeerId, Conversation] = {}
        self._unanswered = 0
        """Sources that have not said yet what they have."""
        self._hints = Hints(host, self._reached)
        self._over = anyio.Event()
        self._changed = anyio.Event()
        self._source_ended = anyio.Event()
        self._fault: EchoError | None = None
        self._tasks: TaskGroup

    async def run(self) -> None:
        """Return when nothing is missing.

        Raises:
            SourcesExhausted: nobody is left to ask.
            LocalFault: a piece cannot be written.

        """
        if self._partial.have.complete:
            return
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._discover)
            await self._over.wait()
            tasks.cancel_scope.cancel()
        if self._fault is not None:
            raise self._fault

    def _end(self, fault: EchoError | None) -> None:
        if not self._over.is_set():
            self._fault = fault
            self._over.set()
            note_silent(self._talks.values(), self._report, self._grudges, self._coordinator)

    # Who is asked.

    async def _discover(self) -> None:
        """Keep conversations going with as many sources as allowed, until none is left."""
        next_look_s = float("-inf")
        starved_since_s: float | None = None
        patience_s = self._settings.starve_s if callable(self._sources) else 0.0
        async with anyio.create_task_group() as tasks:
            while True:
                now_s = anyio.current_time()
                if now_s >= next_look_s:
                    await self._learn(now_s)
                    idle = self._book.active == 0
                    next_look_s = now_s + (self._settings.refresh_s if idle else self._settings.providers_every_s)
                self._know(self._interest.connected(self._artifact.digest, now_s), now_s)
                for peer in self._book.start(now_s):
                    tasks.start_soon(self._ask, peer)
                if talk := self._talks.get(self._book.gives_way(now_s) or PeerId("")):
                    talk.end(PeerUnreachable("gave nothing for a while, and others were waiting to be asked"))
                exhausted = self._book.exhausted
                # Peers that wait for each other's next piece would wait for ever.
                starved = exhausted or not (self._plan.has_work or self._unanswered or self._book.has_untried(now_s))
                starved_since_s = (starved_since_s or now_s) if starved else None
                limit_s = patience_s if exhausted else self._settings.starve_s
                if starved_since_s is not None and now_s - starved_since_s >= limit_s:
                    return self._end(SourcesExhausted(self._report, self._partial.missing_bytes))
                self._source_ended = anyio.Event()
                with anyio.move_on_after(_LOOK_S):
                    await self._source_ended.wait()

    async def _learn(self, now_s: float) -> None:
        peers = self._sources
        if callable(peers):
            with anyio.move_on_after(_PROVIDERS_TIMEOUT_S) as scope:
                peers = await peers()
            if scope.cancelled_caught or callable(peers):
                return
        self._know(peers, now_s)

    def _know(self, peers: Sequence[PeerId], now_s: float) -> None:
        for peer in peers:
            if not self._grudges.avoids(peer, self._report, now_s) and peer != self._host.peer_id:
                self._book.know(peer)

    async def _ask(self, peer: PeerId) -> None:
        """Talk to one source until it fails or is told to stop."""
        try:
            async with BlobClient(self._host, peer) as client:
                talk = self._talks[peer] = Conversation(client)
                talk.offers = peer == self._coordinator
                with talk.scope:
                    self._unanswered += 1
                    try:
                        self._plan.update(peer, await talk.answer(self._first_have(talk)))
                    finally:
                        self._unanswered -= 1
                    await self._exchange(talk)
                if talk.fault is not None:
                    raise talk.fault
        except (PeerUnreachable, RemoteError) as e:
            self._report.failures[peer] = str(e)
            self._report.retries += 1
            self._book.failed(peer, anyio.current_time())
        except PeerFault as e:
            self._report.liars[peer] = str(e)
            self._grudges.add(peer, str(e), anyio.current_time())
            self._book.lied(peer)
        finally:
            self._talks.pop(peer, None)
            self._plan.remove(peer)
            self._source_ended.set()
            self._wake()

    # What is asked.

    async def _exchange(self, talk: Conversation) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._refresh, talk)
            while True:
                now_s = anyio.current_time()
                pause_s = max(talk.busy_until_s - now_s, self._rate.backlog_s())
                index = None if pause_s > 0 else await self._next(talk, now_s, tasks)
                if index is not None:
                    # Before any other conversation takes its turn.
                    self._rate.charge(self._artifact.piece_length(index))
                    tasks.start_soon(self._request, talk, index)
                    continue
                with anyio.move_on_after(min(_IDLE_S, pause_s) if pause_s > 0 else _IDLE_S):
                    await self._changed.wait()

    async def _next(self, talk: Conversation, now_s: float, tasks: TaskGroup) -> int | None:
        """Return the piece to ask of a source now."""
        if not talk.offers:
            return self._plan.take(talk.peer, now_s)
        if not talk.choosing and 2 * len(talk.offered) <= self._plan.window(talk.peer):
            # While some are left, so that no time passes between them and the next ones.
            talk.choosing = True
            tasks.start_soon(self._ask_offer, talk)
        while talk.offered:
            index = talk.offered[-1]
            if self._plan.claim(talk.peer, index, now_s):
                return talk.offered.pop()
            if self._plan.is_full(talk.peer):
                return None
            talk.offered.pop()
        return self._plan.take_late(talk.peer, now_s)

    async def _ask_offer(self, talk: Conversation) -> None:
        wanted, count = self._plan.wanted(talk.peer, talk.offered)
        try:
            if count:
                timeout_s = self._settings.answer_timeout_s
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
            self._wake()

    async def _refresh(self, talk: Conversation) -> None:
        """Follow what a source has, and whom it knows of."""
        settings = self._settings
        pause_s = settings.greet_first_s if talk.complete else 0.0
        while True:
            await anyio.sleep(pause_s)
            before = talk.held
            try:
                have = await self._ask_have(talk, wait_s=settings.news_wait_s)
            except (PeerUnreachable, PeerFault) as e:
                return talk.end(e)
            if have.held != before:
                self._plan.update(talk.peer, have)
                self._wake()
            if have.complete:
                pause_s = min(settings.greet_s, 2 * max(pause_s, settings.greet_first_s))
            elif have.held <= before:
                pause_s = settings.refresh_s
            else:
                # News is urgent only while there is little to ask for.
                pause_s = settings.refresh_s if self._plan.stock(talk.peer) > settings.window else 0.0

    async def _request(self, talk: Conversation, index: int) -> None:
        try:
            await self._fetch_piece(talk, index)
        except RemoteError as e:
            await self._refused(talk, index, e)
        except (PeerUnreachable, PeerFault) as e:
            talk.end(e)
        except LocalFault as e:
            self._end(e)
        finally:
            self._plan.settle(talk.peer, index, anyio.current_time())
            self._wake()
        if self._partial.have.complete:
            self._end(None)

    async def _fetch_piece(self, talk: Conversation, index: int) -> None:
        length = self._artifact.piece_length(index)
        # With a full window each request waits for the others of the same peer.
        slowest_s = self._settings.window * length / self._settings.min_bytes_per_s
        timeout_s = self._settings.answer_timeout_s + slowest_s
        try:
            data = await talk.answer(talk.client.piece(self._artifact.digest, index, timeout_s=timeout_s))
        except BaseException:
            self._rate.refund(length)  # Nothing came: others may ask for as much.
            raise
        try:
            fresh = await anyio.to_thread.run_sync(self._partial.write, index, data)
        except MalformedMessage:
            self._report.wasted_bytes += len(data)
            raise
        if not fresh:
            self._report.wasted_bytes += len(data)
            return
        self._report.bytes_by_source[talk.peer] = self._report.bytes_by_source.get(talk.peer, 0) + length
        self._book.delivered(talk.peer, anyio.current_time())
        talk.busy = 0
        self._on_piece(talk.peer, length)

    async def _refused(self, talk: Conversation, index: int, error: RemoteError) -> None:
        """Decide what an error frame means: wait, look again at what the source has, or stop."""
        if error.code == BUSY and talk.busy < MAX_BUSY:
            return talk.rest(self._settings.retry_s)
        if error.code != NOT_FOUND:
            return talk.end(error)
        try:
            have = await self._ask_have(talk)
        except (PeerUnreachable, PeerFault) as e:
            return talk.end(e)
        talk.strikes += index in have
        if talk.strikes >= _MAX_STRIKES:
            talk.end(MalformedMessage("says that it has pieces which it then does not give"))
        self._plan.update(talk.peer, have)

    async def _ask_have(self, talk: Conversation, *, wait_s: float = 0.0) -> PieceMap:
        reply = await talk.client.have(
            self._artifact.digest,
            known=talk.held if wait_s else 0,
            wait_s=wait_s,
            # Who follows a download asks often: said once is enough.
            addresses=() if talk.held and not talk.complete else self._host.addresses,
            timeout_s=self._settings.answer_timeout_s,
        )
        for hint in reply.peers:
            if self._grudges.reason(PeerId(hint.peer), anyio.current_time()) is None:
                self._hints.follow(talk.peer, PeerId(hint.peer), hint.addresses, self._tasks)
        have = PieceMap.unpack(self._artifact.piece_count, reply.pieces)
        talk.held, talk.complete = have.held, have.complete
        return have

    async def _first_have(self, talk: Conversation) -> PieceMap:
        """Ask for the first time. Who is told of a version at the same time as we are may begin a moment later."""
        for left in reversed(range(_BEGINNINGS)):
            try:
                return await self._ask_have(talk)
            except RemoteError as e:
                if e.code != NOT_FOUND or not left:
                    raise
                await anyio.sleep(self._settings.greet_first_s)
        raise AssertionError("unreachable")

    def _reached(self, peer: PeerId) -> None:
        self._book.know(peer)
        self._source_ended.set()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
