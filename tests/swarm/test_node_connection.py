"""What a node does when the coordinator, the network or the node itself goes away and comes back."""

from pathlib import Path

import anyio
import pytest

from echo_node.node import Outcome
from echo_node.outbox import Dropped
from echo_swarm.errors import IdentityInUse, PeerUnreachable, RemoteError, RunNotFound, Untrusted
from echo_swarm.identity import Identity
from tests.swarm.support.fake_coordinator import FakeCoordinator
from tests.swarm.support.node_harness import make_swarm, until
from tests.swarm.support.puppet_backend import PuppetBackend

pytestmark = pytest.mark.anyio


async def test_a_coordinator_that_restarts_is_greeted_again_and_work_goes_on(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    coordinator = swarm.coordinator
    coordinator.publish(0)
    async with anyio.create_task_group() as tasks:
        async with swarm.serving(), swarm_node_outlives(swarm, tasks) as running:
            await until(lambda: len(coordinator.accepted) >= 8)
        coordinator.forget_everybody()
        before = len(coordinator.accepted)
        await until(lambda: not running.node.link.is_up)
        async with swarm.serving():
            await until(lambda: len(coordinator.accepted) >= before + 8)
            assert len(coordinator.hellos) >= 2
            assert len({hello.instance for hello in coordinator.hellos}) == 1
            await running.leave()
        tasks.cancel_scope.cancel()
    told = [line for line in running.lines if line.startswith("waiting for the coordinator")]
    assert len(told) == 1


class swarm_node_outlives:
    """Start a node in a task group, so that it lives on after the block that started it."""

    def __init__(self, swarm, tasks):
        self._swarm = swarm
        self._tasks = tasks

    async def __aenter__(self):
        return await self._tasks.start(self._run)

    async def __aexit__(self, *error: object):
        return None

    async def _run(self, *, task_status):
        async with self._swarm.node() as running:
            task_status.started(running)
            await anyio.sleep_forever()


async def test_a_coordinator_that_forgot_the_node_gets_a_new_hello(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    coordinator = swarm.coordinator
    coordinator.publish(0)
    async with swarm.serving(), swarm.node():
        await until(lambda: len(coordinator.accepted) >= 4)
        coordinator.forget_everybody()
        await until(lambda: len(coordinator.hellos) == 2)
        before = len(coordinator.accepted)
        await until(lambda: len(coordinator.accepted) >= before + 4)


async def test_a_silent_network_is_noticed_by_the_heartbeat(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    swarm.coordinator.publish(0)
    async with swarm.serving() as host, swarm.node() as running:
        await until(lambda: len(swarm.coordinator.accepted) >= 4)
        swarm.network.partition(running.host.peer_id, host.peer_id, silent=True)
        await until(lambda: "waiting for the coordinator" in running.node.activity.headline)
        swarm.network.heal(running.host.peer_id, host.peer_id)
        before = len(swarm.coordinator.accepted)
        await until(lambda: len(swarm.coordinator.accepted) >= before + 4)


async def test_a_coordinator_that_never_answers_ends_the_node_with_a_reason(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    async with swarm.node(patience_s=0.2) as running:
        with pytest.raises(PeerUnreachable, match="check that the run is started") as raised:
            await running.wait()
    assert raised.value.exit_code == 4


async def test_an_invite_to_another_run_is_answered_with_its_own_error(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    other = swarm.coordinator.invite().model_copy(update={"run": "f" * 32})
    async with swarm.serving(), swarm.node(invite=other) as running:
        with pytest.raises(RunNotFound, match="ask for a new invite"):
            await running.wait()


async def test_a_run_described_by_another_key_is_refused(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    forger = FakeCoordinator(tmp_path / "forger")
    forger.run_id = swarm.coordinator.run_id
    honest = swarm.coordinator.invite()
    swarm.coordinator.__class__ = type("Forger", (FakeCoordinator,), {"run_envelope": forger.run_envelope})
    async with swarm.serving(), swarm.node(invite=honest) as running:
        with pytest.raises(Untrusted):
            await running.wait()


async def test_a_key_that_is_live_elsewhere_ends_the_node_with_its_own_exit_code(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    swarm.coordinator.refuse_hello = RemoteError("identity_in_use", "another process with this key is live")
    async with swarm.serving(), swarm.node() as running:
        with pytest.raises(IdentityInUse, match="--state-dir") as raised:
            await running.wait()
    assert raised.value.exit_code == 9


async def test_work_that_a_killed_node_left_in_its_outbox_is_pushed_by_the_next_one(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    coordinator = swarm.coordinator
    coordinator.endless = False
    coordinator.publish(0)
    coordinator.wish(4)
    coordinator.busy_answers = 10**9
    async with swarm.serving():
        async with swarm.node() as killed:
            await until(lambda: killed.node.outbox.pending() == 4)
        assert not coordinator.accepted
        coordinator.busy_answers = 0
        async with swarm.node() as again:
            await until(lambda: len(coordinator.accepted) == 4)
            await again.leave()
    assert again.node.status().accepted == 4
    assert coordinator.hellos[0].instance != coordinator.hellos[1].instance


async def test_an_answer_that_was_lost_is_asked_for_again_and_counted_once(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    coordinator = swarm.coordinator
    coordinator.endless = False
    coordinator.publish(0)
    async with swarm.serving() as host, swarm.node() as running:
        await until(lambda: running.node.link.is_up)
        judge = coordinator._judge

        def judge_and_cut(peer, trajectory):
            reason = judge(peer, trajectory)
            coordinator._judge = judge
            swarm.network.break_streams(running.host.peer_id, host.peer_id)
            return reason

        coordinator._judge = judge_and_cut
        coordinator.wish(4)
        await until(lambda: len(coordinator.accepted) == 4)
        await until(lambda: running.node.outbox.pending() == 0)
        await running.leave()
    assert running.node.status().accepted == 4 == coordinator.counts[running.host.peer_id]["accepted"]


async def test_over_stale_work_is_dropped_by_the_node_and_counted_as_its_own_decision(tmp_path: Path):
    swarm = make_swarm(tmp_path, max_staleness=1)
    coordinator = swarm.coordinator
    coordinator.endless = False
    coordinator.publish(0)
    coordinator.busy_answers = 10**9
    coordinator.wish(4)
    async with swarm.serving(), swarm.node() as running:
        await until(lambda: running.node.outbox.pending() == 4)
        coordinator.publish(2)
        await until(lambda: running.node.outbox.pending() == 0)
        await running.leave()
    assert running.node.status().rejected == {Dropped.STALE.value: 4}
    assert not coordinator.counts


async def test_leaving_while_the_coordinator_is_away_is_quick_and_keeps_the_work(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    coordinator = swarm.coordinator
    coordinator.publish(0)
    puppet = PuppetBackend(batch=4)
    puppet.hold = True
    async with swarm.serving() as host, swarm.node(puppet=puppet, grace_s=0.3) as running:
        await until(lambda: len(puppet.running) == 5)
        swarm.network.partition(running.host.peer_id, host.peer_id)
        puppet.finish()
        await until(lambda: running.node.outbox.pending() == 5)
        with anyio.fail_after(120):
            assert await running.leave() is Outcome.STOPPED
    assert running.node.status().pending == 5


async def test_the_same_key_after_a_quick_restart_is_one_peer_with_its_old_counters(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    swarm.coordinator.publish(0)
    async with swarm.serving():
        for goal in (8, 16, 24):
            async with swarm.node() as running:
                await until(lambda goal=goal: len(swarm.coordinator.accepted) >= goal)
                await running.leave()
    assert list(swarm.coordinator.counts) == [Identity.from_seed(b"node".ljust(32, b".")).peer_id]
    assert running.node.status().accepted == len(swarm.coordinator.accepted)
