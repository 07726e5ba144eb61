"""The node's work: leases in, trajectories out.

    coordinator ──lease──► _ask ──► LeaseBook ──► Sampler ──► backend child
                            ▲ asks for places + prefetch − held│
                            │                                  ▼ completions
                            └──── nothing while no version     Harvest ──flush──► outbox ──► pusher ──► coordinator
                                  is loaded or the outbox      (lease complete, 32 trajectories, or FLUSH_S)
                                  is half full

A flush comes before each release, so that members already done are never handed back. Deadlines are watched in
`_watch_deadlines`; a backend that fails hands all its leases back and is started again by its restart policy.
"""

from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import anyio
from anyio import to_thread

from echo_node.activity import Activity, Part, Rate
from echo_node.backends.base import Backend, ScoreRequest
from echo_node.backends.restart import RestartPolicy
from echo_node.backends.self_test import SelfTestFailed
from echo_node.backoff import Backoff
from echo_node.bare_errors import leaves
from echo_node.harvest import MAX_PER_SUBMISSION, Harvest
from echo_node.lease_book import LeaseBook, is_sound
from echo_node.link import Link
from echo_node.outbox import Outbox
from echo_node.prober import Scored, score_or_refusal
from echo_node.pusher import Pusher
from echo_node.sampler import Finished, Policies, Refused, Sampler
from echo_node.swaps import Swaps
from echo_node.waits import describe_wait
from echo_swarm.clock import Clock
from echo_swarm.errors import BackendFailed, MalformedMessage, PeerUnreachable, RemoteError
from echo_swarm.work import BackendReport, LeaseReply, LeaseRequest, Release, Released, WaitReason

LEASE_WAIT_S = 10.0
"""Long poll: how long the coordinator may hold a request for work."""
FLUSH_S = 0.5
"""Longest time that a finished trajectory waits for siblings."""
SETTLE_S = 10.0
"""How long a release waits for finished members of the same lease to be pushed before it."""
FAREWELL_S = 2.0
MIN_PAUSE_S = 0.1
"""Between two requests that brought nothing, so that an odd coordinator cannot make us spin."""

OpenBackend = Callable[[], AbstractAsyncContextManager[Backend]]


class Worker:
    """Everything between a lease and the outbox."""

    def __init__(
        self,
        *,
        book: LeaseBook,
        link: Link,
        policies: Policies,
        harvest: Harvest,
        outbox: Outbox,
        pusher: Pusher,
        open_backend: OpenBackend,
        restarts: RestartPolicy,
        clock: Clock,
        activity: Activity,
        swaps: Swaps,
        heard: Callable[[int | None], None],
        run_finished: Callable[[], None],
    ) -> None:
        self._book = book
        self._link = link
        self._policies = policies
        self._harvest = harvest
        self._outbox = outbox
        self._pusher = pusher
        self._open_backend = open_backend
        self._restarts = restarts
        self._clock = clock
        self._activity = activity
        self._swaps = swaps
        self._no_room = partial(activity.waits, Part.DISK, "room on the disk")
        self._heard = heard
        self._run_finished = run_finished
        self._sampler: Sampler | None = None
        self._leaving = False
        self._unfinished: list[bytes] = []
        self._asking = anyio.CancelScope()
        self._changed = anyio.Event()
        self._ripe = anyio.Event()
        self._releases: list[tuple[list[bytes], str, bool]] = []
        self._release_due = anyio.Event()
        self._rate = Rate(clock)
        self.tokens = 0
        """Completion tokens made since the start."""
        self.started = anyio.Event()
        """Set once a backend runs."""
        self._last_report: BackendReport | None = None

    @property
    def report(self) -> BackendReport | None:
        """Of the backend that runs, or ran last. Its precision may change with a load: a GGUF file brings its own."""
        return self._last_report if self._sampler is None else self._sampler.report

    @property
    def loaded(self) -> int | None:
        """The version that samples now."""
        return None if self._sampler is None else self._sampler.loaded

    @property
    def tokens_per_s(self) -> float:
        """Over about the last half minute."""
        return self._rate.per_s()

    @property
    def under_way(self) -> tuple[int, int]:
        """Completions that are being sampled, and finished ones that are not in the outbox yet."""
        return self._book.running, self._harvest.unstored

    def held_leases(self) -> set[bytes]:
        """Return the leases of which something is still to be done or to be pushed."""
        return set(self._book.ids) | self._outbox.lease_ids()

    def needed_versions(self) -> set[int]:
        """Return the versions that leases wait to be sampled with."""
        return self._book.missing(self._policies.newest, ())

    def wake(self) -> None:
        """Tell that there are other versions, or that there is room in the outbox."""
        self._notify()

    def renewed(self, named: Collection[bytes], expired: Collection[bytes], at_s: float) -> None:
        """Take the answer to a beat: the leases that it named hold anew, except those that no longer do."""
        self._book.renew(named, at_s)
        if self._book.drop(expired):
            self._notify()

    async def score(self, request: ScoreRequest) -> Scored:
        """Have the backend score completions. Raises BackendFailed while none has a version loaded."""
        sampler = self._sampler
        if sampler is None or sampler.loaded is None:
            raise BackendFailed("the backend has no version loaded")
        return Scored(scores=await score_or_refusal(sampler.score, request), report=sampler.report)

    async def run(self) -> None:
        """Work for ever. Raises BackendFailed when the backend cannot be kept alive."""
        async with anyio.create_task_group() as tasks:
            for part in (self._supervise, self._ask_until_leaving, self._flush_often, self._watch_deadlines):
                tasks.start_soon(part)
            tasks.start_soon(self._send_releases)

    async def wind_down(self, *, grace_s: float) -> None:
        """Take no more work, let what runs finish and be judged, each within `grace_s`; `run` goes on. StorageFull."""
        self._leaving = True
        self._asking.cancel()
        self._unfinished = self._book.drop_waiting()
        with anyio.move_on_after(grace_s):
            while self._book.running and self._sampler is not None:
                await self._changed.wait()
        with anyio.move_on_after(grace_s):
            await self._harvest.flush_patiently(self._no_room)
        await self._harvest.flush()
        with anyio.move_on_after(grace_s):
            await self._link.ready()
            await self._pusher.empty()

    async def farewell(self) -> None:
        """Hand everything else back and say that the node leaves, within FAREWELL_S."""
        rest = self._unfinished + self._book.drop(self._book.ids)
        if self._link.is_up:
            with anyio.move_on_after(FAREWELL_S):
                await self._release(rest, "leaving", failed=False, leaving=True)

    # Backend.

    async def _supervise(self) -> None:
        while True:
            failure = BackendFailed("it ended")
            try:
                async with self._started() as sampler:
                    await sampler.run()
            except* BackendFailed as group:
                failure = leaves(group)[0]
            if isinstance(failure, SelfTestFailed):
                raise SelfTestFailed(f"this node does not join: {failure}")
            self._give_back(self._book.drop(self._book.ids), f"the backend failed: {failure}", failed=False)
            delay_s = self._restarts.failed(self._clock.monotonic_s(), str(failure), sampled=self.tokens > 0)
            if delay_s is None:
                raise BackendFailed(self._restarts.verdict(failure))
            self._activity.waits(Part.BACKEND, "the backend to start again", str(failure))
            await anyio.sleep(delay_s)

    @asynccontextmanager
    async def _started(self) -> AsyncGenerator[Sampler]:
        async with self._open_backend() as backend:
            self._last_report = backend.report
            self.started.set()
            self._sampler = Sampler(
                backend=backend,
                book=self._book,
                policies=self._policies,
                clock=self._clock,
                activity=self._activity,
                swaps=self._swaps,
                finished=self._on_finished,
                refused=self._on_refused,
                swapped=self._notify,
            )
            self._notify()
            try:
                yield self._sampler
            finally:
                self._last_report, self._sampler = backend.report, None

    def _on_finished(self, done: Finished) -> None:
        count = len(done.completion.token_ids)
        self.tokens += count
        self._rate.add(count)
        self._harvest.add(done.lease, done.member, done.completion, done.report)
        if self._book.is_complete(done.lease.lease_id) or len(self._harvest) >= MAX_PER_SUBMISSION:
            self._ripe.set()
        self._notify()

    def _on_refused(self, refused: Refused) -> None:
        cause = f"the backend refused it: {refused.reason}"
        self._activity.rejected("refused by the backend", refused.reason)
        self._give_back(self._book.drop([refused.lease.lease_id]), cause, failed=refused.blame_prompt)

    # Asking for work.

    async def _ask_until_leaving(self) -> None:
        backoff = Backoff(first_s=0.5, limit_s=15.0)
        with self._asking:
            while not self._leaving:
                await self._link.ready()
                changed = self._changed
                wanted = await self._wanted()
                if not wanted:
                    await changed.wait()
                    continue
                try:
                    pause_s = await self._ask(wanted)
                    backoff.reset()
                except PeerUnreachable:
                    continue  # The link tells people.
                except (RemoteError, MalformedMessage) as e:
                    self._activity.waits(Part.WORK, "a usable answer to a request for work", str(e))
                    pause_s = backoff.next_s()
                await anyio.sleep(pause_s)

    async def _wanted(self) -> int:
        """Return how many completions to ask for; 0 while none could be begun soon."""
        backlogged = await to_thread.run_sync(self._outbox.backlogged)
        if backlogged or self._sampler is None or self._sampler.loaded is None or self._policies.left_behind:
            return 0
        batch, places = self._sampler.report.batch, self._sampler.places
        if self._harvest.unstored > max(batch, MAX_PER_SUBMISSION):
            # The disk is slower than the backend; how full the outbox is cannot be told before it has caught up.
            return 0
        prefetch = max(1, batch // 4)
        wanted = places + prefetch - self._book.running - self._book.waiting
        # Not one request for each completion: a quarter of the batch at once, out of the prefetch.
        return wanted if wanted >= prefetch else 0

    async def _ask(self, wanted: int) -> float:
        request = LeaseRequest(
            capacity=wanted,
            held_version=self._policies.newest,
            tokens_per_s=self.tokens_per_s,
            wait_s=LEASE_WAIT_S,
        )
        reply = await self._link.call("lease", request, LeaseReply, timeout_s=LEASE_WAIT_S + 20)
        self._heard(reply.head_version)
        if reply.leases:
            self._activity.done(Part.WORK)
            self._book.add(filter(is_sound, reply.leases), self._clock.monotonic_s())
            broken = [lease.lease_id for lease in reply.leases if not is_sound(lease)]
            self._give_back(broken, "the prompt is empty or no list of token ids", failed=True)
            self._notify()
            return MIN_PAUSE_S if broken else 0.0
        if reply.wait_reason is WaitReason.FINISHED:
            self._run_finished()
        self._activity.waits(Part.WORK, describe_wait(reply.wait_reason))
        return max(reply.retry_after_s, MIN_PAUSE_S)

    # Handing in and handing back.

    async def _flush_often(self) -> None:
        while True:
            with anyio.move_on_after(FLUSH_S):
                await self._ripe.wait()
            self._ripe = anyio.Event()
            await self._flush()

    async def _flush(self) -> None:
        complete = [lease_id for lease_id in self._book.ids if self._book.is_complete(lease_id)]
        await self._harvest.flush_patiently(self._no_room)
        self._activity.done(Part.DISK)
        if self._book.drop(complete):
            self._notify()

    async def _watch_deadlines(self) -> None:
        while True:
            now_s = self._clock.monotonic_s()
            late = self._book.drop(self._book.overdue(now_s))
            if late:
                self._activity.say(f"{len(late)} leases ran out before they were done; handed back")
                self._give_back(late, "out of time", failed=False)
            vain = self._book.drop(self._book.in_vain(self._policies.newest, self._policies.refused))
            self._give_back(vain, "they need a version that the backend cannot use", failed=False)
            deadline_s = self._book.next_deadline_s()
            wait_s = 1.0 if deadline_s is None else min(1.0, max(0.01, deadline_s - now_s))
            await anyio.sleep(wait_s)

    def _give_back(self, lease_ids: list[bytes], cause: str, *, failed: bool) -> None:
        if lease_ids:
            self._releases.append((lease_ids, cause, failed))
            self._release_due.set()
            self._notify()

    async def _send_releases(self) -> None:
        while True:
            await self._release_due.wait()
            self._release_due = anyio.Event()
            releases, self._releases = self._releases, []
            for lease_ids, cause, failed in releases:
                await self._harvest.flush_patiently(self._no_room)
                with anyio.move_on_after(SETTLE_S):
                    await self._pusher.pushed(lease_ids)
                await self._release(lease_ids, cause, failed=failed, leaving=False)

    async def _release(self, lease_ids: list[bytes], cause: str, *, failed: bool, leaving: bool) -> None:
        """Tell the coordinator, once. If it does not hear it, the leases run out by themselves."""
        release = Release(lease_ids=tuple(lease_ids), cause=cause[:256], leaving=leaving, failed=failed)
        try:
            await self._link.call("release", release, Released)
        except (PeerUnreachable, RemoteError, MalformedMessage) as e:
            self._activity.say(f"{len(lease_ids)} leases could not be handed back ({e}); they run out by themselves")

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
        if self._sampler is not None:
            self._sampler.wake()
