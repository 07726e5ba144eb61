"""How versions reached the nodes, as a whole run's status tells it: after a restart, too, and of one by its delta."""

from pathlib import Path

import pytest

from echo_coordinator.coordinator import Coordinator
from echo_swarm.status import VersionTransfers
from tests.swarm.support import stand_ins
from tests.swarm.support.node_harness import until
from tests.swarm.support.stand_ins import weights
from tests.swarm.support.whole_run import make_run
from tests.swarm.test_delta_run import SIZE, drifting

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """The coordinator runs on asyncio."""
    return "asyncio"


def row(coordinator: Coordinator, version: int) -> VersionTransfers:
    found = (entry for entry in coordinator.reporter.status().transfers if entry.policy_version == version)
    return next(found, VersionTransfers(policy_version=version))


async def test_a_version_is_timed_and_after_a_restart_told_again_without_times(tmp_path: Path):
    run = make_run(tmp_path, beat_s=0.2)
    run.trainer.hold()
    size = len(weights(0))
    async with run.node():
        async with run.coordinator() as coordinator:
            await until(lambda: row(coordinator, 0).whole)
            first = row(coordinator, 0)
            assert (first.bytes_coordinator, first.bytes_served, first.told) == (size, size, 1)
            run.trainer.let_go()
            await until(lambda: coordinator.state.updates.count)
            run.trainer.hold()
            await until(lambda: (n := coordinator.state.updates.count) and row(coordinator, n).all_s is not None)
            newest = coordinator.state.updates.count
            timed = row(coordinator, newest)
            assert timed.timed and (timed.nodes, timed.had) == (1, 1) and timed.half_s == timed.all_s
        run.trainer.let_go()
        async with run.coordinator() as coordinator:
            await until(lambda: row(coordinator, newest).told)
            again = row(coordinator, newest)
            assert not again.timed
            assert (again.bytes_coordinator, again.half_s, again.bytes_served) == (timed.bytes_coordinator, None, None)


async def test_bytes_of_deltas_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stand_ins, "weights", drifting)
    run = make_run(tmp_path, beat_s=0.2)
    async with run.coordinator() as coordinator, run.node():
        await until(lambda: any(entry.bytes_made for entry in coordinator.reporter.status().transfers))
        made = next(entry for entry in coordinator.reporter.status().transfers if entry.bytes_made)
        assert 0 < made.bytes_deltas <= 0.05 * made.policy_version * SIZE
        assert made.bytes_coordinator + made.bytes_peers == made.bytes_deltas
        assert made.bytes_made >= SIZE
