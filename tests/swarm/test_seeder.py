"""A peer that only stores and serves: what it holds, whom it serves, and what it survives."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import pytest

from echo_node.config import NodeConfig
from echo_node.node import Outcome
from echo_node.seeder import Seeder, SeederSeams
from echo_node.status import summary_lines
from echo_swarm.clock import Clock, SystemClock
from echo_swarm.directory.memory import MemoryDirectory
from echo_swarm.identity import Identity
from echo_swarm.manifest import ArtifactKind
from echo_swarm.transport.memory import MemoryHost
from echo_swarm.work import Role
from tests.swarm.support.node_harness import PATIENCE_S, SetClock, Swarm, make_swarm, until

pytestmark = pytest.mark.anyio

GGUF = {"q8_0": b"GGUF" + bytes(300_000)}


@dataclass(kw_only=True)
class RunningSeeder:
    seeder: Seeder
    host: MemoryHost
    lines: list[str]
    outcome: Outcome | None = None
    ended: anyio.Event = field(default_factory=anyio.Event)


@asynccontextmanager
async def seeding(
    swarm: Swarm, name: str = "seeder", *, clock: Clock | None = None, **settings: Any
) -> AsyncGenerator[RunningSeeder]:
    """Run a seeder; leaving the block kills it."""
    identity = Identity.from_seed(name.encode().ljust(32, b"."))
    lines: list[str] = []
    async with swarm.network.host(identity) as host, anyio.create_task_group() as tasks:
        clock = clock or SystemClock()
        seams = SeederSeams(
            host=host,
            directory=MemoryDirectory(swarm.directory, identity, clock),
            identity=identity,
            clock=clock,
            emit=lines.append,
        )
        config = NodeConfig(state_dir=swarm.folder / name, role=Role.SEEDER, **settings)
        running = RunningSeeder(seeder=Seeder(config, swarm.coordinator.invite(), seams), host=host, lines=lines)

        async def run() -> None:
            running.outcome = await running.seeder.run()
            running.ended.set()

        tasks.start_soon(run)
        yield running
        tasks.cancel_scope.cancel()
        running.seeder.store.close()


def holds(running: RunningSeeder, version: int) -> bool:
    return version in running.seeder.status().held_versions


async def test_how_long_a_seeder_served_is_told_right_though_its_clock_was_set_meanwhile(tmp_path: Path):
    swarm, clock = make_swarm(tmp_path), SetClock()
    async with seeding(swarm, clock=clock) as running:
        clock.wall_ahead_s -= 5 * 3600.0  # Somebody sets it; no time passes.
        clock.wall_ahead_s += 7200.0  # Two hours pass on both.
        clock.monotonic_ahead_s += 7200.0
        assert summary_lines(running.seeder.status())[0].startswith("seeded for 2 h")


async def test_a_seeder_holds_every_file_of_a_version_and_asks_for_no_work(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    swarm.coordinator.publish(0, gguf=GGUF)
    async with swarm.serving(), seeding(swarm) as running:
        await until(lambda: running.seeder.policies.newest == 0)
        store = running.seeder.store
        assert store.artifact_path(0, ArtifactKind.SAFETENSORS) and store.artifact_path(0, ArtifactKind.GGUF, "q8_0")
        (hello,) = swarm.coordinator.hellos
        assert (hello.role, hello.backend) == (Role.SEEDER, None)
        assert hello.addresses
        await until(lambda: running.host.peer_id in swarm.coordinator.beats)
    assert swarm.coordinator.granted == {}


async def test_a_seeder_holds_only_the_kinds_it_was_told_to(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    swarm.coordinator.publish(0, gguf=GGUF)
    async with swarm.serving(), seeding(swarm, hold=("gguf",)) as running:
        await until(lambda: running.seeder.policies.newest == 0)
        assert running.seeder.store.artifact_path(0, ArtifactKind.SAFETENSORS) is None
        assert running.seeder.store.artifact_path(0, ArtifactKind.GGUF, "q8_0") is not None


async def test_a_node_gets_a_version_from_a_seeder_when_the_coordinator_gives_no_pieces(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    swarm.coordinator.publish(0)
    async with swarm.serving(), seeding(swarm) as running:
        await until(lambda: running.seeder.policies.newest == 0 and len(swarm.directory))
        (swarm.coordinator.store.version_folder(0) / ArtifactKind.SAFETENSORS.file_name).unlink()
        async with swarm.node() as node:
            await until(lambda: node.node.policies.newest == 0)
            status = node.node.status()
            assert status.bytes_fetched_peers > 200_000 and status.bytes_fetched_coordinator == 0
        assert running.seeder.status().bytes_served >= 200_000


async def test_a_seeder_shows_and_tells_how_each_file_comes(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    async with swarm.serving(), seeding(swarm) as running:
        watched: list[str] = []
        begin = running.seeder.transfers.begin
        running.seeder.transfers.begin = lambda name: (watched.append(name), begin(name))[1]
        swarm.coordinator.publish(0, gguf=GGUF)
        signed = swarm.coordinator.store.manifest(0)
        assert signed is not None
        await until(lambda: running.seeder.policies.newest == 0)
        assert watched == ["model.safetensors of version 0", "model-q8_0.gguf of version 0"]
        told = running.seeder.report.beat().transfers
    artifacts = signed.message.artifacts
    assert [entry.digest for entry in told] == [artifact.digest for artifact in artifacts]
    for entry, artifact in zip(told, artifacts, strict=True):
        assert entry.whole and entry.fetched.coordinator > 0
        assert entry.fetched.coordinator + entry.disk_bytes == artifact.size_bytes


async def test_a_seeder_deletes_the_oldest_versions_to_stay_within_its_quota(tmp_path: Path):
    swarm = make_swarm(tmp_path, max_staleness=8)
    quota = 2_200_000
    async with swarm.serving(), seeding(swarm, max_store_bytes=quota) as running:
        for version in range(5):
            swarm.coordinator.publish(version, size_bytes=800_000)
            await until(lambda version=version: running.seeder.policies.newest == version)
            assert running.seeder.store.used_bytes() <= quota
        assert running.seeder.status().held_versions == (3, 4)


async def test_a_quota_that_takes_one_version_goes_to_the_newest(tmp_path: Path):
    swarm = make_swarm(tmp_path, max_staleness=8)
    async with swarm.serving(), seeding(swarm, max_store_bytes=1_200_000) as running:
        for version in range(3):
            swarm.coordinator.publish(version, size_bytes=800_000)
            await until(lambda version=version: running.seeder.policies.newest == version)
        assert running.seeder.status().held_versions == (2,)


async def test_a_version_that_can_never_fit_costs_a_seeder_nothing_it_has(tmp_path: Path):
    swarm = make_swarm(tmp_path, max_staleness=8)
    async with swarm.serving(), seeding(swarm, max_store_bytes=1_200_000) as running:
        swarm.coordinator.publish(0, size_bytes=800_000)
        await until(lambda: running.seeder.policies.newest == 0)
        swarm.coordinator.publish(1, size_bytes=1_600_000)
        await until(lambda: any("raise the quota" in line for line in running.lines))
        assert running.seeder.status().held_versions == (0,)


async def test_what_fits_is_held_and_what_does_not_is_named(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    swarm.coordinator.publish(0, size_bytes=900_000, gguf={"q8_0": b"GGUF" + bytes(900_000)})
    async with swarm.serving(), seeding(swarm, max_store_bytes=1_200_000) as running:
        await until(lambda: running.seeder.policies.newest == 0)
        assert running.seeder.store.artifact_path(0, ArtifactKind.SAFETENSORS) is not None
    assert sum("gguf q8_0 is left out" in line for line in running.lines) == 1


async def test_a_seeder_keeps_the_versions_that_may_still_count(tmp_path: Path):
    swarm = make_swarm(tmp_path, max_staleness=1)
    async with swarm.serving(), seeding(swarm) as running:
        for version in range(4):
            swarm.coordinator.publish(version)
            await until(lambda version=version: running.seeder.policies.newest == version)
        await until(lambda: running.seeder.status().held_versions == (2, 3))


async def test_a_seeder_that_was_here_before_serves_without_a_coordinator(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    swarm.coordinator.publish(0)
    async with swarm.serving(), seeding(swarm) as running:
        await until(lambda: running.seeder.policies.newest == 0)
    async with seeding(swarm) as again:
        await until(lambda: again.seeder.policies.newest == 0)
        assert holds(again, 0)
        assert not again.ended.is_set()


async def test_a_seeder_leaves_with_a_goodbye_when_told_and_when_the_run_is_over(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    swarm.coordinator.publish(0)
    async with swarm.serving():
        async with seeding(swarm, "one") as one:
            await until(lambda: one.seeder.policies.newest == 0)
            one.seeder.stop()
            with anyio.fail_after(PATIENCE_S):
                await one.ended.wait()
            assert one.outcome is Outcome.STOPPED and one.host.peer_id in swarm.coordinator.left
        async with seeding(swarm, "two") as two:
            await until(lambda: two.seeder.policies.newest == 0)
            swarm.coordinator.finished = True
            with anyio.fail_after(PATIENCE_S):
                await two.ended.wait()
            assert two.outcome is Outcome.FINISHED
