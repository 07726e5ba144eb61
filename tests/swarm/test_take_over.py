"""Two coordinators with one run's key: real coordinators and nodes, a network in memory, stand-ins for the children."""

from pathlib import Path

import anyio
import pytest

from echo_coordinator import epochs
from echo_coordinator.commands import look
from echo_coordinator.commands.look import Look
from echo_coordinator.epochs import read_noted
from echo_coordinator.loops import publishing
from echo_node.bare_errors import leaves
from echo_swarm.clock import SystemClock
from echo_swarm.directory.base import head_topic
from echo_swarm.directory.memory import DirectoryStore, MemoryDirectory
from echo_swarm.envelope import seal
from echo_swarm.errors import TakenOver
from echo_swarm.identity import Identity
from echo_swarm.records import HeadRecord
from echo_swarm.transport.memory import MemoryNetwork
from tests.swarm.support.node_harness import until
from tests.swarm.support.stand_ins import weights
from tests.swarm.support.whole_run import WholeRun, beside, make_run, published

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """The coordinator runs on asyncio only."""
    return "asyncio"


def look_of(run: WholeRun, *, dialable: bool = True, say: list[str] | None = None) -> Look:
    passing = Identity.generate()

    async def answered(_address: str) -> bool:
        return dialable

    return Look(
        run.folder,
        run.settings.run.id,
        run.identity,
        SystemClock(),
        open_host=lambda: run.network.host(passing, outbound_only=True),
        is_answered=answered,
        say=(say if say is not None else []).append,
    )


async def test_a_node_follows_the_copy_that_took_over_and_drops_what_the_other_published_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(look, "LIFE_S", 0.3)
    run = make_run(tmp_path)
    async with beside(run, "a") as node:
        async with run.coordinator() as coordinator:
            await published(coordinator, 2)
        copy = run.copied(tmp_path / "copy")
        async with run.coordinator() as coordinator:
            base = coordinator.fence.own.message.base_version
            assert base is not None
            await published(coordinator, base + 3)
            await until(lambda: (node.node.policies.newest or 0) > base + 1)
        dropped = node.node.policies.newest
        assert dropped is not None

        directory = MemoryDirectory(run.records, run.identity, SystemClock())
        async with run.network.host(Identity.generate()) as host:
            assert await look_of(copy).before_start(host, directory, take_over=False) is None
        with pytest.raises(TakenOver, match="--take-over"):
            async with copy.coordinator():
                pass
        copy.trainer.hold()
        async with copy.coordinator(take_over=True) as coordinator:
            await until(lambda: any("has taken over" in line for line in node.lines), "the node says so")
            # An update that was under way may be out already: of the other coordinator there is nothing left.
            left = [node.node.store.manifest(v) for v in node.node.store.versions() if v > base]
            assert all(manifest and manifest.message.epoch == coordinator.fence.raw for manifest in left)
            copy.trainer.let_go()
            await published(coordinator, dropped)
            await until(lambda: (node.node.worker.loaded or 0) >= dropped)
            accepted = node.verdicts["accepted"]
            await until(lambda: node.verdicts["accepted"] >= accepted + 8)
            held = node.node.store.manifest(dropped)
            assert held is not None and held.message.epoch == coordinator.fence.raw
            path = node.node.store.whole(held.message.artifacts[0].digest)
            assert path is not None and path.read_bytes() == weights(dropped + copy.trainer.salt)
        told = [line for line in node.lines if "has taken over" in line]
        assert len(told) == 1 and f"version {dropped}" in told[0]
        assert node.error is None


async def told_why(run: WholeRun) -> str:
    """Run a coordinator until it ends because it was replaced; return what it says."""
    said: list[str] = []
    try:
        async with run.coordinator():
            with anyio.fail_after(60):
                await anyio.sleep_forever()
    except* TakenOver as group:
        said += [str(error) for error in leaves(group)]
    assert len(said) == 1
    return said[0]


async def test_a_coordinator_ends_when_a_node_tells_it_of_a_higher_epoch(tmp_path: Path):
    run = make_run(tmp_path)
    async with run.coordinator() as coordinator:
        await published(coordinator, 0)
    copy = run.copied(tmp_path / "copy")
    async with beside(run, "a") as node:
        for number in (2, 3):
            async with copy.coordinator() as coordinator:
                assert coordinator.fence.own.message.number == number
                await until(lambda at=coordinator: at.state.core.roster.nodes() and node.node.link.is_up)
        versions = run.folder.store / run.settings.run.id
        before = sorted(versions.iterdir())
        assert "epoch 3, from version" in await told_why(run)
        assert sorted(versions.iterdir()) == before
        joins = node.node.link.joins
        with pytest.raises(TakenOver, match="--take-over"):
            async with run.coordinator():
                pass
        assert node.node.link.joins == joins and node.error is None
        async with run.coordinator(take_over=True) as coordinator:
            assert coordinator.fence.own.message.number == 4
            await until(lambda: node.node.link.joins > joins)
            await until(lambda: (node.node.worker.loaded or 0) >= 1)


async def test_a_coordinator_ends_when_the_directory_has_a_higher_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(epochs, "WATCH_EVERY_S", 0.05)
    run = make_run(tmp_path)
    async with run.coordinator() as coordinator:
        await published(coordinator, 0)
    copy = run.copied(tmp_path / "copy")
    copy.network = MemoryNetwork()
    async with copy.coordinator() as first:
        assert first.fence.own.message.number == 2
    async with copy.coordinator() as other:
        assert "another coordinator with this run's key has taken over, since" in await told_why(run)
        assert not other.fence.is_lost
        noted = read_noted(run.folder)
        assert noted.other == other.fence.raw


async def test_a_live_coordinator_is_found_before_another_begins_and_told_when_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(look, "LIFE_S", 0.05)
    run = make_run(tmp_path)
    async with run.coordinator() as coordinator:
        await published(coordinator, 0)
    copy = run.copied(tmp_path / "copy")
    ended: list[str] = []

    async def first_one() -> None:
        ended.append(await told_why(run))

    directory = MemoryDirectory(run.records, run.identity, SystemClock())
    elsewhere = MemoryNetwork()
    async with anyio.create_task_group() as tasks, elsewhere.host(run.identity) as host:
        tasks.start_soon(first_one)
        await until(lambda: any(run.network._hosts), "the first one is there")
        with anyio.fail_after(60):
            while True:
                try:
                    await look_of(copy).before_start(host, directory, take_over=False)
                except TakenOver as e:
                    if "live at" in str(e):
                        assert f"live at /memory/2/p2p/{run.identity.peer_id}" in str(e) and "--take-over" in str(e)
                        break
                await anyio.sleep(0.01)
        other = await look_of(copy).before_start(host, directory, take_over=True)
        assert other is not None and other.epoch is not None
        copy.network = MemoryNetwork()
        async with copy.coordinator(take_over=True) as coordinator:
            assert coordinator.fence.own.message.number == 3
            await look_of(run).tell(other, coordinator.fence.raw)
            await until(lambda: ended, "the first one has ended")
    assert "epoch 3" in ended[0]


async def test_a_live_coordinator_that_cannot_be_dialled_is_known_by_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(look, "LOOK_EVERY_S", 0.05)
    monkeypatch.setattr(publishing, "ANNOUNCE_EVERY_S", 0.5)
    run = make_run(tmp_path)
    directory = MemoryDirectory(run.records, run.identity, SystemClock())
    said: list[str] = []
    async with MemoryNetwork().host(run.identity) as host:
        async with run.coordinator() as coordinator:
            await published(coordinator, 0)
            await until(lambda: len(run.records) == 2, "both records are announced")
            copy = run.copied(tmp_path / "copy")
            with pytest.raises(TakenOver, match="announces itself in the directory"):
                await look_of(copy, dialable=False, say=said).before_start(host, directory, take_over=False)
            assert len(said) == 1 and "--take-over begins at once" in said[0]
            assert await look_of(copy, dialable=False).before_start(host, directory, take_over=True) is None
        monkeypatch.setattr(look, "LIFE_S", 0.3)
        assert await look_of(copy, dialable=False, say=said).before_start(host, directory, take_over=False) is None
        assert await look_of(run, dialable=False, say=said).before_start(host, directory, take_over=False) is None
    assert len(said) == 2, "the folder itself is locked: nobody else can be live on it"


async def test_old_records_that_somebody_shows_in_turn_make_no_dead_coordinator_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(look, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(look, "LIFE_S", 0.5)
    run = make_run(tmp_path)
    async with run.coordinator() as coordinator:
        await published(coordinator, 0)
        epoch = coordinator.fence.raw
    copy, run_id, now_s = run.copied(tmp_path / "copy"), run.settings.run.id, SystemClock().wall_s()

    async def show(directory: MemoryDirectory, ages_s: list[float]) -> None:
        for age_s in ages_s:
            record = HeadRecord(
                run_id=run_id, policy_version=0, manifest_digest=bytes(32), issued_at=now_s - age_s, epoch=epoch
            )
            await directory.announce(head_topic(run_id), seal(run.identity, record), ttl_s=60)
            await anyio.sleep(0.1)

    for ages_s, is_live in (([300.0, 200.0, 100.0], False), ([300.0, 200.0, -1.0], True)):
        records = DirectoryStore()
        directory = MemoryDirectory(records, run.identity, SystemClock())
        async with MemoryNetwork().host(run.identity) as host, anyio.create_task_group() as tasks:
            tasks.start_soon(show, directory, ages_s)
            await until(lambda records=records: len(records) == 1, "the first is shown")
            looking = look_of(copy, dialable=False).before_start(host, directory, take_over=False)
            if is_live:
                with pytest.raises(TakenOver, match="announces itself"):
                    await looking
            else:
                assert await looking is None
