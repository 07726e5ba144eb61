"""From completions to signed submissions in the outbox.

Trajectories are collected by their policy version, so that a submission goes stale as a whole; those of leases that
were pinned to a version (evaluation, sequential mode) never go stale by our own judgement, since only the coordinator
knows what they are for. The worker decides when to flush. What is in memory here is lost by a crash: at most FLUSH_S
worth of work.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import anyio
from anyio import to_thread

from echo_node.backends.base import Completion
from echo_node.backoff import Backoff
from echo_node.outbox import Outbox
from echo_swarm.codec import pack_f32, pack_u32
from echo_swarm.envelope import seal
from echo_swarm.errors import StorageFull
from echo_swarm.identity import Identity
from echo_swarm.trajectory import BehaviourPolicy, Submission, Trajectory, prompt_digest
from echo_swarm.work import BackendReport, Lease, LeaseMember

MAX_PER_SUBMISSION = 32
MAX_BYTES_PER_SUBMISSION = 4 << 20
"""Half of what the protocol takes, so that names and framing always fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ripe:
    """A finished trajectory."""

    trajectory: Trajectory
    version: int | None
    """The policy version by which it goes stale; None if only the coordinator can tell."""


class Harvest:
    """Finished trajectories on their way to the outbox."""

    def __init__(self, *, identity: Identity, run_id: str, outbox: Outbox, stored: Callable[[], None]) -> None:
        self._identity = identity
        self._run_id = run_id
        self._outbox = outbox
        self._stored = stored
        self._ripe: list[Ripe] = []
        self._storing = anyio.Lock()
        self._being_stored = 0

    def __len__(self) -> int:
        return len(self._ripe)

    @property
    def unstored(self) -> int:
        """Finished trajectories that are not in the outbox yet."""
        return len(self._ripe) + self._being_stored

    def add(self, lease: Lease, member: LeaseMember, completion: Completion, report: BackendReport) -> None:
        """Take a completion of a lease."""
        trajectory = Trajectory(
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            member=member.member,
            prompt_digest=prompt_digest(lease.prompt_ids),
            policy=BehaviourPolicy(
                oldest_version=completion.oldest_version,
                newest_version=completion.newest_version,
                artifact_digest=completion.artifact_digest,
                backend=report.backend,
                build=report.build,
                precision=report.precision,
            ),
            temperature=lease.sampling.temperature,
            seed=member.seed,
            finish_reason=completion.finish_reason,
            token_ids=pack_u32(completion.token_ids),
            logprobs=pack_f32(completion.logprobs),
        )
        goes_stale = lease.max_version is None
        self._ripe.append(Ripe(trajectory=trajectory, version=completion.oldest_version if goes_stale else None))

    async def flush(self) -> None:
        """Return once all that was added before is in the outbox, durably. Raises StorageFull, and keeps the rest."""
        # The lock: a caller must not return while another one is still writing what both want to be stored.
        async with self._storing:
            ripe, self._ripe = self._ripe, []
            if not ripe:
                return
            self._being_stored = len(ripe)
            try:
                await to_thread.run_sync(self._store, ripe)
            finally:
                self._being_stored = 0
                self._ripe = ripe + self._ripe
            self._stored()

    async def flush_patiently(self, waits: Callable[[str], None]) -> None:
        """As `flush`, again and again while the disk has no room; `waits` is told why."""
        backoff = Backoff(first_s=0.5, limit_s=10.0)
        while True:
            try:
                return await self.flush()
            except StorageFull as e:
                waits(str(e))
            await anyio.sleep(backoff.next_s())

    def _store(self, ripe: list[Ripe]) -> None:
        """Store what is in `ripe`, and take out of it what is stored."""
        for version, batch in batches(ripe):
            self._outbox.put(
                seal(self._identity, Submission(run_id=self._run_id, trajectories=tuple(batch))),
                trajectories=len(batch),
                tokens=sum(len(trajectory.token_ids) // 4 for trajectory in batch),
                oldest_version=version,
                lease_ids={trajectory.lease_id for trajectory in batch},
            )
            stored = set(map(id, batch))
            ripe[:] = [item for item in ripe if id(item.trajectory) not in stored]


def batches(ripe: list[Ripe]) -> Iterator[tuple[int | None, list[Trajectory]]]:
    """Split into submissions of one `Ripe.version` each, bounded in number and bytes, otherwise in order."""
    by_version: dict[int | None, list[Trajectory]] = {}
    for item in ripe:
        by_version.setdefault(item.version, []).append(item.trajectory)
    for version, siblings in by_version.items():
        batch: list[Trajectory] = []
        size = 0
        for trajectory in siblings:
            added = len(trajectory.token_ids) + len(trajectory.logprobs)
            if batch and (len(batch) == MAX_PER_SUBMISSION or size + added > MAX_BYTES_PER_SUBMISSION):
                yield version, batch
                batch, size = [], 0
            batch.append(trajectory)
            size += added
        yield version, batch
