"""TUF's indefinite freeze: a node that is shown the same old version for ever says so, and takes the next good one."""

from pathlib import Path

import pytest

from echo_node import policy_sync
from echo_swarm.clock import SystemClock
from tests.swarm.support.node_harness import make_swarm, until

pytestmark = pytest.mark.anyio


class Yesterday(SystemClock):
    """Of a coordinator that fell silent a day ago."""

    def wall_s(self) -> float:
        return super().wall_s() - 86_400


async def test_a_node_that_is_shown_an_expired_head_for_ever_says_so_and_takes_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(policy_sync, "LOOK_S", 0.05)
    swarm = make_swarm(tmp_path)
    now, swarm.coordinator.clock = swarm.coordinator.clock, Yesterday()
    swarm.coordinator.publish(0)
    swarm.coordinator.clock = now
    async with swarm.serving(), swarm.node() as running:
        await until(lambda: any("manifest has expired" in line for line in running.lines), "the freeze is told")
        assert sum("manifest has expired" in line for line in running.lines) == 1
        swarm.coordinator.publish(1)
        await until(lambda: running.node.policies.newest == 1)
