"""Batches out, updates in: what the trainer consumes and the ledger of what it did.

The third guard of staleness stands here: a member older than `max_staleness` at the moment of consumption is handed
over as `aged` (its reward counts in the baseline, none of its tokens in a loss term).
"""

from collections.abc import Iterable
from sqlite3 import Connection

from echo_coordinator.state import retention, rows
from echo_coordinator.state.batch import Batch, BatchGroup, BatchMember, Event, UpdateRecord, WaitState
from echo_coordinator.state.core import RunCore
from echo_coordinator.state.counters import LAG, WORK
from echo_coordinator.state.groups import DropCause, Group, GroupState, SlotState
from echo_coordinator.state.rows import StoredTrajectory
from echo_coordinator.state.selection import Situation
from echo_coordinator.state.staleness import staleness


class Updates:
    """The trainer's side of the buffer."""

    def __init__(self, core: RunCore) -> None:
        self._core = core

    @property
    def count(self) -> int:
        """Number of the newest committed update, 0 before the first."""
        return self._core.unsaved.update_no

    async def take_batch(self) -> Batch | WaitState:
        """Return the next batch, or what it waits for. A batch ends in `commit` or `requeue`."""
        core = self._core
        core.close(core.selector.drop_stale(core.groups, core.versions.trained))
        chosen = [] if core.paused else core.selector.take(core.groups)
        if not chosen:
            return core.selector.waiting(core.groups, self._situation(), core.clock.monotonic_s())
        keys = [(group.group_id, member) for group in chosen for member in group.members(SlotState.SCORED)]
        try:
            stored = await core.committer.execute(lambda db: rows.load_trajectories(db, keys))
        except BaseException:
            for group in chosen:
                group.state = GroupState.READY
            raise
        version = core.versions.trained
        return Batch(version=version, groups=tuple(self._batch_group(group, stored, version) for group in chosen))

    async def batch_of(self, group_ids: Iterable[int]) -> Batch:
        """Return the batch that the trainer has already consumed, to write the ledger's line after a crash."""
        core = self._core
        chosen = [g for g in map(core.groups.by_id.get, group_ids) if g and g.state is GroupState.READY]
        keys = [(group.group_id, member) for group in chosen for member in group.members(SlotState.SCORED)]
        stored = await core.committer.execute(lambda db: rows.load_trajectories(db, keys))
        for group in chosen:
            group.state = GroupState.TRAINING
        version = core.versions.trained
        return Batch(version=version, groups=tuple(self._batch_group(group, stored, version) for group in chosen))

    def requeue(self, batch: Batch) -> None:
        """Make the groups of a batch ready again: its update did not happen."""
        for group in batch.groups:
            held = self._core.groups.by_id.get(group.group_id)
            if held is not None and held.state is GroupState.TRAINING:
                held.state = GroupState.READY
        self._core.changed.notify()

    async def commit(
        self,
        batch: Batch,
        *,
        new_version: int,
        checkpoint: str,
        metrics: dict[str, object],
        artifact_digests: Iterable[bytes] = (),
    ) -> UpdateRecord:
        """Write in one transaction: the ledger's next line, what it consumed, lags, and (if given) the publication.

        Without `artifact_digests` the version counts as trained but not published, `publish` follows; after a crash
        in between, `RunCore.versions.lag` is 1.
        """
        core = self._core
        record = UpdateRecord(
            update_no=self.count + 1,
            new_version=new_version,
            checkpoint=checkpoint,
            committed_at=core.clock.wall_s(),
            metrics=metrics,
        )
        digests = frozenset(artifact_digests)
        counts = _counts(batch)

        def job(db: Connection) -> None:
            rows.insert_update(db, record, [group.group_id for group in batch.groups])
            retention.prune(db, record.update_no - core.settings.retain_updates)
            retention.prune_leases(db, record.update_no - core.settings.retain_leases)
            if digests:
                rows.insert_version(db, new_version, digests, record.committed_at)
            # Counted here, so that the numbers are in this very transaction.
            for scope, name, count in counts:
                core.counters.add(scope, name, count)

        def undone() -> None:
            for scope, name, count in counts:
                core.counters.add(scope, name, -count)

        def done(_: None) -> None:
            self._apply(batch, record, digests)

        await core.committer.execute(job, on_commit=done, on_fail=undone)
        return record

    async def roll_back(self, *, to: int, new_version: int, checkpoint: str) -> UpdateRecord:
        """Write in one transaction: the ledger's line of a return to `to`, and that all sampled since is dropped.

        Whatever was sampled for the versions in between comes from a policy that is none of ours any more, also if its
        number is near; from now on leases ask for `new_version` or newer.
        """
        core = self._core
        record = UpdateRecord(
            update_no=self.count + 1,
            new_version=new_version,
            checkpoint=checkpoint,
            committed_at=core.clock.wall_s(),
            metrics={"rolled_back_to": to},
        )
        abandoned = list(core.groups.of_kind("train"))
        for group in abandoned:
            group.state, group.cause = GroupState.DROPPED, DropCause.ROLLED_BACK
        core.oldest_version = new_version
        core.close(abandoned)  # Marks them, so that they are written in the transaction.
        text = f"version {to} is back as version {new_version}; {len(abandoned)} groups were dropped"

        def job(db: Connection) -> None:
            rows.insert_update(db, record, ())
            rows.set_fact(db, "oldest_version", new_version)
            rows.insert_event(db, Event(at=record.committed_at, kind="rollback", text=text))

        def done(_: None) -> None:
            core.unsaved.update_no, core.trained_version = record.update_no, new_version
            core.notify_all()

        await core.committer.execute(job, on_commit=done)
        return record

    async def publish(self, version: int, artifact_digests: Iterable[bytes]) -> None:
        """Note that nodes can fetch a version: leases ask for it from now on, and its digests are accepted."""
        core, digests = self._core, frozenset(artifact_digests)
        await core.committer.execute(lambda db: rows.insert_version(db, version, digests, core.clock.wall_s()))
        core.artifacts[version] = digests
        core.notify_all()

    async def ledger(self, limit: int) -> list[UpdateRecord]:
        """Return the newest updates, newest first."""
        return await self._core.committer.execute(lambda db: rows.load_updates(db, limit))

    async def consumed(self, update_no: int) -> list[int]:
        """Return the ids of the groups that an update consumed."""
        return await self._core.committer.execute(lambda db: rows.consumed_groups(db, update_no))

    def lags(self) -> dict[int, int]:
        """Return the number of trained completions by staleness in versions."""
        return {int(name): count for name, count in sorted(self._core.counters.of(LAG).items())}

    def _apply(self, batch: Batch, record: UpdateRecord, digests: frozenset[bytes]) -> None:
        core = self._core
        core.unsaved.update_no, core.trained_version = record.update_no, record.new_version
        if digests:
            core.artifacts[record.new_version] = digests
        for group in batch.groups:
            if (held := core.groups.by_id.get(group.group_id)) is not None:
                held.state = GroupState.CONSUMED
            core.let_go(group.group_id)
        core.notify_all()

    def _situation(self) -> Situation:
        core = self._core
        return Situation(
            paused=core.paused,
            published=core.versions.published is not None,
            publication_lag=core.versions.lag,
            live_nodes=core.roster.live(),
            last_cause=core.last_cause,
        )

    def _batch_group(self, group: Group, stored: dict[tuple[int, int], StoredTrajectory], version: int) -> BatchGroup:
        members: list[BatchMember] = []
        for member in group.members(SlotState.SCORED):
            made, reward = stored[group.group_id, member], group.slots[member].reward
            assert reward is not None, "a scored slot has its reward"
            members.append(
                BatchMember(
                    member=member,
                    peer=made.peer,
                    token_ids=made.token_ids,
                    logprobs=made.logprobs,
                    reward=reward,
                    oldest_version=made.oldest_version,
                    newest_version=made.newest_version,
                    backend=made.backend,
                    precision=made.precision,
                    finish_reason=made.finish_reason,
                    aged=group.is_aged(member, version, self._core.settings.max_staleness),
                )
            )
        return BatchGroup(
            group_id=group.group_id,
            prompt_index=group.prompt_index,
            prompt_ids=group.prompt_ids,
            members=tuple(members),
            no_signal=group.no_signal,
        )


def _counts(batch: Batch) -> list[tuple[str, str, int]]:
    counts: dict[tuple[str, str], int] = {}
    for group in batch.groups:
        for member in group.members:
            lag = str(staleness(batch.version, member.oldest_version))
            key = (WORK, "aged_members") if member.aged else (LAG, lag)
            counts[key] = counts.get(key, 0) + 1
    counts[WORK, "trained_groups"] = len(batch.groups)
    return [(scope, name, count) for (scope, name), count in counts.items()]
