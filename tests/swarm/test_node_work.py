"""A whole node against a coordinator: leases, versions, batches, verdicts."""

from pathlib import Path

import anyio
import pytest

from echo_node.backends.child import start_backend
from echo_node.backends.options import ScriptedOptions
from echo_node.node import Outcome
from echo_swarm.errors import BackendFailed
from echo_swarm.transport.memory import MemoryNetwork
from tests.swarm.support.node_harness import make_swarm, until
from tests.swarm.support.puppet_backend import PuppetBackend

pytestmark = pytest.mark.anyio


async def test_a_node_with_a_real_child_contributes_and_leaves_in_order(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    swarm.coordinator.publish(0)

    def open_backend():
        return start_backend(ScriptedOptions(batch=4), log_path=tmp_path / "backend.log")

    async with swarm.serving(), swarm.node(open_backend=open_backend) as running:
        await until(lambda: len(swarm.coordinator.accepted) >= 24)
        assert await running.leave() is Outcome.STOPPED
    assert swarm.coordinator.left == [running.host.peer_id]
    assert {t.policy.oldest_version for t in swarm.coordinator.accepted} == {0}


async def test_the_counters_of_node_and_coordinator_are_equal(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    swarm.coordinator.publish(0)
    async with swarm.serving(), swarm.node() as running:
        await until(lambda: len(swarm.coordinator.accepted) >= 40)
        await running.leave()
    status = running.node.status()
    mine = {"accepted": status.accepted, **status.rejected}
    assert mine == dict(swarm.coordinator.counts[running.host.peer_id])
    assert status.pending == 0


async def test_counters_stay_equal_when_the_network_loses_and_repeats(tmp_path: Path):
    swarm = make_swarm(tmp_path, network=MemoryNetwork(seed=3, duplicate_calls=0.3))
    swarm.coordinator.publish(0)
    peer = None
    async with swarm.serving() as host, swarm.node() as running:
        peer = running.host.peer_id
        for goal in (10, 20, 30):
            await until(lambda goal=goal: len(swarm.coordinator.accepted) >= goal)
            swarm.network.break_streams(peer, host.peer_id)
        await until(lambda: len(swarm.coordinator.accepted) >= 50)
        await running.leave()
    status = running.node.status()
    assert {"accepted": status.accepted, **status.rejected} == dict(swarm.coordinator.counts[peer])
    members = [(t.lease_id, t.member) for t in swarm.coordinator.accepted]
    assert len(members) == len(set(members))


async def test_the_batch_is_kept_full_across_leases_with_a_few_requests_waiting_in_the_backend(tmp_path: Path):
    swarm = make_swarm(tmp_path, group_size=3)
    swarm.coordinator.publish(0)
    puppet = PuppetBackend(batch=8)
    puppet.hold = True
    async with swarm.serving(), swarm.node(puppet=puppet):
        for _ in range(6):
            await until(lambda: len(puppet.running) == 10)
            puppet.finish(5)
        assert puppet.most_running == 10


async def test_nothing_waits_in_the_backend_while_a_newer_version_is_on_its_way(tmp_path: Path):
    """What waits there would begin on the old weights, and the new ones would wait for it."""
    swarm = make_swarm(tmp_path)
    swarm.coordinator.publish(12)
    puppet = PuppetBackend(batch=8)
    puppet.hold = True
    async with swarm.serving(), swarm.node(puppet=puppet) as running:
        await until(lambda: len(puppet.running) == 10)
        running.node.policies.heard(13)
        puppet.finish(4)
        await until(lambda: len(puppet.running) == 8)
        puppet.finish(1)
        await until(lambda: len(puppet.running) == 8)
        assert puppet.loaded == [12]


async def test_a_new_version_is_taken_up_and_aborts_nothing(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    swarm.coordinator.publish(12)
    puppet = PuppetBackend(batch=4)
    puppet.hold = True
    async with swarm.serving(), swarm.node(puppet=puppet) as running:
        await until(lambda: len(puppet.running) == 5)
        swarm.coordinator.publish(13)
        await until(lambda: running.node.policies.newest == 13)
        assert puppet.loaded == [12] and len(puppet.running) == 5
        puppet.hold = False
        puppet.finish()
        await until(lambda: 13 in puppet.loaded)
        await until(lambda: {t.policy.oldest_version for t in swarm.coordinator.accepted} == {12, 13})
    assert puppet.loaded == [12, 13]


async def test_pinned_leases_are_sampled_with_their_own_version(tmp_path: Path):
    swarm = make_swarm(tmp_path, max_staleness=4)
    coordinator = swarm.coordinator
    coordinator.endless = False
    for version in (3, 4):
        coordinator.publish(version)
    async with swarm.serving(), swarm.node() as running:
        await until(lambda: running.puppet.loaded == [4])
        pinned, free = coordinator.wish(4, pinned=3).group, coordinator.wish(4).group
        await until(lambda: len(coordinator.accepted) == 8)
    by_group = {g: {t.policy.oldest_version for t in coordinator.accepted if t.group_id == g} for g in (pinned, free)}
    assert by_group == {pinned: {3}, free: {4}}


async def test_in_sequential_mode_every_trajectory_is_of_the_version_asked_for(tmp_path: Path):
    swarm = make_swarm(tmp_path, max_staleness=0)
    coordinator = swarm.coordinator
    coordinator.endless = False
    async with swarm.serving(), swarm.node():
        for version in range(3):
            coordinator.publish(version)
            coordinator.wish(4)
            await until(lambda version=version: len(coordinator.accepted) == 4 * (version + 1))
    assert [t.policy.oldest_version for t in coordinator.accepted] == [0] * 4 + [1] * 4 + [2] * 4
    assert {reason for counts in coordinator.counts.values() for reason in counts} == {"accepted"}


async def test_evaluation_of_an_old_version_is_done_and_pushed_however_far_the_head_has_moved(tmp_path: Path):
    swarm = make_swarm(tmp_path, max_staleness=0)
    coordinator = swarm.coordinator
    coordinator.endless = False
    for version in range(4):
        coordinator.publish(version)
    coordinator.wish(4, pinned=0)
    coordinator.wish(4)
    async with swarm.serving(), swarm.node() as running:
        await until(lambda: len(coordinator.accepted) == 8)
        await running.leave()
    assert {t.policy.oldest_version for t in coordinator.accepted} == {0, 3}
    assert running.node.status().rejected == {}


async def test_a_lease_with_a_broken_prompt_is_handed_back_and_the_next_good_one_is_served(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    coordinator = swarm.coordinator
    coordinator.endless = False
    coordinator.publish(0)
    make_lease = coordinator._make_lease

    def make_broken_lease(peer, wish, members):
        lease = make_lease(peer, wish, members)
        return lease.model_copy(update={"prompt_ids": b"12345"}) if wish.group == 1 else lease

    coordinator._make_lease = make_broken_lease
    coordinator.wish(4)
    coordinator.wish(4)
    async with swarm.serving(), swarm.node():
        await until(lambda: len(coordinator.accepted) == 4 and coordinator.released)
    assert coordinator.released[0].failed


async def test_a_lease_that_runs_out_is_dropped_and_handed_back(tmp_path: Path):
    swarm = make_swarm(tmp_path, lease_s=0.3, beat_s=60.0)
    coordinator = swarm.coordinator
    coordinator.endless = False
    coordinator.publish(0)
    coordinator.wish(4)
    puppet = PuppetBackend(batch=4)
    puppet.hold = True
    async with swarm.serving(), swarm.node(puppet=puppet):
        await until(lambda: len(puppet.running) == 4)
        await until(lambda: coordinator.released)
        assert coordinator.released[0].lease_ids == tuple(coordinator.granted) and not coordinator.released[0].failed
        puppet.hold = False
        puppet.finish()
        coordinator.lease_s = 300.0
        coordinator.wish(2)
        await until(lambda: len(coordinator.accepted) == 2)
    assert sum(c.total() for c in coordinator.counts.values()) == 2


async def test_a_prompt_that_the_backend_refuses_is_handed_back_as_failed_and_the_rest_goes_on(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    coordinator = swarm.coordinator
    coordinator.endless = False
    coordinator.publish(0)
    puppet = PuppetBackend()
    puppet.refuse_prompt = lambda prompt: prompt[1] == 2
    async with swarm.serving(), swarm.node(puppet=puppet):
        for _ in range(3):
            coordinator.wish(2)
        await until(lambda: len(coordinator.accepted) == 4)
        await until(lambda: coordinator.released)
    assert all(release.failed and "too long" in release.cause for release in coordinator.released)
    assert {t.group_id for t in coordinator.accepted} == {1, 3}


async def test_a_backend_that_refuses_everything_ends_the_node_with_its_own_words(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    swarm.coordinator.publish(0)
    puppet = PuppetBackend()
    puppet.refuse_prompt = lambda prompt: True
    async with swarm.serving(), swarm.node(puppet=puppet) as running:
        with pytest.raises(BackendFailed, match="too long for a puppet") as raised:
            await running.wait()
    assert raised.value.exit_code == 6


async def test_a_backend_that_dies_is_started_again_and_its_leases_go_back_unblamed(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    coordinator = swarm.coordinator
    coordinator.publish(0)
    puppet = PuppetBackend(batch=4)
    puppet.hold = True
    async with swarm.serving(), swarm.node(puppet=puppet):
        await until(lambda: len(puppet.running) == 5)
        puppet.hold = False
        puppet.die("killed by signal SIGKILL")
        await until(lambda: coordinator.released and len(coordinator.accepted) >= 8)
    assert puppet.starts == 2
    assert not coordinator.released[0].failed and "SIGKILL" in coordinator.released[0].cause


async def test_a_backend_that_cannot_be_started_ends_the_node_before_it_joins(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    puppet = PuppetBackend()
    puppet.fail_starts = 99
    async with swarm.serving(), swarm.node(puppet=puppet) as running:
        with pytest.raises(BackendFailed, match="no strings"):
            await running.wait()
    assert swarm.coordinator.hellos == []


async def test_a_version_that_the_backend_cannot_use_is_told_and_the_next_one_is_taken(tmp_path: Path):
    swarm = make_swarm(tmp_path, max_staleness=4)
    coordinator = swarm.coordinator
    coordinator.publish(0)
    puppet = PuppetBackend()
    puppet.refuse_versions = {1: "tensor w has the wrong shape"}
    async with swarm.serving(), swarm.node(puppet=puppet) as running:
        await until(lambda: coordinator.accepted)
        coordinator.publish(1)
        await until(lambda: any("wrong shape" in line for line in running.lines))
        coordinator.publish(2)
        await until(lambda: any(t.policy.oldest_version == 2 for t in coordinator.accepted))
    assert 1 not in {t.policy.oldest_version for t in coordinator.accepted}


async def test_a_paused_run_is_told_once_and_goes_on_when_resumed(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    coordinator = swarm.coordinator
    coordinator.publish(0)
    coordinator.paused = True
    async with swarm.serving(), swarm.node() as running:
        await until(lambda: "paused" in running.node.activity.headline)
        await until(lambda: any("paused" in beat.state for beat in coordinator.beats.values()))
        assert not coordinator.accepted
        coordinator.paused = False
        coordinator.notify()
        await until(lambda: coordinator.accepted)
    assert sum("paused" in line for line in running.lines) == 1


async def test_a_busy_coordinator_is_asked_again_later_and_nothing_is_lost(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    coordinator = swarm.coordinator
    coordinator.endless = False
    coordinator.publish(0)
    coordinator.busy_answers = 3
    coordinator.wish(4)
    async with swarm.serving(), swarm.node():
        await until(lambda: len(coordinator.accepted) == 4)
    assert coordinator.busy_answers == 0


async def test_a_node_whose_outbox_is_half_full_asks_for_no_more_until_there_is_room(tmp_path: Path):
    swarm = make_swarm(tmp_path, group_size=64)
    coordinator = swarm.coordinator
    coordinator.publish(0)
    coordinator.busy_answers = 10**9
    puppet = PuppetBackend(batch=256)
    async with swarm.serving(), swarm.node(puppet=puppet, max_outbox_bytes=1 << 20) as running:
        await until(running.node.outbox.backlogged)
        await until(
            lambda: running.node.outbox.pending() == sum(len(g.lease.members) for g in coordinator.granted.values())
        )
        waiting = running.node.outbox.pending()
        coordinator.busy_answers = 0
        await until(lambda: len(coordinator.accepted) > waiting)
        await running.leave()
    assert running.node.status().rejected == {}


async def test_the_node_ends_when_the_run_is_finished(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    swarm.coordinator.publish(0)
    async with swarm.serving(), swarm.node() as running:
        await until(lambda: len(swarm.coordinator.accepted) >= 8)
        swarm.coordinator.finished = True
        assert await running.wait() is Outcome.FINISHED
    assert running.node.status().accepted == len(swarm.coordinator.accepted)


async def test_leaving_finishes_what_it_can_and_hands_back_the_rest(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    coordinator = swarm.coordinator
    coordinator.publish(0)
    puppet = PuppetBackend(batch=4)
    puppet.hold = True
    async with swarm.serving(), swarm.node(puppet=puppet, grace_s=0.3) as running:
        await until(lambda: len(puppet.running) == 5)
        puppet.finish(1)
        with anyio.fail_after(120):
            await running.leave()
    assert len(coordinator.accepted) == 1
    assert coordinator.released[-1].leaving and coordinator.released[-1].lease_ids
    assert coordinator.left == [running.host.peer_id]
