"""Versions that travel as deltas: the cheapest way is taken, and whatever goes wrong with it, the version comes."""

from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
import pytest

from echo_coordinator.publisher import Publisher
from echo_swarm.checkpoint.delta.obtain import ByDelta
from echo_swarm.checkpoint.fetch import Fetcher, FetchReport
from echo_swarm.checkpoint.serve import BlobServer
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.checkpoint.watch import FetchWatch, Stage
from echo_swarm.clock import ManualClock
from echo_swarm.errors import StorageFull, Unavailable
from echo_swarm.identity import Identity, PeerId
from echo_swarm.manifest import ArtifactKind
from echo_swarm.transport.memory import MemoryNetwork
from tests.swarm.test_checkpoint_exchange import QUICK, RUN_ID
from tests.unit.publisher.test_publish import drifted

pytestmark = pytest.mark.anyio

SAFETENSORS = ArtifactKind.SAFETENSORS
SIZE = 2_500_000


class Run:
    """A publisher that serves, and nodes that fetch from it and from each other."""

    def __init__(self, folder: Path, stack: AsyncExitStack, *, versions: int, deltas: bool) -> None:
        self.folder = folder
        self.stack = stack
        self.versions = versions
        self.deltas = deltas
        self.network = MemoryNetwork()
        self.manifests = {}
        self.forgotten: set[int] = set()

    async def publish(self) -> None:
        self.store = VersionStore(self.folder / "coordinator", RUN_ID)
        publisher = Publisher(
            identity=Identity.from_seed(bytes(32)),
            store=self.store,
            clock=ManualClock(),
            max_staleness=8,
            keep_versions=20,
            deltas=self.deltas,
        )
        for version in range(self.versions):
            self.manifests[version] = await publisher.publish(version, drifted(self.folder, version, size=SIZE))
        self.coordinator = await self.stack.enter_async_context(self.network.host(Identity.generate()))
        self.server = await self.stack.enter_async_context(BlobServer(self.coordinator, self.store))

    async def node(self, name: str, **options) -> "Node":
        host = await self.stack.enter_async_context(self.network.host(Identity.generate()))
        store = VersionStore(self.folder / name, RUN_ID, **options)
        self.stack.callback(store.close)
        await self.stack.enter_async_context(BlobServer(host, store))
        return Node(self, host, store)

    def content(self, version: int) -> bytes:
        return (self.folder / f"drifted{version}.safetensors").read_bytes()


class Node:
    def __init__(self, run: Run, host, store: VersionStore) -> None:
        self.run = run
        self.host = host
        self.store = store
        self.fetcher = Fetcher(host, store, coordinator=run.coordinator.peer_id, settings=QUICK)
        self.sources: list[PeerId] = [run.coordinator.peer_id]

    async def manifest_of(self, version: int):
        if version in self.run.forgotten:
            raise Unavailable(f"nobody has version {version}")
        return self.run.manifests[version]

    async def fetch(self, version: int, watch: FetchWatch | None = None) -> FetchReport:
        async def providers(_digest: bytes):
            return self.sources

        way = ByDelta(self.fetcher, self.store, providers_of=providers, manifest_of=self.manifest_of, watch=watch)
        signed, artifact = self.run.manifests[version], self.run.manifests[version].message.artifacts[0]
        with anyio.fail_after(60):
            report = await self.fetcher.fetch(signed, artifact, self.sources, fill=way.fill, watch=watch)
        assert report.path is not None and report.path.read_bytes() == self.run.content(version)
        return report


@asynccontextmanager
async def run_in(folder: Path, *, versions: int, deltas: bool = True):
    async with AsyncExitStack() as stack:
        run = Run(folder, stack, versions=versions, deltas=deltas)
        await run.publish()
        yield run


def size_of(run: Run, version: int) -> int:
    return run.manifests[version].message.artifacts[0].size_bytes


async def test_a_version_step_costs_a_few_percent_of_a_cold_start(tmp_path: Path) -> None:
    async with run_in(tmp_path, versions=2) as run:
        node = await run.node("node")
        cold = await node.fetch(0)
        assert cold.delta_bytes == cold.made_bytes == 0
        step = await node.fetch(1)
        assert step.made_bytes == size_of(run, 1) and not step.bytes_by_source and not step.delta_fault
        assert 0 < step.delta_bytes < 0.05 * size_of(run, 1)
        assert run.server.bytes_served == size_of(run, 0) + step.delta_bytes


async def test_a_node_that_missed_versions_takes_a_chain_and_writes_only_the_last(tmp_path: Path) -> None:
    async with run_in(tmp_path, versions=6) as run:
        node = await run.node("node")
        await node.fetch(0)
        step = await node.fetch(5)
        deltas = [run.manifests[version].message.artifacts[1].size_bytes for version in range(1, 6)]
        assert (step.made_bytes, step.delta_bytes) == (size_of(run, 5), sum(deltas))
        assert node.store.complete_versions(SAFETENSORS) == [0, 5]


class Watched(FetchWatch):
    """Remembers how far each stage came: (change, stage) → (bytes, of how many)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[int, Stage], tuple[int, int]] = {}

    def enter(self, stage: Stage, total_bytes: int, done_bytes: int = 0) -> None:
        super().enter(stage, total_bytes, done_bytes)
        self.advance(done_bytes)

    def advance(self, done_bytes: int) -> None:
        super().advance(done_bytes)
        self.seen[self.change, self.stage] = (done_bytes, self.total_bytes)


async def test_each_stage_of_a_chain_tells_how_far_it_is_in_bytes_of_its_own(tmp_path: Path) -> None:
    async with run_in(tmp_path, versions=3) as run:
        node = await run.node("node")
        await node.fetch(0)
        await node.fetch(2, watch := Watched())
        size, deltas = size_of(run, 2), [run.manifests[v].message.artifacts[1].size_bytes for v in (1, 2)]
        assert watch.seen == {
            (0, Stage.CHECKING): (0, size),  # Of the base, which this process has checked before.
            (1, Stage.CHECKING): (0, deltas[0]),
            (1, Stage.FETCHING): (deltas[0], deltas[0]),
            (1, Stage.VERIFYING): (deltas[0], deltas[0]),
            (2, Stage.CHECKING): (0, deltas[1]),
            (2, Stage.FETCHING): (deltas[1], deltas[1]),
            (2, Stage.VERIFYING): (deltas[1], deltas[1]),
            (0, Stage.APPLYING): (size, size),
            (0, Stage.FETCHING): (size, size),
            (0, Stage.VERIFYING): (size, size),
        }
        again = await run.node("node")  # Another process: what lies there is hashed, and that is told too.
        await again.fetch(2, watch := Watched())
        assert watch.seen == {(0, Stage.CHECKING): (size, size)}


async def test_a_node_that_made_a_version_serves_both_forms_of_it(tmp_path: Path) -> None:
    async with run_in(tmp_path, versions=2) as run:
        first, second, third = [await run.node(name) for name in ("a", "b", "c")]
        await first.fetch(0)
        await first.fetch(1)
        before = run.server.bytes_served
        for node in (second, third):
            node.sources = [first.host.peer_id]
            node.fetcher = Fetcher(node.host, node.store, settings=QUICK)
        assert (await second.fetch(1)).bytes_by_source == {first.host.peer_id: size_of(run, 1)}
        await third.fetch(0)
        assert (await third.fetch(1)).made_bytes == size_of(run, 1)
        assert run.server.bytes_served == before


async def test_the_whole_file_is_fetched_where_no_chain_is_cheaper(tmp_path: Path) -> None:
    async with run_in(tmp_path, versions=4) as run:
        node = await run.node("node")
        fresh = await node.fetch(2)
        assert fresh.bytes_by_source == {run.coordinator.peer_id: size_of(run, 2)}
        other = await run.node("other")
        await other.fetch(0)
        run.forgotten = {1}
        assert not (await other.fetch(3)).made_bytes
        assert other.store.complete_versions(SAFETENSORS) == [0, 3]


async def test_without_deltas_everything_works_as_before(tmp_path: Path) -> None:
    async with run_in(tmp_path, versions=2, deltas=False) as run:
        node = await run.node("node")
        await node.fetch(0)
        assert (await node.fetch(1)).bytes_by_source == {run.coordinator.peer_id: size_of(run, 1)}


async def test_a_base_that_was_damaged_on_this_disk_is_noticed_and_the_whole_file_comes(tmp_path: Path) -> None:
    async with run_in(tmp_path, versions=2) as run:
        await (await run.node("node")).fetch(0)
        again = await run.node("node")  # Another process: what it finds has not been hashed by it.
        path = again.store.artifact_path(0, SAFETENSORS)
        assert path is not None
        with path.open("r+b") as file:
            file.seek(1_000_000)
            file.write(b"rot")
        report = await again.fetch(1)
        assert "damaged" in report.delta_fault
        assert report.bytes_by_source and not report.made_bytes


async def test_a_base_that_rots_after_it_was_checked_makes_no_wrong_piece(tmp_path: Path) -> None:
    async with run_in(tmp_path, versions=2) as run:
        node = await run.node("node")
        await node.fetch(0)
        path = node.store.artifact_path(0, SAFETENSORS)
        assert path is not None
        with path.open("r+b") as file:
            file.seek(2_000_000)
            file.write(b"rot")
        report = await node.fetch(1)
        assert "another digest" in report.delta_fault
        assert report.bytes_by_source


async def test_a_delta_that_nobody_gives_is_not_waited_for_long(tmp_path: Path) -> None:
    async with run_in(tmp_path, versions=2) as run:
        node = await run.node("node")
        await node.fetch(0)
        delta = run.store.whole(run.manifests[1].message.artifacts[1].digest)
        assert delta is not None
        delta.unlink()
        report = await node.fetch(1)
        assert "no source is left" in report.delta_fault
        assert report.bytes_by_source == {run.coordinator.peer_id: size_of(run, 1)}


async def test_nodes_that_could_only_wait_for_each_others_delta_fetch_the_whole_file(tmp_path: Path) -> None:
    async with run_in(tmp_path, versions=2) as run:
        nodes = [await run.node("a"), await run.node("b")]
        for node in nodes:
            await node.fetch(0)
            node.sources = [run.coordinator.peer_id, *(other.host.peer_id for other in nodes)]
        delta = run.store.whole(run.manifests[1].message.artifacts[1].digest)
        assert delta is not None
        delta.unlink()
        reports = []

        async def fetch(node: Node) -> None:
            reports.append(await node.fetch(1))

        async with anyio.create_task_group() as tasks:
            for node in nodes:
                tasks.start_soon(fetch, node)
        assert all("no source is left" in report.delta_fault for report in reports)


async def test_what_a_kill_left_of_a_version_made_by_delta_is_kept(tmp_path: Path) -> None:
    async with run_in(tmp_path, versions=2) as run:
        node = await run.node("node")
        await node.fetch(0)
        signed = run.manifests[1]
        node.store.add(signed)
        artifact, content = signed.message.artifacts[0], run.content(1)
        partial = node.store.open_partial(1, artifact)
        for index in range(0, artifact.piece_count, 3):
            start = index * artifact.piece_bytes
            partial.write(index, content[start : start + artifact.piece_bytes])
        done = partial.done_bytes
        node.store.close_partial(partial)
        step = await (await run.node("node")).fetch(1)
        assert step.resumed_bytes == done and step.made_bytes == artifact.size_bytes - done


async def test_no_room_for_the_version_is_said_and_no_room_for_its_delta_costs_only_the_delta(tmp_path: Path) -> None:
    async with run_in(tmp_path, versions=2) as run:
        sizes = [artifact.size_bytes for artifact in run.manifests[1].message.artifacts]
        small = await run.node("small", quota_bytes=2 * sizes[0] + sizes[1] // 2)
        await small.fetch(0)
        small.store.set_in_use([0])
        report = await small.fetch(1)
        assert "quota" in report.delta_fault and report.bytes_by_source
        tiny = await run.node("tiny", quota_bytes=sizes[0] + sizes[1])
        await tiny.fetch(0)
        tiny.store.set_in_use([0])
        with pytest.raises(StorageFull):
            await tiny.fetch(1)
