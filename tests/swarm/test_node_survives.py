"""What a node outlives: a coordinator that is away or unwell, a machine that sleeps, a clock that is wrong."""

from pathlib import Path

import anyio
import pytest
from anyio.abc import TaskStatus

from echo_node.outbox import Dropped
from echo_node.status import summary_lines
from echo_swarm.errors import RemoteError
from echo_swarm.identity import PeerId
from echo_swarm.wire import Message
from echo_swarm.work import Hello, Released, Welcome
from tests.swarm.support.node_harness import RunningNode, SetClock, Swarm, make_swarm, until

pytestmark = pytest.mark.anyio

HOUR_S = 3600.0


async def outliving(swarm: Swarm, clock: SetClock, *, task_status: TaskStatus[RunningNode]) -> None:
    """Run a node in a task of its own, so that it lives on while the coordinator comes and goes."""
    async with swarm.node(clock=clock) as running:
        task_status.started(running)
        await anyio.sleep_forever()


@pytest.mark.parametrize("code", ["full", "unavailable", "internal"])
@pytest.mark.parametrize("before", [True, False])
async def test_a_hello_that_is_turned_down_for_now_is_said_again_later(tmp_path: Path, code: str, before: bool):
    swarm = make_swarm(tmp_path)
    coordinator = swarm.coordinator
    coordinator.publish(0)
    refusal = RemoteError(code, "no room on the disk")
    coordinator.refuse_hello = refusal if before else None
    async with swarm.serving(), swarm.node(patience_s=0.0) as running:
        if not before:
            await until(lambda: coordinator.accepted)
            coordinator.refuse_hello = refusal
            coordinator.forget_everybody()
        await until(lambda: "waiting for the coordinator to take this node in" in running.node.activity.headline)
        assert "no room on the disk" in running.node.activity.headline
        coordinator.refuse_hello = None
        done = len(coordinator.accepted)
        await until(lambda: len(coordinator.accepted) >= done + 4)
        assert running.error is None


async def test_a_coordinator_that_was_gone_for_an_hour_gets_what_is_fresh_and_the_node_drops_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("echo_node.slumber.LOOK_S", HOUR_S)  # The hour passes in no time; that is no sleep.
    swarm = make_swarm(tmp_path, max_staleness=1, lease_s=2 * HOUR_S)
    coordinator, clock = swarm.coordinator, SetClock()
    coordinator.clock = clock
    coordinator.endless = False
    coordinator.publish(0)
    async with anyio.create_task_group() as tasks:
        async with swarm.serving():
            running = await tasks.start(outliving, swarm, clock)
            running.puppet.hold = True
            coordinator.wish(4)
            await until(lambda: len(running.puppet.running) == 4)
        await until(lambda: not running.node.link.is_up)
        running.puppet.finish()
        await until(lambda: running.node.outbox.pending() == 4)
        clock.wall_ahead_s = clock.monotonic_ahead_s = HOUR_S
        await until(lambda: "waiting for the coordinator, 1 h" in running.node.activity.headline)
        # It trained meanwhile, from what others had pushed.
        coordinator.publish(2)
        running.puppet.hold = False
        async with swarm.serving():
            coordinator.wish(4)
            await until(lambda: len(coordinator.accepted) == 4)
            await until(lambda: running.node.outbox.pending() == 0)
            assert running.node.status().rejected == {Dropped.STALE.value: 4}
            assert [t.policy.oldest_version for t in coordinator.accepted] == [2] * 4
            told = [line for line in running.lines if line.startswith("waiting for the coordinator")]
        tasks.cancel_scope.cancel()
    assert coordinator.counts[running.host.peer_id] == {"accepted": 4}
    assert len(told) == 1
    assert any("dropped 4 trajectories that had become too old" in line for line in running.lines)


@pytest.mark.parametrize("wall_s", [-5 * HOUR_S, 5 * HOUR_S])
async def test_a_clock_that_is_hours_off_is_named_once_and_changes_nothing_else(tmp_path: Path, wall_s: float):
    swarm = make_swarm(tmp_path, lease_s=30.0)
    swarm.coordinator.publish(0)
    async with swarm.serving(), swarm.node(clock=SetClock(wall_ahead_s=wall_s)) as running:
        await until(lambda: len(swarm.coordinator.accepted) >= 4)
        swarm.coordinator.forget_everybody()
        await until(lambda: len(swarm.coordinator.hellos) == 2)
        swarm.coordinator.publish(1)
        await until(lambda: running.node.worker.loaded == 1)
        done = len(swarm.coordinator.accepted)
        await until(lambda: len(swarm.coordinator.accepted) >= done + 4)
        warnings = [line for line in running.lines if line.startswith("warning: this machine's clock is 18000 s")]
    assert len(warnings) == 1
    assert ("ahead of" if wall_s > 0 else "behind") in warnings[0]
    assert list(swarm.coordinator.counts.values()) == [{"accepted": len(swarm.coordinator.accepted)}]


@pytest.mark.parametrize("stands_still", [True, False])
async def test_a_machine_that_wakes_up_connects_anew_at_once_and_names_its_clock(
    tmp_path: Path, stands_still: bool, monkeypatch: pytest.MonkeyPatch
):
    """The monotonic clock stands still while a Linux machine or a Mac sleeps, and runs on under Windows."""
    monkeypatch.setattr("echo_node.slumber.LOOK_S", 0.05)
    swarm = make_swarm(tmp_path, beat_s=600.0)
    swarm.coordinator.publish(0)
    clock = SetClock()
    async with swarm.serving(), swarm.node(clock=clock) as running:
        await until(lambda: len(swarm.coordinator.accepted) >= 4)
        clock.wall_ahead_s += 8.1 * HOUR_S
        clock.monotonic_ahead_s += 0.0 if stands_still else 8.1 * HOUR_S
        await until(lambda: len(swarm.coordinator.hellos) >= 2)
        done = len(swarm.coordinator.accepted)
        await until(lambda: len(swarm.coordinator.accepted) >= done + 4)
        clock.wall_ahead_s = 0.0
        await until(lambda: any("agrees with the coordinator's again" in line for line in running.lines))
    slept = [line for line in running.lines if line.endswith("connecting to the coordinator anew")]
    assert "8 h" in slept[0] and len(slept) == 2
    assert sum("warning: this machine's clock is" in line for line in running.lines) == 1


@pytest.mark.parametrize("set_by_s", [-5 * HOUR_S, 5 * HOUR_S])
async def test_how_long_a_node_took_part_is_told_right_though_its_clock_was_set_meanwhile(
    tmp_path: Path, set_by_s: float
):
    swarm, clock = make_swarm(tmp_path), SetClock()
    swarm.coordinator.publish(0)
    async with swarm.serving(), swarm.node(clock=clock) as running:
        await until(lambda: running.node.status().loaded_version == 0)
        clock.wall_ahead_s += set_by_s  # Somebody sets it; no time passes.
        assert 0 <= running.node.status().up_s < HOUR_S
        clock.wall_ahead_s += 2 * HOUR_S  # Two hours pass on both.
        clock.monotonic_ahead_s += 2 * HOUR_S
        farewell = summary_lines(running.node.status())
    assert farewell[0].startswith("took part for 2 h")


async def test_a_hello_that_took_long_is_not_taken_for_a_wrong_clock(tmp_path: Path):
    swarm, clock = make_swarm(tmp_path), SetClock()
    hello = swarm.coordinator._hello

    async def slow(peer: PeerId, message: Hello) -> Welcome:
        welcome = await hello(peer, message)
        clock.wall_ahead_s = clock.monotonic_ahead_s = 40.0
        return welcome

    swarm.coordinator._hello = slow
    swarm.coordinator.publish(0)
    async with swarm.serving(), swarm.node(clock=clock) as running:
        await until(lambda: len(swarm.coordinator.accepted) >= 4)
        assert not any("this machine's clock" in line for line in running.lines)
        swarm.coordinator.forget_everybody()
        # Asked anew, and quickly: now it shows that the clock is off.
        await until(lambda: any("this machine's clock is 40 s ahead" in line for line in running.lines))


async def test_leases_that_ran_out_while_the_machine_slept_are_given_up_and_new_work_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("echo_node.slumber.LOOK_S", 0.05)
    swarm, clock = make_swarm(tmp_path, lease_s=60.0), SetClock()
    coordinator = swarm.coordinator
    coordinator.clock = SetClock()
    coordinator.endless = False
    coordinator.publish(0)
    async with swarm.serving(), swarm.node(clock=clock) as running:
        running.puppet.hold = True
        coordinator.wish(4)
        await until(lambda: len(running.puppet.running) == 4)
        # The node's monotonic clock stood still: by that one, its lease has nearly all of its time left.
        coordinator.clock.wall_ahead_s = coordinator.clock.monotonic_ahead_s = clock.wall_ahead_s = 8.1 * HOUR_S
        await until(lambda: len(coordinator.hellos) == 2)
        await until(lambda: not running.node.worker.held_leases())
        running.puppet.hold = False
        running.puppet.finish()
        coordinator.wish(4)
        await until(lambda: len(coordinator.accepted) == 4)
    assert coordinator.counts[running.host.peer_id] == {"accepted": 4}


async def test_an_answer_to_a_later_hello_that_cannot_be_read_ends_nothing(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    coordinator = swarm.coordinator
    hello, broken = coordinator._hello, []

    async def answer(peer: PeerId, message: Hello) -> Message:
        welcome = await hello(peer, message)
        if len(coordinator.hellos) == 2:
            broken.append(peer)
            return Released(count=0)
        return welcome

    coordinator._hello = answer
    coordinator.publish(0)
    async with swarm.serving(), swarm.node() as running:
        await until(lambda: coordinator.accepted)
        coordinator.forget_everybody()
        await until(lambda: broken)
        done = len(coordinator.accepted)
        await until(lambda: len(coordinator.accepted) >= done + 4)
        assert running.error is None
        assert any(line.startswith("waiting for a hello to the coordinator to go well") for line in running.lines)


async def test_where_the_directory_is_empty_the_invites_addresses_are_enough(tmp_path: Path):
    swarm, clock = make_swarm(tmp_path), SetClock()
    coordinator = swarm.coordinator
    coordinator.publish(0)
    async with anyio.create_task_group() as tasks:
        async with swarm.serving():
            running = await tasks.start(outliving, swarm, clock)
            running.node._peers._directory.reachable = False
            await until(lambda: len(coordinator.accepted) >= 4)
        await until(lambda: not running.node.link.is_up)
        coordinator.forget_everybody()
        coordinator.publish(1)
        done = len(coordinator.accepted)
        async with swarm.serving():
            await until(lambda: len(coordinator.accepted) >= done + 8)
            await until(lambda: running.node.worker.loaded == 1)
            assert not await running.node._peers._records()
        tasks.cancel_scope.cancel()
