"""Going back to an earlier version: real coordinator and node, a network in memory, stand-ins for the children."""

from pathlib import Path

import pytest

from echo_coordinator.commands.rollback import roll_back
from echo_coordinator.coordinator import Coordinator
from echo_coordinator.state.batch import UpdateRecord
from echo_coordinator.trainer.state import Checkpoints, folder_name
from echo_node.backends.options import ScriptedOptions
from echo_swarm.errors import LocalFault, UsageError
from tests.swarm.support.node_harness import until
from tests.swarm.support.whole_run import WholeRun, make_run

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """The coordinator runs on asyncio only."""
    return "asyncio"


async def trained_to(run: WholeRun, coordinator: Coordinator, version: int) -> None:
    await until(lambda: len(run.trainer.trained) >= version and coordinator.state.core.versions.trained >= version)


def weights_of(run: WholeRun, version: int) -> bytes:
    return (run.folder.checkpoints / folder_name(version) / "model.safetensors").read_bytes()


async def stopped_run(tmp_path: Path, updates: int = 3) -> WholeRun:
    """A run that had some updates, with completions in its buffer that nothing was trained on."""
    run = make_run(tmp_path)
    run.folder.settings.touch()
    async with run.coordinator() as coordinator, run.node("a", options=ScriptedOptions(batch=4)):
        await trained_to(run, coordinator, updates)
        run.trainer.hold()
        await until(lambda: coordinator.state.buffer_status().ready > 0)
        coordinator.training.stop()
        run.trainer.let_go()
        await until(lambda: coordinator.training.activity.state == "stopped")
    return run


async def test_a_version_comes_back_under_a_higher_number_and_training_goes_on_from_it(tmp_path: Path):
    run = await stopped_run(tmp_path)
    before = max(checkpoint.state.policy_version for checkpoint in Checkpoints(run.folder.checkpoints).complete())
    target = before - 1
    old_weights = weights_of(run, target)
    done = roll_back(run.folder.root, target)
    assert (done.version, done.abandoned) == (before + 1, (before,))
    assert weights_of(run, done.version) == old_weights

    trained_before = len(run.trainer.trained)
    async with run.coordinator() as coordinator, run.node("b", options=ScriptedOptions(batch=4)) as node:
        await until(lambda: len(run.trainer.trained) >= trained_before + 2)
        ledger = await coordinator.state.updates.ledger(100)
        lines = {line.new_version: line for line in ledger}
        assert lines[done.version].metrics == {"rolled_back_to": target}
        dropped = coordinator.state.core.counters.of("dropped_groups")
        events = [event.text for event in await coordinator.state.core.events(50) if event.kind == "rollback"]
        assert node.verdicts["accepted"]
    assert [line.update_no for line in reversed(ledger)] == list(range(1, len(ledger) + 1))
    assert dropped["rolled_back"] > 0
    assert len(events) == 1 and f"version {target} is back as version {done.version}" in events[0]
    after = [member for batch in run.trainer.trained[trained_before:] for member in batch.members]
    assert after and min(member.oldest_version for member in after) >= done.version


async def test_a_rollback_that_was_noted_is_not_done_again_at_the_next_start(tmp_path: Path):
    run = await stopped_run(tmp_path)
    newest = max(checkpoint.state.policy_version for checkpoint in Checkpoints(run.folder.checkpoints).complete())
    done = roll_back(run.folder.root, newest - 1)
    ledgers: list[list[UpdateRecord]] = []
    for _ in range(2):
        async with run.coordinator() as coordinator:
            await until(lambda at=coordinator: at.state.core.versions.published == done.version)
            ledgers.append(await coordinator.state.updates.ledger(100))
            assert coordinator.state.core.oldest_version == done.version
    assert ledgers[0] == ledgers[1]


async def test_a_second_rollback_before_the_start_counts_and_the_first_is_skipped(tmp_path: Path):
    run = await stopped_run(tmp_path)
    newest = max(checkpoint.state.policy_version for checkpoint in Checkpoints(run.folder.checkpoints).complete())
    first, second = (roll_back(run.folder.root, target) for target in (newest - 1, newest - 2))
    assert (first.version, second.version) == (newest + 1, newest + 2)
    async with run.coordinator() as coordinator:
        await until(lambda: coordinator.state.core.versions.published == second.version)
        (line, *_) = await coordinator.state.updates.ledger(1)
    assert (line.new_version, line.metrics) == (second.version, {"rolled_back_to": newest - 2})


async def test_what_cannot_be_gone_back_to_is_said(tmp_path: Path):
    run = await stopped_run(tmp_path)
    kept = sorted(checkpoint.state.policy_version for checkpoint in Checkpoints(run.folder.checkpoints).complete())
    with pytest.raises(UsageError, match=rf"is none yet; the newest one with a checkpoint is {kept[-1]}"):
        roll_back(run.folder.root, kept[-1] + 7)
    with pytest.raises(UsageError, match="has no checkpoint any more; there are"):
        roll_back(run.folder.root, kept[0] - 1)
    with pytest.raises(UsageError, match="is the newest one"):
        roll_back(run.folder.root, kept[-1])
    path = run.folder.checkpoints / folder_name(kept[0]) / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(LocalFault, match="is damaged"):
        roll_back(run.folder.root, kept[0])
    with run.folder.locked(), pytest.raises(UsageError, match="already runs"):
        roll_back(run.folder.root, kept[1])
    assert sorted(c.state.policy_version for c in Checkpoints(run.folder.checkpoints).complete()) == kept
