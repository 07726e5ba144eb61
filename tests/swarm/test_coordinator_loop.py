"""The coordinator's loop as a whole: real coordinator, real nodes, a network in memory; only the children stand in."""

import shutil
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import pytest

from echo_coordinator.coordinator import Coordinator
from echo_coordinator.loops import feeding, training
from echo_coordinator.loops.publishing import Publishing
from echo_coordinator.state.batch import Waiting
from echo_coordinator.state.groups import GroupState, SlotState
from echo_node.backends.options import ScriptedOptions
from echo_node.node import Outcome
from echo_swarm.errors import BackendFailed, LocalFault
from tests.swarm.support.node_harness import until
from tests.swarm.support.stand_ins import StandInScorers, coin
from tests.swarm.support.whole_run import WholeRun, make_run

pytestmark = pytest.mark.anyio

FAST = ScriptedOptions(batch=4)
SLOW = ScriptedOptions(batch=2, mean_s=0.02)


@pytest.fixture
def anyio_backend() -> str:
    """The coordinator runs on asyncio only."""
    return "asyncio"


async def ended(coordinator: Coordinator) -> None:
    with anyio.fail_after(120):
        await coordinator.ended.wait()


def leaf(error: BaseException | None) -> BaseException | None:
    """Return the only error of a group of groups."""
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    return error


def consumed(run: WholeRun) -> Counter[int]:
    return Counter(group.group_id for batch in run.trainer.trained for group in batch.groups)


async def test_a_run_has_its_updates_and_lets_every_node_go(tmp_path: Path):
    run = make_run(tmp_path, updates=5)
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(run.coordinator())
        nodes = [
            await stack.enter_async_context(run.node(name, options=options))
            for name, options in (("fast", FAST), ("slow", SLOW))
        ]
        await ended(coordinator)
        for node in nodes:
            with anyio.fail_after(120):
                await node.ended.wait()
        ledger = await coordinator.state.updates.ledger(10)
        status = coordinator.reporter.status()
    assert [node.outcome for node in nodes] == [Outcome.FINISHED] * 2
    assert [(line.update_no, line.new_version) for line in ledger] == [(n, n) for n in (5, 4, 3, 2, 1)]
    assert (status.state, status.policy_version, status.updates) == ("finished", 5, 5)
    assert status.staleness == dict(run.trainer.lags) and set(status.staleness) <= {0, 1, 2}
    assert set(consumed(run).values()) == {1}
    theirs = {node.peer_id: {"accepted": node.accepted, **node.rejected} for node in status.nodes}
    mine = {node.node.status().peer_id: node.verdicts for node in nodes}
    assert mine == {peer: {k: n for k, n in counts.items() if n or k == "accepted"} for peer, counts in theirs.items()}


async def test_sequential_updates_train_on_nothing_but_the_version_they_update(tmp_path: Path):
    run = make_run(tmp_path, updates=4, mode="sequential", max_staleness=0)
    async with run.coordinator() as coordinator, run.node("a"), run.node("b", options=SLOW):
        await ended(coordinator)
    assert set(run.trainer.lags) == {0}
    assert all(m.newest_version == batch.policy_version for batch in run.trainer.trained for m in batch.members)


async def test_a_trainer_that_fails_once_is_started_again_and_its_batch_trained_once(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(training, "RESTART_S", 0.01)
    run = make_run(tmp_path, updates=3)
    failed: list[tuple[int, ...]] = []

    def fail_the_second(batch):
        if batch.update == 2 and not failed:
            failed.append(tuple(group.group_id for group in batch.groups))
            return "out of memory"
        return None

    run.trainer.fail = fail_the_second
    async with run.coordinator() as coordinator:
        async with run.node():
            await ended(coordinator)
        events = await coordinator.state.core.events(10)
    assert run.trainer.opened == 2
    assert [batch.update for batch in run.trainer.trained] == [1, 2, 3]
    assert tuple(group.group_id for group in run.trainer.trained[1].groups) == failed[0]
    assert set(consumed(run).values()) == {1}
    assert any("out of memory" in event.text for event in events)


async def test_an_update_whose_answer_was_lost_is_in_the_ledger_once_and_not_trained_again(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(training, "RESTART_S", 0.01)
    run = make_run(tmp_path, updates=3)
    run.trainer.die_before_answer = 1
    async with run.coordinator() as coordinator:
        async with run.node():
            await ended(coordinator)
        state = coordinator.state
        ledger = [await state.updates.consumed(number) for number in (1, 2, 3)]
        assert state.updates.lags() == dict(run.trainer.lags)
    assert ledger == [[group.group_id for group in batch.groups] for batch in run.trainer.trained]
    assert set(consumed(run).values()) == {1}


async def test_a_trainer_that_always_fails_ends_the_run_with_its_own_words(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(training, "RESTART_S", 0.01)
    run = make_run(tmp_path, updates=3)
    run.trainer.fail = lambda batch: "the device is gone"
    with pytest.raises(BaseExceptionGroup) as raised:
        async with run.coordinator() as coordinator, run.node():
            await ended(coordinator)
    failures, rest = raised.value.split(BackendFailed)
    assert rest is None and failures is not None
    assert str(leaf(failures)) == "the device is gone"
    assert run.trainer.opened == training.GIVE_UP_AFTER and not run.trainer.trained


async def test_a_run_that_was_stopped_goes_on_where_it_stood(tmp_path: Path):
    run = make_run(tmp_path, updates=6, lease_s=2.0)
    async with run.node() as node:
        async with run.coordinator() as coordinator:
            await until(lambda: coordinator.state.updates.count >= 2)
            coordinator.request_stop()
            await ended(coordinator)
            first, index = coordinator.state.updates.count, coordinator.state.admission.next_prompt_index
            assert coordinator.reporter.status().state == "stopping"
        assert 2 <= first < 6 and len(run.trainer.trained) == first
        async with run.coordinator() as coordinator:
            state = coordinator.state
            assert (state.updates.count, state.core.versions.published) == (first, first)
            assert state.admission.next_prompt_index == index
            await ended(coordinator)
            assert node.verdicts["accepted"] == state.accepted()
    assert [batch.update for batch in run.trainer.trained] == [1, 2, 3, 4, 5, 6]
    assert set(consumed(run).values()) == {1}
    assert set(run.trainer.lags) <= {0, 1, 2}


@pytest.mark.parametrize(
    ("lost", "says"), [("state.db", "knows of none after 0"), ("checkpoints", "optimizer's state")]
)
async def test_a_run_folder_that_lost_a_part_is_refused_and_does_not_begin_again(tmp_path: Path, lost: str, says: str):
    run = make_run(tmp_path, updates=6)
    async with run.node(), run.coordinator() as coordinator:
        await until(lambda: coordinator.state.updates.count >= 2)
        coordinator.request_stop()
        await ended(coordinator)
        folder = coordinator.folder
    for path in folder.root.glob(f"{lost}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(LocalFault, match=says):
        async with run.coordinator():
            pass


async def test_a_coordinator_killed_in_an_update_trains_that_batch_once(tmp_path: Path):
    # A lease whose reply the kill cut off is known to nobody but the database; it runs out.
    run = make_run(tmp_path, updates=3, lease_s=2.0)
    async with run.node():
        async with run.coordinator() as coordinator:
            await until(lambda: coordinator.state.updates.count >= 1)
            run.trainer.hold()
            await until(lambda: run.trainer.training)
            first = coordinator.state.updates.count
        run.trainer.let_go()
        async with run.coordinator() as coordinator:
            await ended(coordinator)
            state = coordinator.state
            assert state.updates.count == state.core.versions.published == 3 > first
            ledger = [group for number in (1, 2, 3) for group in await state.updates.consumed(number)]
            assert len(ledger) == len(set(ledger)) == state.core.counters.get("work", "trained_groups")


async def test_a_task_that_always_pays_is_seen_bounded_and_can_be_stopped(tmp_path: Path):
    run = make_run(tmp_path)
    run.scorers = StandInScorers(reward=lambda item: 1.0)
    async with run.coordinator() as coordinator, run.node():
        await until(lambda: coordinator.reporter.status().trainer.state == Waiting.NO_SIGNAL)
        await until(lambda: coordinator.reporter.status().dropped_groups.get("no_signal", 0) >= 40)
        status = coordinator.reporter.status()
        assert not status.trainer.normal and "equal rewards" in status.trainer.detail
        assert any("100%" in warning and "too easy" in warning for warning in status.warnings)
        assert status.buffer.in_flight + status.buffer.ready <= status.buffer.capacity
        assert not run.trainer.trained
        await coordinator.answer("pause", {})
        assert coordinator.reporter.status().state == "paused"
        await coordinator.answer("resume", {})
        with anyio.fail_after(120):
            await coordinator.answer("stop", {})


async def test_a_paused_run_hands_out_and_consumes_nothing_until_it_is_resumed(tmp_path: Path):
    run = make_run(tmp_path)
    async with run.coordinator() as coordinator:
        state = coordinator.state
        async with run.node():
            await until(lambda: state.updates.count >= 2)
            await coordinator.answer("pause", {})
            # What is under way is finished, and nothing follows it.
            await until(lambda: coordinator.reporter.status().trainer.state == Waiting.PAUSED)
            await until(lambda: state.core.leases.total_in_flight() == 0)
            count = state.updates.count
            # An idle node loads no newer version than the one with which it began.
            await until(lambda: state.core.versions.published == count)
            assert coordinator.reporter.status().state == "paused"
        async with run.node("newcomer") as node:
            await until(lambda: state.core.roster.live() and node.node.worker.loaded == state.core.versions.published)
            assert (state.updates.count, state.core.leases.total_in_flight()) == (count, 0)
            await coordinator.answer("resume", {})
            await until(lambda: state.updates.count >= count + 2)


async def test_a_pause_outlives_a_restart(tmp_path: Path):
    run = make_run(tmp_path, updates=1)
    async with run.coordinator() as coordinator:
        await coordinator.answer("pause", {})
    async with run.coordinator() as coordinator, run.node() as node:
        await until(lambda: node.node.worker.loaded == 0)
        status = coordinator.reporter.status()
        assert (status.state, status.trainer.state, status.accepted) == ("paused", Waiting.PAUSED, 0)
        await coordinator.answer("resume", {})
        await ended(coordinator)


async def test_batches_fill_although_one_verdict_in_four_fails(tmp_path: Path):
    run = make_run(tmp_path, updates=4)
    draw, calls = coin(0.5), iter(range(1 << 20))
    run.scorers = StandInScorers(reward=lambda item: None if next(calls) % 4 == 0 else draw(item))
    async with run.coordinator() as coordinator:
        async with run.node():
            await ended(coordinator)
        dropped = coordinator.state.core.counters.of("dropped_slots")
    assert len(run.trainer.trained) == 4
    assert dropped["unscorable"] > 0
    assert all(member.reward is not None for batch in run.trainer.trained for member in batch.members)


async def test_when_every_verdict_fails_the_run_says_so_and_stays_responsive(tmp_path: Path):
    run = make_run(tmp_path)
    run.scorers = StandInScorers(reward=lambda item: None)
    async with run.coordinator() as coordinator, run.node():
        await until(lambda: coordinator.reporter.status().trainer.state == Waiting.FAILING)
        status = coordinator.reporter.status()
        assert not status.trainer.normal and "unscorable" in status.trainer.detail
        assert status.dropped_groups["incomplete_group"] >= 10
        run.scorers.reward = coin(0.5)
        await until(lambda: coordinator.state.updates.count >= 1)
        with anyio.fail_after(120):
            await coordinator.answer("stop", {})


async def test_after_a_wait_at_the_staleness_limit_a_new_version_fills_the_pipeline_at_once(
    tmp_path: Path, monkeypatch
):
    # Without the loops' second looks: what happens, happens because somebody was woken.
    monkeypatch.setattr(feeding, "LOOK_AGAIN_S", 3600.0)
    monkeypatch.setattr(training, "LOOK_AGAIN_S", 3600.0)
    run = make_run(tmp_path, max_staleness=3, groups_per_update=4)
    run.trainer.hold()
    held = ScriptedOptions(batch=8)
    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(run.coordinator())
        state = coordinator.state
        for name in ("a", "b"):
            await stack.enter_async_context(run.node(name, options=held))
        capacity = 4 * 4

        def counts() -> tuple[int, ...]:
            groups = state.core.groups
            return tuple(groups.count("train", s) for s in (GroupState.ACTIVE, GroupState.READY, GroupState.TRAINING))

        await until(lambda: counts() == (0, capacity - 4, 4), "everybody waits for the trainer")
        assert state.core.leases.total_in_flight() == 0 and state.admission.wanted == 0
        for _ in range(3):
            version = state.core.versions.trained
            run.trainer.let_go()
            await until(lambda version=version: state.core.versions.trained > version)
            run.trainer.hold()
            await until(lambda: run.trainer.training)
            await until(lambda: counts() == (0, capacity - 4, 4), "the pipeline is full again")
        assert state.core.groups.slot_counts("train")[SlotState.OPEN] == 0


def hold_publication(monkeypatch: pytest.MonkeyPatch, version: int) -> anyio.Event:
    """Let the publication of a version take until the event is set."""
    gate, publish = anyio.Event(), Publishing.publish

    async def held(self: Publishing, number: int, weights: Path):
        if number == version:
            await gate.wait()
        return await publish(self, number, weights)

    monkeypatch.setattr(Publishing, "publish", held)
    return gate


async def test_async_training_goes_on_while_a_version_is_published_but_only_one_ahead(tmp_path: Path, monkeypatch):
    gate = hold_publication(monkeypatch, 1)
    run = make_run(tmp_path, updates=4)
    async with run.node(), run.coordinator() as coordinator:
        state = coordinator.state
        await until(lambda: len(run.trainer.trained) == 2)
        await until(lambda: coordinator.reporter.status().trainer.state == "publishing")
        assert (state.updates.count, state.core.versions.published) == (1, 0)
        gate.set()
        await ended(coordinator)
        assert state.core.versions.published == 4
    assert set(run.trainer.lags) <= {0, 1, 2} and set(consumed(run).values()) == {1}


async def test_sequential_training_waits_until_a_version_is_published(tmp_path: Path, monkeypatch):
    gate = hold_publication(monkeypatch, 1)
    run = make_run(tmp_path, updates=2, mode="sequential", max_staleness=0)
    async with run.node(), run.coordinator() as coordinator:
        await until(lambda: coordinator.reporter.status().trainer.state == "publishing" and run.trainer.trained)
        assert coordinator.state.updates.count == 1 and coordinator.state.admission.wanted == 0
        gate.set()
        await ended(coordinator)
    assert set(run.trainer.lags) == {0}


async def test_what_goes_wrong_beside_the_coordinator_is_not_hidden_by_its_end(tmp_path: Path):
    run = make_run(tmp_path)
    with pytest.raises(BaseExceptionGroup) as raised:
        async with run.coordinator():
            raise LookupError("a bug in whoever runs it")
    assert raised.value.subgroup(LookupError) is not None


@pytest.mark.parametrize("file", ["batches", "metrics"])
async def test_a_file_that_cannot_be_written_ends_the_run_with_its_name(tmp_path: Path, file: str):
    run = make_run(tmp_path, updates=3)
    path = anyio.Path(getattr(run.folder, file))
    await (path.write_bytes(b"") if file == "batches" else path.mkdir())
    with pytest.raises(BaseExceptionGroup) as raised:
        async with run.coordinator() as coordinator, run.node():
            await ended(coordinator)
    faults, rest = raised.value.split(LocalFault)
    assert rest is None and f"cannot write {path}" in str(leaf(faults))
