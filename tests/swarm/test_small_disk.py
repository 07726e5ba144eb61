"""Field case 19: a node on a real disk that is too small, or fills up while a version comes in."""

import shutil
from collections.abc import Generator
from pathlib import Path

import pytest

from echo_node.node import Outcome
from echo_swarm.manifest import ArtifactKind
from tests.support.small_disks import fill, small_disk
from tests.swarm.support.node_harness import RunningNode, Swarm, make_swarm, until

pytestmark = pytest.mark.anyio

DISK_MB = 24


@pytest.fixture
def disk(tmp_path: Path) -> Generator[Path]:
    """A file system of DISK_MB of its own."""
    with small_disk(tmp_path / "disk", DISK_MB) as folder:
        yield folder


def swarm_on(disk: Path, tmp_path: Path) -> Swarm:
    """Make a swarm whose nodes live on the small disk, and its coordinator elsewhere."""
    swarm = make_swarm(tmp_path, max_staleness=4)
    swarm.folder = disk
    return swarm


async def at_work(swarm: Swarm) -> None:
    """Wait for more work of the node."""
    done = len(swarm.coordinator.accepted)
    await until(lambda: len(swarm.coordinator.accepted) > done + 8, "more work")


def left_over(running: RunningNode, version: int) -> list[str]:
    return [path.name for path in running.node.store.version_folder(version).iterdir() if path.name != "manifest.bin"]


async def test_a_version_that_the_disk_cannot_hold_is_refused_with_both_figures_and_the_old_one_serves_on(
    disk: Path, tmp_path: Path
) -> None:
    swarm = swarm_on(disk, tmp_path)
    swarm.coordinator.publish(0)
    async with swarm.serving(), swarm.node() as running:
        await at_work(swarm)
        swarm.coordinator.publish(1, size_bytes=40_000_000)
        await until(lambda: "version 1 needs 41.05 MB" in running.node.status().state, "the refusal is told")
        assert "MB are free in" in running.node.status().state
        served = running.node.status().bytes_fetched_coordinator
        await at_work(swarm)
        assert running.node.status().bytes_fetched_coordinator == served < 1_000_000
        assert left_over(running, 1) == []
        swarm.coordinator.publish(2)
        await until(lambda: running.node.policies.newest == 2, "the next one fits")


async def test_a_disk_that_fills_while_a_version_comes_in_costs_that_version_until_there_is_room_again(
    disk: Path, tmp_path: Path
) -> None:
    swarm, ballast = swarm_on(disk, tmp_path), disk / "ballast"
    swarm.coordinator.publish(0)
    async with swarm.serving(), swarm.node() as running:
        running.node.fetcher.settings = running.node.fetcher.settings.__class__(retry_s=0.01)
        await at_work(swarm)
        swarm.coordinator.publish(1, size_bytes=12_000_000)
        weights = swarm.coordinator.store.version_folder(1) / ArtifactKind.SAFETENSORS.file_name
        weights.rename(tmp_path / "kept")
        await until(lambda: running.node.policies._fetching == 1, "the download waits for its pieces")
        # What is left is room for the outbox, whose log takes up to 4 MB, and none for the version.
        ballast.write_bytes(bytes(shutil.disk_usage(disk).free - 8_000_000))
        (tmp_path / "kept").rename(weights)
        await until(lambda: "are free in" in running.node.status().state, "the full disk is told")
        assert left_over(running, 1) == []
        await at_work(swarm)
        assert running.node.policies.newest == 0
        ballast.unlink()
        await until(lambda: running.node.policies.newest == 1, "with room again, the version comes")
        assert sum("free some space" in line for line in running.lines) == 1


async def test_on_a_full_disk_finished_work_waits_for_room_and_the_node_lives(disk: Path, tmp_path: Path) -> None:
    swarm = swarm_on(disk, tmp_path)
    swarm.coordinator.publish(0)
    async with swarm.serving(), swarm.node() as running:
        await at_work(swarm)
        ballast = fill(disk)
        await until(lambda: "waiting for room on the disk" in running.node.status().state, "the full disk is told")
        ballast.unlink()
        await at_work(swarm)
        await until(lambda: "room on the disk" not in running.node.status().state, "nothing is waited for")
        assert await running.leave() is Outcome.STOPPED
    accepted = running.node.status().accepted
    assert accepted == len(swarm.coordinator.accepted) and running.node.status().rejected == {}
