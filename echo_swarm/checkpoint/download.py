"""Getting the missing pieces of one artifact from whoever has them.

    discover ──► one `Exchange` per source ──► up to `window` requests each ──► thread: verify, write
      ▲  ▲             │ PiecePlan says what to ask (the coordinator chooses itself)  │
      │  └── failed ───┴──────────────── pieces, wake-ups ◄───────────────────────────┘
      └── who else is after it: sources say, and whoever asked this peer

All conversations run at once, so a slow, silent or lying source costs its own time only; the total is no sum of
deadlines. The first local fault (full disk) ends everything.
"""

from collections.abc import Awaitable, Callable, Sequence
from random import Random

import anyio
from anyio.abc import TaskGroup

from echo_swarm.checkpoint.blob import PeerHint
from echo_swarm.checkpoint.conversation import Conversation, MadeRoom, fault_reason, note_silent
from echo_swarm.checkpoint.exchange import Common, Exchange
from echo_swarm.checkpoint.fetch_plan import PiecePlan
from echo_swarm.checkpoint.fetch_report import FetchReport, FetchSettings, Grudges, SourcesExhausted
from echo_swarm.checkpoint.hints import Hints
from echo_swarm.checkpoint.interest import InterestBook
from echo_swarm.checkpoint.mirror import Mirrors, open_source
from echo_swarm.checkpoint.partial import PartialArtifact
from echo_swarm.checkpoint.rate import RateLimit
from echo_swarm.checkpoint.sources import Providers, SourceBook
from echo_swarm.errors import EchoError, PeerFault, PeerUnreachable, RemoteError
from echo_swarm.identity import PeerId
from echo_swarm.transport.base import Host

_LOOK_S = 0.1
"""How often it is looked who asked us, while there are few sources."""
_RARELY_S = 0.5
"""The same when there are enough."""
_MOST_GREET_S = 60.0
"""Between two searches, at most."""
_PROVIDERS_TIMEOUT_S = 10.0
_FIRST_SEARCH_S = 0.5
"""The coordinator names who else is after an artifact. Only where that is not enough by now, providers are searched."""


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
        mirrors: Mirrors | None = None,
    ) -> None:
        self._host = host
        self._partial = partial
        self._artifact = partial.artifact
        self._sources = sources
        self._settings = settings
        self._grudges = grudges
        self._report = report
        self._interest = interest
        self._mirrors = mirrors
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
        self._common = Common(
            host=host,
            partial=partial,
            plan=self._plan,
            book=self._book,
            settings=settings,
            report=report,
            rate=rate,
            on_piece=on_piece,
            on_hints=self._follow,
            end=self._end,
        )
        self._talks: dict[PeerId, Conversation] = {}
        self._hints = Hints(host, settings.near, self._reached)
        self._over = anyio.Event()
        self._source_ended = anyio.Event()
        """Or there is another."""
        self._searching = self._searched = False
        self._greet_s = settings.greet_s
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

    async def _discover(self) -> None:
        """Keep conversations going with as many sources as allowed, until none is left."""
        searched_s = float("-inf")
        if callable(self._sources) and self._coordinator is not None:
            self._meet([self._coordinator])
            searched_s = anyio.current_time() + _FIRST_SEARCH_S - self._settings.providers_every_s
        starved_since_s: float | None = None
        self._searched = not callable(self._sources)
        patience_s = 0.0 if self._searched else self._settings.starve_s
        async with anyio.create_task_group() as tasks:
            while True:
                now_s = anyio.current_time()
                if not self._searching and now_s - searched_s >= self._search_every_s:
                    searched_s = now_s
                    if self._has_enough:  # It is looked for others more and more rarely.
                        self._greet_s = min(_MOST_GREET_S, 2 * self._greet_s)
                    if callable(self._sources):
                        tasks.start_soon(self._search, self._sources)
                    else:
                        self._meet(self._sources)
                self._know(self._interest.connected(self._artifact.digest, now_s), now_s)
                for peer in self._book.start(now_s):
                    tasks.start_soon(self._ask, peer)
                if talk := self._talks.get(self._book.gives_way(now_s) or PeerId("")):
                    talk.end(MadeRoom("gave nothing for a while, and others were waiting to be asked"))
                exhausted = self._book.exhausted
                # Peers that wait for each other's next piece would wait for ever.
                starved = exhausted or not (
                    self._plan.has_work or self._common.unanswered or self._book.has_untried(now_s)
                )
                starved_since_s = (starved_since_s or now_s) if starved and self._searched else None
                limit_s = patience_s if exhausted else self._settings.starve_s
                if starved_since_s is not None and now_s - starved_since_s >= limit_s:
                    return self._end(SourcesExhausted(self._report, self._partial.missing_bytes))
                self._source_ended = anyio.Event()
                with anyio.move_on_after(_LOOK_S if self._book.active < self._settings.enough_sources else _RARELY_S):
                    await self._source_ended.wait()

    @property
    def _search_every_s(self) -> float:
        """How long it takes until the callable is asked for providers again."""
        if self._book.active == 0:
            return self._settings.refresh_s
        return self._greet_s if self._has_enough else self._settings.providers_every_s

    @property
    def _has_enough(self) -> bool:
        """Whether there are sources enough, and something to ask of them."""
        return self._book.active >= self._settings.enough_sources and self._plan.has_work

    async def _search(self, providers: Callable[[], Awaitable[Sequence[PeerId]]]) -> None:
        """Ask who has the artifact."""
        self._searching = True
        with anyio.move_on_after(_PROVIDERS_TIMEOUT_S):
            self._meet(await providers())
        self._searching, self._searched = False, True
        self._source_ended.set()

    def _meet(self, peers: Sequence[PeerId]) -> None:
        now_s = anyio.current_time()
        self._know(peers, now_s)
        if self._mirrors is not None:
            self._know(self._mirrors.names(), now_s)
            for mirror, why in self._mirrors.resting().items():
                self._report.failures.setdefault(mirror, why)

    def _know(self, peers: Sequence[PeerId], now_s: float) -> None:
        for peer in peers:
            if not self._grudges.avoids(peer, self._report, now_s) and peer != self._host.peer_id:
                self._book.know(peer)

    async def _ask(self, peer: PeerId) -> None:
        """Talk to one source until it fails or is told to stop."""
        try:
            async with open_source(self._host, self._mirrors, peer, self._artifact) as client:
                talk = self._talks[peer] = Conversation(client)
                talk.offers = peer == self._coordinator
                with talk.scope:
                    await Exchange(talk, self._common).run()
                if talk.fault is not None:
                    raise talk.fault
        except (PeerUnreachable, RemoteError) as e:
            self._report.failures[peer] = str(e)
            self._report.retries += 1
            self._blame(peer, e)
            self._book.failed(peer, anyio.current_time())
        except PeerFault as e:
            self._report.liars[peer] = str(e)
            self._blame(peer, e)
            self._grudges.add(peer, str(e), anyio.current_time())
            self._book.lied(peer)
        finally:
            self._talks.pop(peer, None)
            self._plan.remove(peer)
            self._source_ended.set()
            self._common.wake()

    def _blame(self, peer: PeerId, error: EchoError) -> None:
        talk = self._talks.get(peer)
        reason = fault_reason(error, met=talk is not None and talk.held > 0)
        if reason is not None:
            self._report.blame(peer, reason)

    def _follow(self, teller: PeerId, hints: Sequence[PeerHint]) -> None:
        for hint in hints:
            if self._grudges.reason(PeerId(hint.peer), anyio.current_time()) is None:
                self._hints.follow(teller, PeerId(hint.peer), hint.addresses, self._tasks)

    def _reached(self, peer: PeerId) -> None:
        self._book.know(peer)
        self._source_ended.set()
