"""How many groups are under way, and adding new ones."""

from collections.abc import Sequence
from sqlite3 import Connection

from echo_coordinator.state import rows
from echo_coordinator.state.batch import Prompt
from echo_coordinator.state.core import RunCore
from echo_coordinator.state.groups import GroupState
from echo_coordinator.state.staleness import group_capacity


class Admission:
    """The first of the three guards of staleness; see `staleness`."""

    def __init__(self, core: RunCore, next_group_id: int) -> None:
        self._core = core
        self._next_group_id = next_group_id

    @property
    def capacity(self) -> int:
        """Training groups that may be under way now."""
        settings, versions = self._core.settings, self._core.versions
        if versions.published is None:
            return 0
        by_versions = group_capacity(settings.max_staleness, settings.groups_per_update, versions.lag)
        return min(by_versions, settings.buffer_bytes // settings.group_bytes)

    @property
    def in_flight(self) -> int:
        """Training groups under way: being sampled, scored, ready, or in the batch being trained."""
        return self._core.groups.count("train", GroupState.ACTIVE, GroupState.READY, GroupState.TRAINING)

    @property
    def wanted(self) -> int:
        """Training groups to add now, so that the swarm is busy and nothing gets too old."""
        if self._core.paused or self._core.stopping:
            return 0
        return max(0, self.capacity - self.in_flight)

    @property
    def next_prompt_index(self) -> int:
        """Position in the environment's training set of the next prompt to add; kept over restarts."""
        return self._core.next_prompt_index

    async def add(self, prompts: Sequence[Prompt]) -> None:
        """Add one training group a prompt, in order, and move `next_prompt_index` behind the last; one transaction."""
        if not prompts:
            return
        core, first = self._core, self._next_group_id
        added = [rows.new_group(first + i, p, core.settings.group_size, None) for i, p in enumerate(prompts)]
        following = prompts[-1].index + 1

        def job(db: Connection) -> None:
            rows.insert_groups(db, added)
            rows.set_fact(db, "next_prompt_index", following)

        def done(_: None) -> None:
            core.next_prompt_index = following
            self._next_group_id = first + len(added)
            for group in added:
                core.groups.add(group)
            core.work_changed.notify()

        await core.committer.execute(job, on_commit=done)
