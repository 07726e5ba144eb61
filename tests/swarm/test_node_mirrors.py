"""A node and the mirrors that its run names."""

from pathlib import Path

import pytest

from echo_swarm.checkpoint.mirror import file_url
from tests.support.hostile_http import Files, serving_files
from tests.swarm.support.node_harness import Swarm, make_swarm, until

pytestmark = pytest.mark.anyio

SIZE = 1_500_000


def published(swarm: Swarm, version: int, files: Files, *, keep: bool = False) -> int:
    """Publish a version, move its file from the coordinator to the server, and return its length."""
    swarm.coordinator.publish(version, size_bytes=SIZE)
    signed = swarm.coordinator.store.manifest(version)
    assert signed is not None
    (artifact,) = signed.message.artifacts
    path = swarm.coordinator.store.version_folder(version) / artifact.file_name
    files.content[file_url("", swarm.coordinator.run_id, artifact.digest)] = path.read_bytes()
    if not keep:
        path.unlink()
    return artifact.size_bytes


async def test_a_node_with_mirrors_only_gets_its_versions_and_says_from_where(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    with serving_files() as good, serving_files(manner="whole", at_first=True) as whole:
        size = published(swarm, 0, good)
        whole.content = good.content
        swarm.coordinator.mirrors = (whole.url, good.url, "ftp://example.org")
        async with swarm.serving(), swarm.node(private_mirrors=True) as running:
            await until(lambda: len(swarm.coordinator.accepted) >= 4)
            status = running.node.status()
            assert (status.bytes_fetched_mirrors, status.bytes_fetched_peers) == (size, 0)
            assert status.bytes_fetched_coordinator == 0
            size += published(swarm, 1, good)
            await until(lambda: running.node.policies.newest == 1)
            assert running.node.status().bytes_fetched_mirrors == size
    assert f"versions may also come from {whole.url}, {good.url}" in running.lines
    assert "not asked, since no plain http or https URL: 'ftp://example.org'" in running.lines
    (told,) = [line for line in running.lines if "was of no use" in line]
    why = "answers with the whole file instead of a range"
    assert told.startswith(f"mirror {whole.url} was of no use for version 0: {why}")


@pytest.mark.parametrize("config", [{}, {"use_mirrors": False}])
async def test_mirrors_nearby_are_asked_only_if_the_node_says_so_and_none_if_it_says_that(tmp_path: Path, config):
    swarm = make_swarm(tmp_path)
    with serving_files() as files:
        published(swarm, 0, files, keep=True)
        swarm.coordinator.mirrors = (files.url,)
        loopback = swarm.coordinator.invite(f"/ip4/127.0.0.1/tcp/1/p2p/{swarm.coordinator.identity.peer_id}")
        invite = None if config.get("use_mirrors", True) else loopback
        async with swarm.serving(), swarm.node(invite=invite, **config) as running:
            await until(lambda: len(swarm.coordinator.accepted) >= 4)
            assert running.node.status().bytes_fetched_mirrors == 0
    assert not files.ranges
