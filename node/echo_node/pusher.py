"""Empties the outbox into the coordinator: oldest first, until each submission has its verdicts.

    lane ─┐                ┌─ answered ──► settled
    lane ─┼─ the turn ──► push
    lane ─┘     ▲          └─ not within `SLOW_S` ──┐
                └───────────────────────────────────┘  the next lane may push something else meanwhile

As a rule one submission is on its way at a time. One that stays unanswered holds up nothing: others are pushed beside
it, and when it is given up for now, those that were tried less often go first.
"""

from collections import Counter
from collections.abc import Callable, Collection

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

from echo_node.activity import Activity, Part
from echo_node.backoff import Backoff
from echo_node.link import Link
from echo_node.outbox import Dropped, Entry, Outbox
from echo_swarm.codec import unpack_u32
from echo_swarm.envelope import unseal
from echo_swarm.errors import MalformedMessage, PeerUnreachable, RemoteError, StorageFull
from echo_swarm.trajectory import SUBMISSION_LIMITS, Reason, Submission, Verdict
from echo_swarm.work import Push, PushReply

PUSH_TIMEOUT_S = 60.0
"""For the coordinator's disk, and its answer."""
SLOWEST_BYTES_PER_S = 32 << 10
"""A submission of 8 MiB gets 256 s more: the coordinator waits as long for a frame to arrive."""
SLOW_S = 5.0
"""A push without an answer for so long no longer keeps others waiting."""
LANES = 3
"""Submissions on their way at a time, at most."""
IDLE_S = 30.0
"""How often an idle pusher looks for over-stale work."""
MAX_ODD_ANSWERS = 5
"""Answers without usable verdicts after which a submission is given up, so that it does not block the rest."""


class Pusher:
    """The only reader of the outbox."""

    def __init__(
        self,
        *,
        outbox: Outbox,
        link: Link,
        activity: Activity,
        heard: Callable[[int | None], None],
        lowest_version: Callable[[], int],
        settled: Callable[[], None],
        backoff: Backoff | None = None,
    ) -> None:
        """Describe the pusher.

        Args:
            outbox: what to push.
            link: where to.
            activity: for what people see.
            heard: told the head version in each answer.
            lowest_version: the oldest policy version that is not yet over-stale.
            settled: called whenever a submission has left the outbox.
            backoff: after answers that make no sense.

        """
        self._outbox = outbox
        self._link = link
        self._activity = activity
        self._heard = heard
        self._lowest_version = lowest_version
        self._on_settled = settled
        self._backoff = backoff or Backoff(first_s=0.5, limit_s=15.0)
        self._filled = anyio.Event()
        self._emptied = anyio.Event()
        self._settled = anyio.Event()
        self._turn = anyio.Semaphore(1)
        self._under_way: set[int] = set()
        self._tried: Counter[int] = Counter()
        """Pushes without an answer, by submission."""
        self._odd_answers: Counter[int] = Counter()

    def wake(self) -> None:
        """Tell that something was put into the outbox."""
        self._filled.set()

    async def run(self) -> None:
        """Push for ever. While the outbox cannot be written, which a push begins and ends with, wait for room."""
        async with anyio.create_task_group() as tasks:
            for _ in range(LANES):
                tasks.start_soon(self._push_for_ever, tasks)

    async def _push_for_ever(self, tasks: TaskGroup) -> None:
        while True:
            await self._turn.acquire()
            mine = _Turn(self._turn, tasks)
            try:
                pause_s = await self._push_next(mine)
            except StorageFull as e:
                self._activity.waits(Part.DISK, "room on the disk", str(e))
                pause_s = self._backoff.next_s()
            if pause_s:
                await anyio.sleep(pause_s)
            mine.pass_on()

    async def _push_next(self, mine: "_Turn") -> float:
        """Push what is oldest, or wait for something to push. Returns how long to wait afterwards."""
        self._filled = anyio.Event()
        entry, dropped = await to_thread.run_sync(self._next)
        if dropped:
            self._activity.say(f"dropped {dropped} trajectories that had become too old to be of use")
            self._on_settled()
        if entry is not None and self._link.is_up:
            return await self._push_beside(entry, mine)
        if entry is not None:
            # Looked at again before it is pushed: the outage may have made it over-stale.
            with anyio.move_on_after(IDLE_S):
                await self._link.ready()
            return 0.0
        if not self._under_way:
            self._emptied.set()
            self._emptied = anyio.Event()
        with anyio.move_on_after(IDLE_S):
            await self._filled.wait()
        return 0.0

    async def empty(self) -> None:
        """Wait until all that waits has its verdicts; the caller sets the deadline."""
        while True:
            emptied = self._emptied
            if not await to_thread.run_sync(self._outbox.pending):
                return
            self.wake()
            await emptied.wait()

    async def pushed(self, lease_ids: Collection[bytes]) -> None:
        """Wait until nothing of these leases is in the outbox; the caller sets the deadline."""
        while True:
            settled = self._settled
            if (await to_thread.run_sync(self._outbox.lease_ids)).isdisjoint(lease_ids):
                return
            await settled.wait()

    def _next(self) -> tuple[Entry | None, int]:
        dropped = self._outbox.drop_stale(self._lowest_version())
        entry = self._outbox.oldest(beside={*self._under_way, *self._tried})
        for waiting in sorted(self._tried, key=lambda entry_id: (self._tried[entry_id], entry_id)):
            entry = entry or (None if waiting in self._under_way else self._outbox.get(waiting))
        return entry, dropped

    async def _push_beside(self, entry: Entry, mine: "_Turn") -> float:
        """Push; when no answer comes for a while, let another lane push meanwhile."""
        self._under_way.add(entry.id)
        mine.pass_on_later()
        try:
            return await self._push(entry)
        finally:
            self._under_way.discard(entry.id)
            self._filled.set()  # Who looked in vain meanwhile looks again.

    async def _push(self, entry: Entry) -> float:
        """Push once. Returns how long to wait before the next push."""
        first = await to_thread.run_sync(self._outbox.mark_sent, entry.id)
        timeout_s = PUSH_TIMEOUT_S + len(entry.envelope) / SLOWEST_BYTES_PER_S
        try:
            reply = await self._link.call("push", Push(envelope=entry.envelope), PushReply, timeout_s=timeout_s)
        except PeerUnreachable:
            self._tried[entry.id] += 1
            return 0.0  # The link tells people, and `ready` waits.
        except RemoteError as e:
            return await self._refused(entry, e.code, str(e))
        except MalformedMessage as e:
            return await self._refused(entry, "", str(e))
        self._heard(reply.head_version)
        if not reply.verdicts and reply.retry_after_s > 0:
            if first:
                await to_thread.run_sync(self._outbox.unmark_sent, entry.id)
            self._activity.waits(Part.PUSH, "room in the coordinator's buffer (normal while the trainer is slower)")
            return reply.retry_after_s
        if len(reply.verdicts) != entry.trajectories:
            return await self._refused(entry, "", f"{len(reply.verdicts)} verdicts for {entry.trajectories}")
        await self._settle(entry, reply.verdicts)
        return 0.0

    async def _settle(self, entry: Entry, verdicts: tuple[Verdict, ...]) -> None:
        counts = Counter(verdict.reason.value for verdict in verdicts)
        all_accepted = counts[Reason.ACCEPTED] == entry.trajectories
        tokens = entry.tokens if all_accepted else _tokens_accepted(entry.envelope, verdicts)
        await to_thread.run_sync(lambda: self._outbox.settle(entry.id, counts, tokens=tokens))
        self._succeeded(entry)
        for verdict in verdicts:
            if verdict.reason is not Reason.ACCEPTED:
                self._activity.rejected(verdict.reason.value, verdict.detail)

    async def _refused(self, entry: Entry, code: str, message: str) -> float:
        """Deal with an answer that has no verdicts: final if its code is a verdict on the whole submission."""
        self._odd_answers[entry.id] += code != "unavailable"  # The coordinator's own trouble: it will pass.
        final = code in set(Reason)
        if not final and self._odd_answers[entry.id] < MAX_ODD_ANSWERS:
            self._activity.waits(Part.PUSH, "a usable answer to a push", message)
            return self._backoff.next_s()
        self._activity.say(f"the coordinator refused {entry.trajectories} trajectories: {message}")
        # A submission refused as a whole is counted once by the coordinator, which cannot tell how many were inside.
        counts = {code: 1} if final else {Dropped.UNANSWERED.value: entry.trajectories}
        await to_thread.run_sync(lambda: self._outbox.settle(entry.id, counts))
        self._succeeded(entry)
        return 0.0

    def _succeeded(self, entry: Entry) -> None:
        self._settled.set()
        self._settled = anyio.Event()
        self._on_settled()
        del self._odd_answers[entry.id], self._tried[entry.id]  # Also when they are not there.
        self._backoff.reset()
        self._activity.done(Part.PUSH)


class _Turn:
    """One lane's turn to push, given up once."""

    def __init__(self, turn: anyio.Semaphore, tasks: TaskGroup) -> None:
        self._turn: anyio.Semaphore | None = turn
        self._tasks = tasks
        self._later = anyio.CancelScope()

    def pass_on(self) -> None:
        """Let the next lane push."""
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.release()
        self._later.cancel()

    def pass_on_later(self) -> None:
        """The same, in `SLOW_S` seconds."""
        self._tasks.start_soon(self._wait)

    async def _wait(self) -> None:
        with self._later:
            await anyio.sleep(SLOW_S)
            self.pass_on()


def _tokens_accepted(envelope: bytes, verdicts: tuple[Verdict, ...]) -> int:
    submission = unseal(envelope, Submission, SUBMISSION_LIMITS).message
    return sum(
        len(unpack_u32(trajectory.token_ids))
        for trajectory, verdict in zip(submission.trajectories, verdicts, strict=True)
        if verdict.reason is Reason.ACCEPTED
    )
