"""A run gets a new key: real coordinators and nodes, a network in memory, stand-ins for the children."""

from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from echo_coordinator import key_watch
from echo_node import following, policy_sync
from echo_node.bare_errors import leaves
from echo_swarm.checkpoint.serve import BlobServer
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.clock import SystemClock
from echo_swarm.directory import reading
from echo_swarm.directory.base import peers_topic
from echo_swarm.directory.memory import MemoryDirectory
from echo_swarm.envelope import seal
from echo_swarm.errors import TakenOver
from echo_swarm.identity import Identity
from echo_swarm.records import PeerRecord
from echo_swarm.succession import KeyChain, Succession, make_link
from echo_swarm.work import Role
from tests.swarm.support.node_harness import until
from tests.swarm.support.rotation import known_before, make_keyed_run, rotated
from tests.swarm.support.whole_run import RunningNode, WholeRun, beside, published

pytestmark = pytest.mark.anyio

FOLLOWED = "the run's key was replaced on"


@pytest.fixture
def anyio_backend() -> str:
    """The coordinator runs on asyncio only."""
    return "asyncio"


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "AGAIN_S", 0.2)
    monkeypatch.setattr(policy_sync, "WATCH_S", 0.2)
    monkeypatch.setattr(reading, "SUCCESSION_SLACK_S", -1.0)


def accepted(node: RunningNode) -> int:
    return node.verdicts["accepted"]


async def works(node: RunningNode) -> None:
    before = accepted(node)
    await until(lambda: accepted(node) >= before + 8, "the node works on")


def told(node: RunningNode, what: str) -> list[str]:
    return [line for line in node.lines if what in line]


async def test_nodes_follow_whether_they_ran_were_stopped_or_are_new_with_an_old_invite(tmp_path: Path):
    run = make_keyed_run(tmp_path)
    old = run.identity
    async with beside(run, "running") as running:
        async with beside(run, "stopped") as stopped, run.coordinator() as coordinator:
            await published(coordinator, 1)
            await works(running)
            await works(stopped)
        now = rotated(run)
        async with now.coordinator() as coordinator:
            assert coordinator.invite.key == now.identity.public_key != old.public_key
            await works(running)
            status = running.node.status()
            assert status.key_changes == 1 and status.key_change is not None
            assert (status.key_change.before, status.key_change.after) == (old.peer_id, now.identity.peer_id)
            assert len(told(running, FOLLOWED)) == 1 and now.identity.peer_id in told(running, FOLLOWED)[0]
            head = coordinator.state.core.versions.published or 0
            await published(coordinator, head + 1)
            await until(lambda: (running.node.worker.loaded or 0) > head, "a version under the new key is loaded")
            for name in ("stopped", "new"):
                async with beside(known_before(now, old), name) as node:
                    await works(node)
                    assert len(told(node, FOLLOWED)) == 1
        again = rotated(now)
        async with again.coordinator():
            await works(running)
            async with beside(known_before(again, old), "stopped") as node:
                await works(node)
                assert len(told(node, FOLLOWED)) == 1, "what was learnt earlier is remembered"
            async with beside(again, "invited since") as node:
                await works(node)
                assert not told(node, FOLLOWED)
            async with beside(known_before(again, old), "newest") as node:
                await works(node)
        assert running.error is None and running.node.link.refused == ""


@pytest.fixture
def deaf_thief(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thief's coordinator does not end because its key was succeeded."""
    monkeypatch.setattr(key_watch, "MAX_ASKED", 0)


@pytest.mark.usefixtures("deaf_thief")
async def test_a_thief_of_the_old_key_is_refused_and_told_of_after_the_rotation(tmp_path: Path):
    run = make_keyed_run(tmp_path)
    async with beside(run, "a") as node:
        async with run.coordinator() as coordinator:
            await published(coordinator, 1)
            await works(node)
        stolen = run.copied(tmp_path / "stolen")
        now = rotated(run)
        async with now.coordinator() as coordinator:
            await works(node)
            async with stolen.coordinator() as thief:
                thief.state.stop()
                high = thief.state.core.versions.published
                assert high is not None
                await until(lambda: told(node, "somebody announces versions"), "the node has seen it")
                assert stolen.identity.peer_id in told(node, "somebody announces versions")[0]
                joins = node.node.link.joins
                await works(node)
                assert node.node.link.joins == joins
            for version in node.node.store.versions():
                manifest = node.node.store.manifest(version)
                assert manifest is not None
                trust = node.node._trust.trusted
                assert trust.keys.accepts(manifest.signer, manifest.digest)


@pytest.mark.usefixtures("deaf_thief")
async def test_a_node_at_a_thief_leaves_it_and_drops_what_came_from_there(tmp_path: Path):
    run = make_keyed_run(tmp_path)
    async with beside(run, "a") as node:
        async with run.coordinator() as coordinator:
            await published(coordinator, 1)
            await works(node)
        stolen = run.copied(tmp_path / "stolen")
        now = rotated(run)
        async with stolen.coordinator() as thief:
            base = thief.state.core.versions.published or 0
            await published(thief, base + 2)
            await until(lambda: (node.node.worker.loaded or 0) >= base + 2)
            assert not told(node, FOLLOWED)
            async with now.coordinator() as coordinator:
                await until(lambda: told(node, FOLLOWED), "the node finds the successor beside the thief")
                await until(lambda: told(node, "dropped what the run's old key had signed"))
                assert node.node.store.epoch() in (None, coordinator.fence.raw)
                await works(node)
                await published(coordinator, base + 3)
                await until(lambda: (node.node.worker.loaded or 0) >= base + 3)


def rival_of(run: WholeRun, thief: Identity) -> KeyChain:
    fields = Succession(
        run_id=run.settings.run.id,
        sequence=1,
        old_key=run.identity.public_key,
        new_key=thief.public_key,
        epoch=9,
        made_at=2e9,
        kept=(),
    )
    return KeyChain(links=(make_link(run.identity, thief, fields),))


async def test_a_coordinator_ends_when_its_key_was_replaced_in_another_copy_and_the_other_one_shows_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(key_watch, "WATCH_EVERY_S", 0.1)
    run = make_keyed_run(tmp_path)
    async with run.coordinator() as coordinator:
        await published(coordinator, 0)
    copy = run.copied(tmp_path / "copy")
    now = rotated(run)
    said: list[str] = []
    async with now.coordinator() as coordinator:
        await until(lambda: len(run.records) >= 2, "it is announced")
        try:
            async with copy.coordinator():
                with anyio.fail_after(60):
                    await anyio.sleep_forever()
        except* TakenOver as group:
            said += [str(error) for error in leaves(group)]
        assert len(said) == 1 and now.identity.peer_id in said[0] and "another copy" in said[0]
        status = coordinator.reporter.status()
        assert status.key_changes == 1 and status.key_changed_at is not None
        await until(lambda: any(copy.identity.peer_id in w for w in coordinator.reporter.status().warnings))


async def test_a_rival_is_refused_by_who_has_followed_and_a_fresh_invite_frees_who_followed_it(tmp_path: Path):
    run, thief = make_keyed_run(tmp_path), Identity.generate()
    async with run.coordinator() as coordinator:
        await published(coordinator, 0)
    now = rotated(run)
    rival = VersionStore(tmp_path / "thief", run.settings.run.id)
    rival.save_keys(rival_of(run, thief))
    async with run.network.host(thief) as host, BlobServer(host, rival):
        async with beside(known_before(now, run.identity), "fooled") as fooled:
            assert await fooled.node._trust.following.ask(thief.peer_id)
            assert fooled.node._trust.keys.coordinator == thief.peer_id, "a newcomer has nothing to tell them apart by"
            async with now.coordinator():
                await until(lambda: told(fooled, "a second successor"), "it hears of the owner's later")
                assert accepted(fooled) == 0
        async with now.coordinator():
            async with beside(known_before(now, run.identity), "a") as node:
                await works(node)
                assert not await node.node._trust.following.ask(thief.peer_id)
                (line,) = told(node, "a second successor")
                assert thief.peer_id in line and now.identity.peer_id in line and "fresh invite" in line
                await works(node)
            async with beside(now, "fooled") as freed:
                await works(freed)


async def test_a_peer_that_is_no_coordinator_hands_the_chain_on_with_its_versions(tmp_path: Path):
    run = make_keyed_run(tmp_path)
    old = run.identity
    async with beside(run, "holder") as holder:
        async with run.coordinator() as coordinator:
            await published(coordinator, 1)
            await works(holder)
        now = rotated(run)
        async with now.coordinator():
            await works(holder)
        peer = holder.node.status().peer_id
        boot = replace(known_before(now, old), boot=f"/memory/1/p2p/{peer}")
        async with beside(boot, "late") as late:
            await until(lambda: told(late, FOLLOWED), "it is told by a node, the coordinator being away")
            assert late.node._trust.keys.coordinator == now.identity.peer_id
            async with now.coordinator():
                await works(late)


async def test_a_thief_who_signs_first_ends_the_coordinator_which_goes_on_under_a_key_of_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(key_watch, "WATCH_EVERY_S", 0.1)
    run, thief = make_keyed_run(tmp_path), Identity.generate()
    rival = VersionStore(tmp_path / "thief", run.settings.run.id)
    rival.save_keys(rival_of(run, thief))
    async with run.network.host(thief) as host, BlobServer(host, rival):
        claim = PeerRecord(
            run_id=run.settings.run.id,
            role=Role.COORDINATOR,
            addresses=host.addresses,
            held_version=None,
            artifact_digests=(),
            issued_at=SystemClock().wall_s(),
        )
        directory = MemoryDirectory(run.records, thief, SystemClock())
        await directory.announce(peers_topic(run.settings.run.id), seal(thief, claim), ttl_s=600)
        said: list[str] = []
        try:
            async with run.coordinator():
                with anyio.fail_after(60):
                    await anyio.sleep_forever()
        except* TakenOver as group:
            said += [str(error) for error in leaves(group)]
        assert len(said) == 1 and thief.peer_id in said[0] and "rotate-key" in said[0]
        now = rotated(run)
        async with now.coordinator() as coordinator, beside(now, "a") as node:
            await until(lambda: any(thief.peer_id in w for w in coordinator.reporter.status().warnings))
            await works(node)
            assert node.node._trust.keys.coordinator == now.identity.peer_id
