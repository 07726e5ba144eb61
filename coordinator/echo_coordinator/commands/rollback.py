"""Going back to an earlier version: its weights and moments become the run's newest, under a new and higher number.

Versions only go up, so that no node can take an old manifest for news. What this writes is one checkpoint, complete or
not there at all; everything else follows from it at the next `start` (`TrainingLoop`): the ledger's line, the drop of
what was sampled since, the publication.
"""

import os
import shutil
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from echo_coordinator.run_folder import RunFolder
from echo_coordinator.state import rows
from echo_coordinator.state.database import open_database
from echo_coordinator.trainer.state import STATE_FILE, Checkpoint, Checkpoints
from echo_swarm.errors import LocalFault, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    """What was done."""

    version: int
    """The number under which the old weights will be published."""
    abandoned: tuple[int, ...]
    """Versions that the run has left behind, whose checkpoints are still there."""


def roll_back(root: Path, to: int) -> RolledBack:
    """Make version `to` the newest one of a run that is not running.

    Raises:
        UsageError: a coordinator runs on it, or there is no such version to go back to.
        LocalFault: that version's checkpoint is damaged.
        StorageFull: no room; nothing has changed.

    """
    folder = RunFolder(root)
    folder.require()
    with folder.locked():
        store = Checkpoints(folder.checkpoints)
        kept = {checkpoint.state.policy_version: checkpoint for checkpoint in store.complete()}
        _check_choice(to, sorted(kept), root)
        update, highest = _ledger(folder)
        newest = kept[max(kept)]
        version = max(highest, newest.state.policy_version) + 1
        chosen = store.intact(to)
        if isinstance(chosen, str):
            raise LocalFault(f"checkpoint {kept[to].folder} is damaged ({chosen}); choose another version")
        state = replace(
            chosen.state,
            update=update + 1,
            policy_version=version,
            consumed_groups=(),
            # Prompts go on where they were; the same ones again would be no fresh data.
            data_position=newest.state.data_position,
            rolled_back_to=to,
        )
        store.sweep()
        store.write(state, lambda target: _link(chosen, target))
    return RolledBack(version=version, abandoned=tuple(v for v in sorted(kept) if v > to))


def _check_choice(to: int, kept: list[int], root: Path) -> None:
    if not kept:
        raise UsageError(f"{root} has no checkpoint yet; start it first")
    if to > kept[-1]:
        raise UsageError(f"version {to} is none yet; the newest one with a checkpoint is {kept[-1]}")
    if to not in kept:
        there = ", ".join(map(str, kept))
        raise UsageError(
            f"version {to} has no checkpoint any more; there are {there} (publish.keep_checkpoints sets how many stay)"
        )
    if to == kept[-1]:
        raise UsageError(f"version {to} is the newest one; there is nothing to go back from")


def _ledger(folder: RunFolder) -> tuple[int, int]:
    """Return the number of the newest update and the highest version, trained or published."""
    with closing(open_database(folder.database)) as connection:
        versions = [0, *rows.load_versions(connection)]
        for update in rows.load_updates(connection, 1):
            return update.update_no, max(update.new_version, *versions)
    return 0, max(versions)


def _link(chosen: Checkpoint, target: Path) -> None:
    """Give the new checkpoint the old one's files; none of them is ever changed in place."""
    for source in sorted(chosen.folder.rglob("*")):
        inner = source.relative_to(chosen.folder)
        if source.is_dir():
            (target / inner).mkdir()
        elif inner.name != STATE_FILE:
            try:
                os.link(source, target / inner)
            except OSError:  # A file system without hard links.
                shutil.copyfile(source, target / inner)
