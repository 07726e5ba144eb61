"""A whole run whose versions reach nodes as deltas."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from echo_coordinator.state.batch import Waiting
from echo_swarm.manifest import ArtifactKind
from tests.swarm.support import stand_ins
from tests.swarm.support.node_harness import until
from tests.swarm.support.whole_run import make_run

pytestmark = pytest.mark.anyio

SIZE = 2 << 20
UPDATES = 4


@pytest.fixture
def anyio_backend() -> str:
    """The coordinator runs on asyncio."""
    return "asyncio"


def drifting(version: int, _: int = 0) -> bytes:
    """Weights of which one in a hundred moves from version to version."""
    values = np.frombuffer(np.random.default_rng(0).bytes(SIZE), "<u2").copy()
    for step in range(version):
        values[np.random.default_rng(step + 1).random(len(values)) < 0.01] += 1
    header = json.dumps({"w": {"dtype": "U16", "shape": [len(values)], "data_offsets": [0, SIZE]}}).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + values.tobytes()


async def test_after_the_first_version_a_node_fetches_only_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_ins, "weights", drifting)
    run = make_run(tmp_path)
    async with run.coordinator() as coordinator, run.node() as node:
        state, policies = coordinator.state, node.node.policies
        await until(lambda: state.updates.count >= UPDATES)
        await coordinator.answer("pause", {})
        await until(lambda: coordinator.reporter.status().trainer.state == Waiting.PAUSED)
        await until(lambda: policies.newest == state.core.versions.published == state.updates.count)
        newest, served = state.updates.count, coordinator.reporter.status().bytes_served_coordinator
        path = node.node.store.artifact_path(newest, ArtifactKind.SAFETENSORS)
        assert path is not None and path.read_bytes() == drifting(newest)
        assert SIZE < served < (1 + 0.05 * newest) * SIZE
        assert node.verdicts["accepted"] > 0 and not any("came whole" in line for line in node.lines)
