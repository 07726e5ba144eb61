"""The coordinator's disk fills, or a version cannot be published: the run ends with why, and goes on when it can."""

from collections import Counter
from collections.abc import Generator
from pathlib import Path

import anyio
import pytest

from echo_coordinator.coordinator import Coordinator
from echo_swarm.errors import LocalFault, StorageFull
from tests.support.small_disks import fill, small_disk
from tests.swarm.support.node_harness import until
from tests.swarm.support.whole_run import WholeRun, make_run

pytestmark = pytest.mark.anyio

DISK_MB = 24


@pytest.fixture
def anyio_backend() -> str:
    """The coordinator runs on asyncio only."""
    return "asyncio"


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path]:
    """A file system of DISK_MB of its own."""
    with small_disk(tmp_path / "disk", DISK_MB) as folder:
        yield folder


def leaf(error: BaseException) -> BaseException:
    """Return the first error of a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def ended(coordinator: Coordinator) -> None:
    with anyio.fail_after(120):
        await coordinator.ended.wait()


async def goes_on(run: WholeRun) -> None:
    """Run to the end; every group was trained once, in the update that the ledger says."""
    async with run.coordinator() as coordinator, run.node():
        await ended(coordinator)
        state = coordinator.state
        assert run.settings.run.updates is not None
        ledger = [await state.updates.consumed(number) for number in range(1, run.settings.run.updates + 1)]
        assert state.core.versions.published == run.settings.run.updates
    assert Counter(group for groups in ledger for group in groups).most_common(1)[0][1] == 1
    assert [sorted(group.group_id for group in batch.groups) for batch in run.trainer.trained] == ledger


async def test_a_full_disk_ends_the_run_with_why_and_with_room_again_it_goes_on_and_lost_nothing(
    disk: Path, tmp_path: Path
):
    run = make_run(disk, updates=6, lease_s=2.0)
    told: dict[str, int] = {}
    with pytest.raises(BaseExceptionGroup) as raised:
        async with run.coordinator() as coordinator, run.node() as node:
            await until(lambda: coordinator.state.updates.count >= 2, "updates")
            run.trainer.hold()
            await until(lambda: run.trainer.training, "an update is under way")
            fill(disk)
            told[node.node.status().peer_id] = node.verdicts["accepted"]
            run.trainer.let_go()
            await ended(coordinator)
    assert isinstance(leaf(raised.value), StorageFull), raised.value
    (disk / "ballast").unlink()
    await goes_on(run)
    async with run.coordinator() as coordinator:
        assert all(coordinator.state.core.counters.get(peer, "accepted") >= count > 0 for peer, count in told.items())


async def test_a_version_that_cannot_be_published_ends_the_run_with_why_and_is_published_at_the_next_start(
    tmp_path: Path,
):
    run = make_run(tmp_path, updates=4, lease_s=2.0)
    in_the_way = run.folder.store / run.settings.run.id / "v00000002"
    seen: list[Coordinator] = []
    with pytest.raises(BaseExceptionGroup) as raised:
        async with run.coordinator() as coordinator, run.node():
            seen.append(coordinator)
            in_the_way.write_bytes(b"")
            await ended(coordinator)
    fault = leaf(raised.value)
    assert isinstance(fault, LocalFault) and "v00000002" in str(fault)
    assert seen[0].state.core.versions.published == 1
    in_the_way.unlink(missing_ok=True)  # The next start clears it away, too.
    await goes_on(run)
