"""What a node does with a backend that is wrong or grows: it leaves at once, or replaces the child between versions."""

from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from echo_node.backends.self_test import SelfTestFailed
from echo_swarm.errors import BackendFailed
from tests.swarm.support.node_harness import make_swarm

pytestmark = pytest.mark.anyio


async def test_a_backend_that_fails_its_self_test_is_not_tried_again_and_the_node_never_joins(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    swarm.coordinator.publish(0)
    starts: list[int] = []

    @asynccontextmanager
    async def open_backend():
        starts.append(1)
        raise SelfTestFailed("self-test of torch 1.0: log-probabilities differ from the expected ones by 2")
        yield

    async with swarm.serving(), swarm.node(open_backend=open_backend) as running:
        with pytest.raises(BackendFailed, match=r"does not join: self-test of torch 1.0: log-prob.* by 2") as raised:
            await running.wait()
    assert (len(starts), swarm.coordinator.hellos, raised.value.exit_code) == (1, [], 6)
