"""How model versions reach a node, and what it does when they do not."""

from dataclasses import replace
from pathlib import Path

import pytest

from echo_swarm.checkpoint.rate import RateLimit
from echo_swarm.manifest import ArtifactKind
from tests.swarm.support.fake_coordinator import PIECE
from tests.swarm.support.node_harness import make_swarm, until
from tests.swarm.support.puppet_backend import PuppetBackend

pytestmark = pytest.mark.anyio


async def test_a_node_that_joins_at_version_12_pulls_12_and_no_other(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    for version in range(13):
        swarm.coordinator.publish(version, size_bytes=100_000)
    async with swarm.serving(), swarm.node() as running:
        await until(lambda: len(swarm.coordinator.accepted) >= 4)
        assert running.node.store.complete_versions(ArtifactKind.SAFETENSORS) == [12]


async def test_a_node_that_slept_while_versions_came_moves_to_the_newest(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    coordinator = swarm.coordinator
    coordinator.publish(1)
    async with swarm.serving() as host, swarm.node() as running:
        await until(lambda: running.node.policies.newest == 1)
        swarm.network.partition(running.host.peer_id, host.peer_id, silent=True)
        for version in range(2, 6):
            coordinator.publish(version)
        swarm.network.heal(running.host.peer_id, host.peer_id)
        await until(lambda: any(t.policy.oldest_version == 5 for t in coordinator.accepted))
    assert 5 in running.puppet.loaded


async def test_a_node_says_how_long_each_version_took_and_where_the_time_went(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    coordinator = swarm.coordinator
    coordinator.publish(0)
    async with swarm.serving(), swarm.node() as running:
        for version in (1, 2):
            await until(lambda version=version: version - 1 in running.puppet.loaded)
            coordinator.publish(version, size_bytes=100_000)
        await until(lambda: running.node.status().swaps[-1:] and running.node.status().swaps[-1].version == 2)
        swaps = running.node.status().swaps
    assert [swap.version for swap in swaps] == [0, 1, 2]
    for swap in swaps:
        parts = (swap.manifest_s, swap.fetch_s, swap.verify_s, swap.wait_s, swap.load_s, swap.first_token_s)
        assert min(parts) >= 0 and sum(parts) == pytest.approx(swap.total_s, abs=1e-6)
        assert swap.size_bytes >= 100_000 and swap.fetch_s > 0 < swap.verify_s
    # Told at most once a minute, and a busy machine may take longer than that.
    told = [line for line in running.lines if "from its announcement to its first token" in line]
    assert told and told[0].startswith("version 0:")


async def test_what_a_broken_off_download_brought_counts_for_the_version_too(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    swarm.coordinator.publish(0)
    async with swarm.serving() as host, swarm.node() as running:
        await until(lambda: 0 in running.puppet.loaded)
        fetcher = running.node.fetcher
        fetcher.settings = replace(fetcher.settings, retry_s=0.01, refresh_s=0.01, starve_s=0.05)
        fetcher._rate = RateLimit(PIECE)
        before = sum(fetcher.bytes_by_source.values())
        swarm.coordinator.publish(1, size_bytes=100_000)
        await until(lambda: sum(fetcher.bytes_by_source.values()) > before)
        swarm.network.partition(running.host.peer_id, host.peer_id)
        await until(lambda: running.node.policies._fetching is None)
        fetcher._rate = RateLimit(None)
        swarm.network.heal(running.host.peer_id, host.peer_id)
        await until(lambda: running.node.status().swaps[-1].version == 1)
        assert 100_000 <= running.node.status().swaps[-1].size_bytes == sum(fetcher.bytes_by_source.values()) - before


async def test_a_download_that_became_worthless_is_given_up_for_the_newest(tmp_path: Path):
    swarm = make_swarm(tmp_path, max_staleness=1)
    coordinator = swarm.coordinator
    coordinator.publish(0)
    async with swarm.serving(), swarm.node() as running:
        await until(lambda: running.node.policies.newest == 0)
        coordinator.publish(1)
        (coordinator.store.version_folder(1) / ArtifactKind.SAFETENSORS.file_name).unlink()
        await until(lambda: running.node.policies._fetching == 1)
        for version in (2, 3):
            coordinator.publish(version)
        await until(lambda: running.node.policies.newest == 3)


async def test_a_node_without_weights_asks_for_no_work_and_says_why(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    coordinator = swarm.coordinator
    coordinator.publish(0)
    weights = coordinator.store.version_folder(0) / ArtifactKind.SAFETENSORS.file_name
    kept = weights.read_bytes()
    weights.unlink()
    async with swarm.serving(), swarm.node() as running:
        running.node.fetcher.settings = running.node.fetcher.settings.__class__(retry_s=0.01, starve_s=0.05)
        await until(lambda: any("version 0 of the model" in beat.state for beat in coordinator.beats.values()))
        assert not coordinator.granted and coordinator.beats[running.host.peer_id].held_version is None
        weights.write_bytes(kept)
        await until(lambda: coordinator.accepted)


async def test_pieces_come_from_another_node_when_the_coordinator_has_lost_them(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    coordinator = swarm.coordinator
    coordinator.publish(0)
    async with swarm.serving(), swarm.node("first", outbound_only=False) as first:
        await until(lambda: first.node.policies.newest == 0)
        await until(lambda: len(swarm.directory) == 1)
        (coordinator.store.version_folder(0) / ArtifactKind.SAFETENSORS.file_name).unlink()
        async with swarm.node("second") as second:
            await until(lambda: second.node.policies.newest == 0)
            status = second.node.status()
            assert status.bytes_fetched_peers > 200_000 and status.bytes_fetched_coordinator == 0
            assert first.node.blobs.bytes_served >= status.bytes_fetched_peers


async def test_old_versions_are_deleted_and_those_within_the_staleness_limit_kept(tmp_path: Path):
    swarm = make_swarm(tmp_path, max_staleness=1)
    coordinator = swarm.coordinator
    async with swarm.serving(), swarm.node() as running:
        for version in range(6):
            coordinator.publish(version)
            await until(lambda version=version: version in running.puppet.loaded)
        await until(lambda: running.node.store.complete_versions(ArtifactKind.SAFETENSORS) == [4, 5])


async def test_a_restarted_node_refuses_to_go_back(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    coordinator = swarm.coordinator
    coordinator.publish(3)
    coordinator.publish(4)
    async with swarm.serving():
        async with swarm.node() as running:
            await until(lambda: 4 in running.puppet.loaded)
        coordinator.welcome_with = 3
        puppet = PuppetBackend()
        async with swarm.node(puppet=puppet) as running:
            await until(lambda: puppet.loaded)
            await until(lambda: any("rollback" in line for line in running.lines))
        assert puppet.loaded == [4]
