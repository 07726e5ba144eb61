"""Held-out evaluation: one greedy completion a prompt, sampled with exactly one version, never trained on."""

from collections.abc import Sequence
from sqlite3 import Connection

from echo_coordinator.state import rows
from echo_coordinator.state.batch import EvalProgress, Evaluation, Prompt
from echo_coordinator.state.core import RunCore
from echo_coordinator.state.groups import Group, GroupState


class Evaluations:
    """Evaluations under way and those recorded."""

    def __init__(self, core: RunCore, next_group_id: int, recorded: Sequence[Evaluation]) -> None:
        self._core = core
        self._next_group_id = next_group_id
        self._recorded = {evaluation.version: evaluation for evaluation in recorded}

    async def add(self, version: int, prompts: Sequence[Prompt]) -> None:
        """Let nodes complete `prompts` greedily with `version`. Not counted in the capacity of training groups."""
        if not prompts:
            return
        core, first = self._core, self._next_group_id
        added = [rows.new_group(first + i, prompt, 1, version) for i, prompt in enumerate(prompts)]

        def done(_: None) -> None:
            self._next_group_id = first + len(added)
            for group in added:
                core.groups.add(group)
            core.work_changed.notify()

        await core.committer.execute(lambda db: rows.insert_groups(db, added), on_commit=done)

    def under_way(self) -> list[int]:
        """Return the versions with an evaluation that is not recorded yet, ascending."""
        versions = {group.pinned_version for group in self._core.groups.of_kind("eval")}
        return sorted(version for version in versions if version is not None)

    def progress(self, version: int) -> EvalProgress:
        """Return how far the evaluation of a version is."""
        groups = self._groups(version)
        rewards = [reward for group in groups for reward in group.rewards()]
        return EvalProgress(
            version=version,
            total=len(groups),
            done=sum(group.state is not GroupState.ACTIVE for group in groups),
            scored=len(rewards),
            accuracy=sum(rewards) / len(rewards) if rewards else None,
        )

    async def record(self, version: int) -> Evaluation:
        """Write down the evaluation of a version as far as it is, and close what is still open of it."""
        core, groups, progress = self._core, self._groups(version), self.progress(version)
        evaluation = Evaluation(
            version=version, accuracy=progress.accuracy, prompts=progress.total, scored=progress.scored
        )
        for group in groups:
            group.state = GroupState.CONSUMED
            core.groups.mark(group)

        def job(db: Connection) -> None:
            rows.insert_evaluation(db, evaluation, core.clock.wall_s())

        await core.committer.execute(job)
        for group in groups:
            core.let_go(group.group_id)
        self._recorded[version] = evaluation
        core.changed.notify()
        return evaluation

    def recorded(self) -> list[Evaluation]:
        """Return all recorded evaluations, oldest version first."""
        return [self._recorded[version] for version in sorted(self._recorded)]

    def _groups(self, version: int) -> list[Group]:
        return [group for group in self._core.groups.of_kind("eval") if group.pinned_version == version]
