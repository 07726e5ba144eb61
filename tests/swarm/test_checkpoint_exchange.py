"""Versions that move between peers on an in-memory network."""

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import anyio
import pytest

from echo_swarm.checkpoint.blob import BLOB_PROTOCOL, BlobClient, HaveReply, HaveRequest, PieceReply, PieceRequest
from echo_swarm.checkpoint.fetch import Fetcher, FetchSettings, SourcesExhausted
from echo_swarm.checkpoint.interest import InterestBook
from echo_swarm.checkpoint.pieces import PieceMap
from echo_swarm.checkpoint.rate import BURST_S
from echo_swarm.checkpoint.serve import BlobServer
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.checkpoint.trust import TrustedHead
from echo_swarm.envelope import Signed, seal, unseal
from echo_swarm.errors import MalformedMessage, RemoteError, StorageFull
from echo_swarm.identity import Identity
from echo_swarm.manifest import (
    MANIFEST_LIMITS,
    Artifact,
    ArtifactKind,
    CheckpointManifest,
    digest_of_pieces,
    sha256,
)
from echo_swarm.transport.memory import MemoryNetwork
from echo_swarm.transport.rpc import RpcServer, typed
from tests.swarm.support.node_harness import until

pytestmark = pytest.mark.anyio

RUN_ID = "0123456789abcdef" * 2
PIECE = 1 << 16
QUICK = FetchSettings(answer_timeout_s=1.0, retry_s=0.01, refresh_s=0.02, providers_every_s=0.02, starve_s=0.3)


@dataclass(frozen=True, kw_only=True)
class Version:
    """A version with its content."""

    signed: Signed[CheckpointManifest]
    data: bytes

    @property
    def artifact(self) -> Artifact:
        return self.signed.message.artifacts[0]

    def piece(self, index: int) -> bytes:
        return self.data[index * PIECE : (index + 1) * PIECE]


def version_of(number: int, *, pieces: int = 20, data: bytes | None = None, run_key: Identity | None = None) -> Version:
    data = Random(number).randbytes(PIECE * pieces - 100) if data is None else data
    digests = [sha256(data[i : i + PIECE]) for i in range(0, len(data), PIECE)]
    artifact = Artifact(
        kind=ArtifactKind.GGUF,
        precision="float32",
        size_bytes=len(data),
        digest=sha256(data),
        piece_bytes=PIECE,
        piece_digests=digest_of_pieces(digests),
        layout_digest=bytes(32),
    )
    manifest = CheckpointManifest(
        run_id=RUN_ID, policy_version=number, parent_digest=None, issued_at=1.0, expires_at=2.0, artifacts=(artifact,)
    )
    raw = seal(run_key or Identity.from_seed(bytes(32)), manifest)
    return Version(signed=unseal(raw, CheckpointManifest, MANIFEST_LIMITS), data=data)


def fill(store: VersionStore, version: Version, indexes=None) -> None:
    """Put a version, or some pieces of it as an open download, into a store."""
    store.add(version.signed)
    partial = store.open_partial(version.signed.message.policy_version, version.artifact)
    for index in range(version.artifact.piece_count) if indexes is None else indexes:
        partial.write(index, version.piece(index))
    if indexes is None:
        assert store.finish_partial(partial)
        store.close_partial(partial)
        store.save_head(version.signed)


class Swarm:
    """Hosts, stores and servers that live as long as a test."""

    def __init__(self, folder: Path, stack: AsyncExitStack, network: MemoryNetwork) -> None:
        self.network = network
        self._folder = folder
        self._stack = stack
        self._count = 0

    async def host(self, **options):
        return await self._stack.enter_async_context(self.network.host(Identity.generate(), **options))

    def store(self, **options) -> VersionStore:
        self._count += 1
        store = VersionStore(self._folder / str(self._count), RUN_ID, **options)
        self._stack.callback(store.close)
        return store

    async def seeder(self, version: Version, indexes=None) -> BlobServer:
        host, store = await self.host(), self.store()
        fill(store, version, indexes)
        server = await self._stack.enter_async_context(BlobServer(host, store))
        server.peer = host.peer_id
        server.store = store
        return server

    async def impostor(self, version: Version, piece, have=None):
        """A peer that answers as it likes. `piece(index)` returns bytes, raises, or waits."""
        host = await self.host()
        rpc = RpcServer(host, BLOB_PROTOCOL, max_request_bytes=4096)
        packed = PieceMap.full(version.artifact.piece_count).pack() if have is None else have

        async def on_have(_peer, _request):
            return HaveReply(pieces=packed, peers=())

        async def on_piece(_peer, request):
            return PieceReply(data=await piece(request.index))

        rpc.method("have", typed(HaveRequest, on_have))
        rpc.method("piece", typed(PieceRequest, on_piece))
        await self._stack.enter_async_context(rpc)
        return host.peer_id

    async def fetcher(self, *, store=None, settings=QUICK, **options) -> Fetcher:
        host = await self.host(outbound_only=True)
        fetcher = Fetcher(host, store or self.store(), settings=settings, seed=1, **options)
        fetcher.store = fetcher._store
        return fetcher


@asynccontextmanager
async def swarm_in(folder: Path, **options):
    async with AsyncExitStack() as stack:
        yield Swarm(folder, stack, MemoryNetwork(**options))


async def fetched(fetcher: Fetcher, version: Version, sources, **options):
    with anyio.fail_after(120):
        report = await fetcher.fetch(version.signed, version.artifact, sources, **options)
    assert report.path.read_bytes() == version.data
    return report


async def test_a_version_travels_from_one_store_to_another(tmp_path):
    version = version_of(3)
    async with swarm_in(tmp_path) as swarm:
        seeder, fetcher = await swarm.seeder(version), await swarm.fetcher()
        seen = []
        report = await fetched(fetcher, version, [seeder.peer], progress=lambda done, total: seen.append((done, total)))
        assert report.bytes_by_source == {seeder.peer: len(version.data)} == fetcher.bytes_by_source
        assert seeder.bytes_served == sum(seeder.bytes_by_peer.values()) >= len(version.data)
        assert seen[-1] == (len(version.data), len(version.data)) and seen == sorted(seen) and len(seen) > 3
        again = await fetched(fetcher, version, [])
        assert again.bytes_by_source == {} and again.path == report.path


async def test_the_manifest_and_the_run_are_served_and_checked(tmp_path):
    key = Identity.generate()
    version = version_of(3, run_key=key)
    async with swarm_in(tmp_path) as swarm:
        seeder, host = await swarm.seeder(version), await swarm.host()
        seeder.store.save_run(b"run")
        async with BlobClient(host, seeder.peer) as client:
            assert await client.run(RUN_ID, timeout_s=5) == b"run"
            head = TrustedHead(run_id=RUN_ID, publisher_key=key.public_key)
            assert head.update(await client.manifest(RUN_ID, timeout_s=5), 0.0).digest == version.signed.digest
            assert await client.manifest(RUN_ID, 3, timeout_s=5) == version.signed.raw
            for code, call in {
                "not_found": lambda: client.manifest(RUN_ID, 4, timeout_s=5),
                "unknown_run": lambda: client.manifest("f" * 32, timeout_s=5),
            }.items():
                with pytest.raises(RemoteError) as caught:
                    await call()
                assert caught.value.code == code
            with pytest.raises(RemoteError, match="not_found"):
                await client.have(bytes(32), timeout_s=5)
            with pytest.raises(RemoteError, match="not_found"):
                await client.piece(version.artifact.digest, 20, timeout_s=5)


async def test_pieces_come_from_peers_while_they_are_still_downloading(tmp_path):
    version = version_of(1)
    async with swarm_in(tmp_path) as swarm:
        half = await swarm.seeder(version, range(10))
        other = await swarm.seeder(version, range(8, 20))
        coordinator = await swarm.seeder(version)
        fetcher = await swarm.fetcher(coordinator=coordinator.peer)
        report = await fetched(fetcher, version, [half.peer, other.peer, coordinator.peer])
        assert report.bytes_by_source[half.peer] >= PIECE and report.bytes_by_source[other.peer] >= PIECE
        report = await fetched(await swarm.fetcher(), version, [half.peer, other.peer])
        assert set(report.bytes_by_source) == {half.peer, other.peer}


async def test_a_group_that_starts_together_spares_the_coordinator(tmp_path):
    version = version_of(1, pieces=40)
    async with swarm_in(tmp_path) as swarm:
        coordinator = await swarm.seeder(version)
        nodes = []
        for seed in range(4):
            host, store = await swarm.host(), swarm.store()
            await swarm._stack.enter_async_context(BlobServer(host, store))
            nodes.append(Fetcher(host, store, coordinator=coordinator.peer, settings=QUICK, seed=seed))
        peers = [coordinator.peer, *(node._host.peer_id for node in nodes)]
        async with anyio.create_task_group() as tasks:
            for node in nodes:
                tasks.start_soon(fetched, node, version, peers)
        assert coordinator.bytes_served < 4 * len(version.data)
        assert sum(sum(v for k, v in node.bytes_by_source.items() if k != coordinator.peer) for node in nodes) > 0


async def test_a_group_that_knows_only_the_coordinator_finds_each_other_and_takes_little_more_than_one_copy_of_it(
    tmp_path,
):
    version = version_of(1, pieces=60)
    async with swarm_in(tmp_path) as swarm:
        host, store = await swarm.host(), swarm.store()
        fill(store, version)
        server = BlobServer(host, store, allocates=True, max_bytes_per_s=len(version.data) / 2)
        await swarm._stack.enter_async_context(server)
        nodes = []
        for number in range(5):
            interest, node_store = InterestBook(), swarm.store()
            node = await swarm.host(outbound_only=number == 0)
            await node.connect(host.addresses[0], timeout_s=1)
            await swarm._stack.enter_async_context(BlobServer(node, node_store, interest=interest))
            nodes.append(
                Fetcher(node, node_store, coordinator=host.peer_id, settings=QUICK, seed=number, interest=interest)
            )
        reports = []

        async def fetch(node):
            reports.append(await fetched(node, version, [host.peer_id]))

        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                for node in nodes:
                    tasks.start_soon(fetch, node)
        assert all(report.path.read_bytes() == version.data for report in reports)
        assert server.bytes_served < 2 * len(version.data), server.bytes_served / len(version.data)
        hidden = nodes[0]._host.peer_id
        assert sum(report.bytes_by_source.get(hidden, 0) for report in reports) > 0


async def test_peers_that_could_only_wait_for_each_other_end_and_go_on_when_the_coordinator_is_back(tmp_path):
    version = version_of(1, pieces=40)
    async with swarm_in(tmp_path) as swarm:
        identity, store = Identity.generate(), swarm.store()
        fill(store, version)
        nodes, outcomes = [], []
        for number in range(2):
            interest, node_store = InterestBook(), swarm.store()
            host = await swarm.host()
            await swarm._stack.enter_async_context(BlobServer(host, node_store, interest=interest))
            nodes.append(
                Fetcher(host, node_store, coordinator=identity.peer_id, settings=QUICK, seed=number, interest=interest)
            )

        async def fetch(node):
            async def sources():
                return [identity.peer_id, *(other._host.peer_id for other in nodes)]

            try:
                outcomes.append(await fetched(node, version, sources))
            except SourcesExhausted as e:
                outcomes.append(e)

        async def fetch_all():
            outcomes.clear()
            async with anyio.create_task_group() as tasks:
                for node in nodes:
                    tasks.start_soon(fetch, node)

        async with (
            anyio.create_task_group() as tasks,
            swarm.network.host(identity) as host,
            BlobServer(host, store, allocates=True, max_bytes_per_s=500_000) as server,
        ):
            tasks.start_soon(fetch_all)
            await until(lambda: server.bytes_served >= 10 * PIECE)
        assert [type(outcome) for outcome in outcomes] == [SourcesExhausted] * 2
        async with swarm.network.host(identity) as host, BlobServer(host, store, allocates=True):
            await fetch_all()
        assert all(outcome.resumed_bytes > 0 for outcome in outcomes)


async def test_limits_on_what_is_given_and_taken_hold_and_lose_nothing(tmp_path):
    version = version_of(1, pieces=20)
    size = len(version.data)
    async with swarm_in(tmp_path) as swarm:
        seeders = [await swarm.seeder(version) for _ in range(3)]
        limited = replace(QUICK, max_bytes_per_s=2 * size)
        fetcher = await swarm.fetcher(settings=limited)
        report = await fetched(fetcher, version, [seeder.peer for seeder in seeders])
        assert report.seconds >= 0.5 - BURST_S - 0.05 and report.wasted_bytes == 0
        host, store = await swarm.host(), swarm.store()
        fill(store, version)
        slow = await swarm._stack.enter_async_context(BlobServer(host, store, max_bytes_per_s=2 * size))
        report = await fetched(await swarm.fetcher(), version, [host.peer_id])
        assert report.seconds >= 0.5 - BURST_S - 0.05
        assert slow.bytes_served == size + report.wasted_bytes


async def test_one_flipped_byte_is_refetched_from_another_source_and_the_liar_is_named_and_avoided(tmp_path):
    version = version_of(1)

    async def flip(index):
        data = bytearray(version.piece(index))
        data[len(data) // 2] ^= 1
        return bytes(data)

    async with swarm_in(tmp_path) as swarm:
        old = version_of(0)
        store = swarm.store()
        fill(store, old)
        liar = await swarm.impostor(version, flip)
        fetcher = await swarm.fetcher(store=store)
        with pytest.raises(SourcesExhausted, match="another digest") as caught:
            await fetched(fetcher, version, [liar])
        assert list(caught.value.report.liars) == [liar]
        assert store.read_piece(old.artifact.digest, 0) == old.piece(0)
        honest = await swarm.seeder(version)
        report = await fetched(fetcher, version, [liar, honest.peer])
        assert report.bytes_by_source == {honest.peer: len(version.data)}
        assert "another digest" in report.liars[liar]
        assert report.wasted_bytes == 0


@pytest.mark.parametrize("reply", [b"", b"short", bytes(PIECE + 1)])
async def test_an_empty_or_odd_reply_is_no_piece(tmp_path, reply):
    version = version_of(1, pieces=3)

    async def answer(_index):
        return reply

    async with swarm_in(tmp_path) as swarm:
        liar, honest = await swarm.impostor(version, answer), await swarm.seeder(version)
        report = await fetched(await swarm.fetcher(), version, [liar, honest.peer])
        assert report.bytes_by_source == {honest.peer: len(version.data)}


async def test_bad_silent_absent_and_empty_sources_cost_no_sum_of_timeouts(tmp_path):
    version = version_of(1)
    forever = FetchSettings(answer_timeout_s=3600.0, retry_s=0.01, refresh_s=0.02)

    async def wrong(_index):
        return bytes(PIECE)

    async def silent(_index):
        await anyio.sleep_forever()

    async with swarm_in(tmp_path) as swarm:
        without = [(await swarm.seeder(version_of(0))).peer for _ in range(3)]
        gone = Identity.generate().peer_id
        liar, stalled = await swarm.impostor(version, wrong), await swarm.impostor(version, silent)
        honest = await swarm.seeder(version)
        fetcher = await swarm.fetcher(settings=forever)
        report = await fetched(fetcher, version, [*without, gone, liar, stalled, honest.peer])
        assert report.bytes_by_source == {honest.peer: len(version.data)}
        # The stalled one held pieces that were asked of the honest one in the end, long before any deadline.


async def test_a_peer_that_claims_what_it_lacks_is_named(tmp_path):
    version = version_of(1)

    async def lacks(_index):
        raise RemoteError("not_found", "no")

    async with swarm_in(tmp_path) as swarm:
        boaster = await swarm.impostor(version, lacks)
        with pytest.raises(SourcesExhausted, match="does not give"):
            await fetched(await swarm.fetcher(), version, [boaster])
        honest = await swarm.seeder(version)
        await fetched(await swarm.fetcher(), version, [boaster, honest.peer])


async def test_a_peer_whose_piece_map_is_nonsense_is_named(tmp_path):
    version = version_of(1)

    async def never(_index):
        raise AssertionError("asked for a piece after a bad map")

    async with swarm_in(tmp_path) as swarm:
        liar = await swarm.impostor(version, never, have=b"\xff" * 50)
        honest = await swarm.seeder(version)
        report = await fetched(await swarm.fetcher(), version, [liar, honest.peer])
        assert liar not in report.bytes_by_source


async def test_without_a_source_the_error_names_each_and_why_and_a_later_try_goes_on(tmp_path):
    version = version_of(1)
    async with swarm_in(tmp_path) as swarm:
        partly = await swarm.seeder(version, range(7))
        other, gone = await swarm.seeder(version_of(0)), Identity.generate().peer_id
        fetcher = await swarm.fetcher()

        async def broken():
            return [partly.peer, other.peer, gone]

        got_seven = anyio.Event()

        async def first_try():
            with pytest.raises(SourcesExhausted) as caught, anyio.fail_after(120):
                await fetcher.fetch(
                    version.signed,
                    version.artifact,
                    broken,
                    progress=lambda done, _: got_seven.set() if done == 7 * PIECE else None,
                )
            message = str(caught.value)
            assert all(peer in message for peer in (partly.peer, other.peer, gone))
            assert "nothing of this artifact" in message and "no address known" in message

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(first_try)
            with anyio.fail_after(120):
                await got_seven.wait()
            # It has nothing more to give and goes away.
            partly.store.close_partial(partly.store._open[version.artifact.digest])
        assert fetcher.store.artifact_path(1, ArtifactKind.GGUF) is None
        honest = await swarm.seeder(version)
        report = await fetched(fetcher, version, [honest.peer])
        assert report.resumed_bytes == 7 * PIECE
        assert report.bytes_by_source == {honest.peer: len(version.data) - 7 * PIECE}


async def test_a_provider_that_appears_later_is_found(tmp_path):
    version = version_of(1)
    async with swarm_in(tmp_path) as swarm:
        known: list = []
        asked = anyio.Event()
        seeder = await swarm.seeder(version)

        async def providers():
            asked.set()
            return known

        async def appear():
            await asked.wait()
            known.append(seeder.peer)

        fetcher = await swarm.fetcher(settings=FetchSettings(retry_s=0.01, refresh_s=0.02))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(appear)
            await fetched(fetcher, version, providers)


async def test_the_directory_is_left_alone_while_enough_peers_have_something_to_give(tmp_path):
    version = version_of(1)
    async with swarm_in(tmp_path) as swarm:
        seeders = [(await swarm.seeder(version)).peer for _ in range(5)]
        for count, often in ((5, False), (3, True)):
            asked = 0

            async def providers(count: int = count):
                nonlocal asked
                asked += 1
                return seeders[:count]

            # It lasts for some thirty looks. One at the beginning, and on a busy machine a few before all five are met.
            settings = FetchSettings(providers_every_s=0.05, max_bytes_per_s=len(version.data) / 1.5)
            fetcher = await swarm.fetcher(settings=settings)
            await fetched(fetcher, version, providers)
            assert (asked > 8) is often


async def test_a_version_deleted_under_a_download_is_given_up_and_the_newest_is_fetched(tmp_path):
    versions = [version_of(number) for number in range(6)]
    async with swarm_in(tmp_path) as swarm:
        seeder = await swarm.seeder(versions[1])
        fetcher = await swarm.fetcher()

        def supersede(done: int, _total: int) -> None:
            if done == PIECE:
                for version in versions[2:]:
                    fill(seeder.store, version)
                seeder.store.retain(2, in_use=[])

        with pytest.raises(SourcesExhausted, match="nothing of this artifact"):
            await fetched(fetcher, versions[1], [seeder.peer], progress=supersede)
        await fetched(fetcher, versions[5], [seeder.peer])
        fetcher.store.retain(2, in_use=[5])
        assert fetcher.store.versions() == [5]


async def test_a_cancelled_download_can_be_made_again_and_equal_pieces_move_to_a_newer_version(tmp_path):
    first = version_of(1)
    second = version_of(2, data=first.data[: 10 * PIECE] + version_of(2).data[10 * PIECE :])
    async with swarm_in(tmp_path) as swarm:
        seeder = await swarm.seeder(first)
        fill(seeder.store, second)
        fetcher = await swarm.fetcher()
        scope = anyio.CancelScope()
        with scope:
            await fetcher.fetch(
                first.signed,
                first.artifact,
                [seeder.peer],
                progress=lambda done, _: scope.cancel() if done >= 5 * PIECE else None,
            )
        assert scope.cancelled_caught
        report = await fetched(fetcher, second, [seeder.peer])
        moved = report.copied_bytes
        assert moved % PIECE == 0 and report.bytes_by_source[seeder.peer] == len(second.data) - moved
        report = await fetched(fetcher, first, [seeder.peer])
        assert report.resumed_bytes >= 5 * PIECE
        # Between them, the two versions were sent once where they are equal.
        assert report.resumed_bytes + report.copied_bytes >= 10 * PIECE


async def test_a_full_disk_is_one_plain_error_and_the_old_version_stays(tmp_path):
    old, version = version_of(0), version_of(1)
    async with swarm_in(tmp_path) as swarm:
        seeder = await swarm.seeder(version)
        room = [1 << 20]
        store = swarm.store(free=lambda _: room[0])
        room[0] = 1 << 40
        fill(store, old)
        room[0] = 1 << 20
        fetcher = await swarm.fetcher(store=store)
        with pytest.raises(StorageFull, match="MB"):
            await fetched(fetcher, version, [seeder.peer])
        assert seeder.bytes_served == 0
        assert store.verify(0, ArtifactKind.GGUF)
        room[0] = 1 << 40
        await fetched(fetcher, version, [seeder.peer])


async def test_a_disk_that_fills_half_way_ends_the_fetch_with_one_error(tmp_path, monkeypatch):
    from echo_swarm.checkpoint import partial as module

    version = version_of(1)
    real, written = module._write_all, []

    def limited(file, data):
        written.append(len(data))
        if sum(written) > 8 * PIECE:
            raise OSError(28, "No space left on device")
        real(file, data)

    async with swarm_in(tmp_path) as swarm:
        seeder, fetcher = await swarm.seeder(version), await swarm.fetcher()
        with monkeypatch.context() as patch, pytest.raises(StorageFull, match="became full"):
            patch.setattr(module, "_write_all", limited)
            await fetched(fetcher, version, [seeder.peer])
        assert [p.name for p in fetcher.store.version_folder(1).iterdir()] == ["manifest.bin"]
        await fetched(fetcher, version, [seeder.peer])


async def test_a_damaged_local_file_is_rebuilt_by_fetching_only_what_is_wrong(tmp_path):
    version = version_of(1)
    async with swarm_in(tmp_path) as swarm:
        seeder, store = await swarm.seeder(version), swarm.store()
        fill(store, version)
        with store.artifact_path(1, ArtifactKind.GGUF).open("r+b") as file:
            file.seek(5 * PIECE + 17)
            file.write(b"rot")
        again = VersionStore(store.folder.parent, RUN_ID)
        report = await fetched(await swarm.fetcher(store=again), version, [seeder.peer])
        assert report.bytes_by_source == {seeder.peer: PIECE}


async def test_a_lossy_network_is_survived(tmp_path):
    version = version_of(1)
    async with swarm_in(tmp_path, seed=3, loss=0.3) as swarm:
        seeders = [(await swarm.seeder(version)).peer for _ in range(3)]
        patient = FetchSettings(retry_s=0.001, refresh_s=0.01, max_attempts=30)
        await fetched(await swarm.fetcher(settings=patient), version, seeders)


async def test_two_calls_for_one_artifact_take_turns(tmp_path):
    version = version_of(1)
    async with swarm_in(tmp_path) as swarm:
        seeder, fetcher = await swarm.seeder(version), await swarm.fetcher()
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(fetched, fetcher, version, [seeder.peer])
        assert fetcher.bytes_by_source == {seeder.peer: len(version.data)}
        assert not fetcher._turns


async def test_a_manifest_that_contradicts_itself_ends_the_fetch(tmp_path):
    version = version_of(1, pieces=2)
    artifact = Artifact.model_validate(version.artifact.model_dump() | {"digest": bytes(32)})
    manifest = version.signed.message.model_copy(update={"artifacts": (artifact,)})
    raw = seal(Identity.from_seed(bytes(32)), manifest)
    false = Version(signed=unseal(raw, CheckpointManifest, MANIFEST_LIMITS), data=version.data)

    async def piece(index):
        return version.piece(index)

    async with swarm_in(tmp_path) as swarm:
        source = await swarm.impostor(version, piece)
        with pytest.raises(MalformedMessage, match="manifest is wrong"):
            await fetched(await swarm.fetcher(), false, [source])
