"""The run as a whole: admission, batches, updates, evaluation, restarts."""

import pytest

from echo_coordinator.state.batch import Batch, Prompt, Score, Waiting, WaitState
from echo_coordinator.state.groups import FIRST_EVAL_GROUP_ID, SlotState
from echo_swarm import codec
from echo_swarm.trajectory import Reason

pytestmark = pytest.mark.anyio


async def ready_batch(run) -> Batch:
    batch = await run.state.updates.take_batch()
    assert isinstance(batch, Batch)
    return batch


async def wait_state(run) -> WaitState:
    state = await run.state.updates.take_batch()
    assert isinstance(state, WaitState)
    return state


async def test_groups_flow_from_prompt_to_update(open_state):
    async with open_state(max_staleness=1) as run:
        assert await run.fill() == 0
        assert (await wait_state(run)).reason is Waiting.STARTING
        await run.publish(0)
        assert await run.fill() == 4
        assert await run.fill() == 0
        assert await run.work("ann") == 16
        assert (await wait_state(run)).reason is Waiting.SCORING
        assert await run.score() == 16
        batch = await ready_batch(run)
        assert [group.group_id for group in batch.groups] == [0, 1]
        assert batch.groups[0].prompt_ids == codec.pack_u32([5, 6, 7])
        first = batch.groups[0].members[1]
        assert (first.peer, first.reward, first.aged) == (run.peer("ann"), 1.0, False)
        assert codec.unpack_u32(first.token_ids).tolist() == [11, 11, 3]
        assert run.state.admission.wanted == 0
        await run.commit(batch, 1)
        assert run.state.admission.wanted == 2
        assert run.state.updates.lags() == {0: 8}
        assert await run.state.updates.consumed(1) == [0, 1]


async def test_sequential_work_is_pinned_and_one_reply_hands_out_the_step_in_order(open_state):
    async with open_state(mode="sequential", groups_per_update=3) as run:
        await run.publish(0)
        assert await run.fill() == 3
        leases = run.grant("ann")
        assert [(lease.group_id, sorted(lease.draws)) for lease in leases] == [(g, [0, 1, 2, 3]) for g in range(3)]
        assert {(lease.min_version, lease.max_version) for lease in leases} == {(0, 0)}


async def test_nothing_is_sampled_from_the_old_policy_while_an_update_is_being_published(open_state):
    async with open_state(mode="sequential") as run:
        await run.publish(0)
        await run.fill()
        await run.work("ann")
        await run.score()
        await run.commit(await ready_batch(run), 1, published=False)
        assert run.state.admission.wanted == 0
        assert (await wait_state(run)).reason is Waiting.PUBLISHING
        await run.publish(1)
        assert run.state.admission.wanted == 2


async def test_in_flight_work_is_back_at_target_right_after_a_version_is_published(open_state):
    """A pause at the limit ends with all of the work scheduled, not with one group."""
    async with open_state(max_staleness=3, groups_per_update=16) as run:
        await run.publish(0)
        await run.fill()
        await run.work("ann")
        await run.score()
        assert run.state.admission.wanted == 0
        batch = await ready_batch(run)
        await run.commit(batch, 1)
        assert run.state.admission.wanted == 16
        await run.fill()
        assert sum(len(lease.draws) for lease in run.grant("ann")) == 64
        assert run.state.admission.in_flight == run.state.admission.capacity == 64


async def test_a_member_that_aged_counts_in_the_baseline_only(open_state):
    async with open_state(max_staleness=1, groups_per_update=1) as run:
        await run.publish(0)
        await run.fill()
        first, second = run.grant("ann", 8)
        await run.state.core.save()
        assert await run.reasons("ann", [run.complete(second, 0)]) == [Reason.ACCEPTED]
        for version in (1, 2):
            if version == 1:
                await run.push("ann", [run.complete(first, m) for m in range(4)])
                await run.score()
                await run.commit(await ready_batch(run), version)
            else:
                await run.publish(version)
        made = [run.complete(second, m, version=2) for m in range(1, 4)]
        assert await run.reasons("ann", made) == [Reason.ACCEPTED] * 3
        await run.score()
        batch = await ready_batch(run)
        assert [member.aged for member in batch.groups[0].members] == [True, False, False, False]
        await run.commit(batch, 3)
        assert run.state.core.counters.get("work", "aged_members") == 1
        assert run.state.updates.lags() == {0: 7}


async def test_a_group_all_of_whose_members_aged_is_dropped_as_stale(open_state):
    async with open_state(max_staleness=1, groups_per_update=1) as run:
        await run.publish(0)
        await run.fill()
        await run.work("ann")
        await run.score()
        await run.publish(2)
        assert (await wait_state(run)).reason is Waiting.PROMPTS
        assert run.state.core.counters.of("dropped_groups") == {"stale": 2}
        assert run.state.admission.wanted == 2


async def test_groups_without_signal_are_replaced_and_the_wait_is_bounded(open_state):
    async with open_state(groups_per_update=2, max_staleness=1) as run:
        await run.publish(0)
        rounds = 0
        while (state := await run.state.updates.take_batch()).reason is not Waiting.NO_SIGNAL:
            await run.fill()
            await run.work("ann")
            await run.score(lambda group, member: 1.0)
            rounds += 1
        assert rounds == 2 and not state.normal
        assert run.state.core.counters.of("dropped_groups") == {"no_signal": 8}
        assert run.state.core.signal_window.no_signal_share == 1.0
        assert run.state.admission.wanted == 4
        # What there is goes out, smaller than usual.
        await run.fill()
        await run.work("ann")
        await run.score(lambda group, member: float(group == 9 and member == 0))
        assert [group.group_id for group in (await ready_batch(run)).groups] == [9]


async def test_groups_without_signal_are_kept_when_the_settings_say_so(open_state):
    async with open_state(no_signal="keep") as run:
        await run.publish(0)
        await run.fill()
        await run.work("ann")
        await run.score(lambda group, member: 1.0)
        assert [group.no_signal for group in (await ready_batch(run)).groups] == [True, True]


@pytest.mark.parametrize("arrived", [5, 4, 1])
async def test_a_group_of_8_with_missing_members_is_kept_or_dropped_by_the_minimum(open_state, arrived: int):
    async with open_state(group_size=8, groups_per_update=1, max_staleness=1, max_attempts=1) as run:
        await run.publish(0)
        await run.fill(1)
        (lease,) = run.grant("ann")
        await run.push("ann", [run.complete(lease, m) for m in range(arrived)])
        await run.score()
        run.clock.advance(run.state.core.settings.lease_s)
        await run.state.core.tick()
        if arrived >= 4:
            (group,) = (await ready_batch(run)).groups
            assert [member.member for member in group.members] == list(range(arrived))
        else:
            assert run.state.core.counters.of("dropped_groups") == {"incomplete_group": 1}
            assert run.state.admission.in_flight == 0


async def test_a_prompt_that_always_fails_is_dropped_after_3_tries_and_the_rest_goes_on(open_state):
    async with open_state() as run:
        await run.publish(0)
        await run.fill(3)
        core, tries = run.state.core, 0
        while leases := run.grant("ann"):
            for lease in leases:
                if lease.group_id == 0:
                    tries += 1
                    core.on_dropped(
                        core.leases.release(run.peer("ann"), [lease.lease_id], "failed: too long", 0, failed=True)
                    )
                else:
                    await run.push("ann", [run.complete(lease, m) for m in lease.draws])
        assert tries == 3
        assert core.counters.of("dropped_groups") == {"incomplete_group": 1}
        await run.score()
        assert [group.group_id for group in (await ready_batch(run)).groups] == [1, 2]


async def test_a_swarm_that_always_fails_is_told_apart_from_one_that_works(open_state):
    async with open_state(max_attempts=1) as run:
        await run.publish(0)
        for _ in range(10):
            await run.fill(1)
            (lease,) = run.grant("ann")
            core = run.state.core
            core.on_dropped(
                core.leases.release(run.peer("ann"), [lease.lease_id], "failed: out of memory", 0, failed=True)
            )
        state = await wait_state(run)
        assert state.reason is Waiting.FAILING and not state.normal
        assert "out of memory" in state.detail


async def test_a_rejected_completion_is_sampled_again_by_somebody(open_state):
    """One of four is rejected; the batch fills all the same."""
    async with open_state() as run:
        await run.publish(0)
        await run.fill(2)
        reject = iter([True, False, False, False] * 8)
        while leases := run.grant("ann"):
            for lease in leases:
                made = [run.complete(lease, m, temperature=9.0 if next(reject, False) else 1.0) for m in lease.draws]
                await run.push("ann", made)
        await run.score()
        assert len((await ready_batch(run)).groups) == 2
        assert run.state.rejected() == {"wrong_sampling": 3}


async def test_a_filter_that_rejects_everything_leads_to_a_clear_state(open_state):
    async with open_state(max_attempts=1) as run:
        await run.publish(0)
        while (state := await wait_state(run)).reason is not Waiting.FAILING:
            await run.fill()
            for lease in run.grant("ann"):
                await run.push("ann", [run.complete(lease, m, seed=1) for m in lease.draws])
        assert "wrong_sampling" in state.detail


async def test_an_unscorable_completion_is_tried_again_and_counted_apart(open_state):
    async with open_state() as run:
        await run.publish(0)
        await run.fill(2)
        await run.work("ann")
        await run.score(lambda group, member: None if (group, member) == (0, 0) else float(member % 2))
        assert run.state.core.groups.by_id[0].slots[0].state is SlotState.OPEN
        assert run.state.core.counters.of("dropped_slots") == {"unscorable": 1}
        assert run.state.rejected() == {}
        await run.work("bob")
        await run.score(lambda group, member: float("nan"))
        await run.work("cid")
        await run.score()
        assert [member.peer for member in (await ready_batch(run)).groups[0].members][:2] == [
            run.peer("cid"),
            run.peer("ann"),
        ]


async def test_evaluation_is_greedy_pinned_and_outside_the_capacity(open_state):
    async with open_state() as run:
        await run.publish(3)
        prompts = [Prompt(index=i, prompt_ids=codec.pack_u32([i])) for i in range(4)]
        wanted = run.state.admission.wanted
        await run.state.evaluations.add(3, prompts)
        assert run.state.admission.wanted == wanted
        await run.fill()
        leases = run.grant("ann", 5)
        assert [lease.group_id for lease in leases[:4]] == [FIRST_EVAL_GROUP_ID + i for i in range(4)]
        assert (leases[0].min_version, leases[0].max_version) == (3, 3)
        await run.publish(9)
        warm = run.complete(leases[0], 0, version=3, logprobs=codec.pack_f32([-0.1] * 3))
        assert await run.reasons("ann", [warm]) == [Reason.BAD_LOGPROB]
        for lease in leases[1:4]:
            assert await run.reasons("ann", [run.complete(lease, 0, version=3)]) == [Reason.ACCEPTED]
        assert await run.score(lambda group, member: float(group % 2)) == 3
        progress = run.state.evaluations.progress(3)
        assert (progress.total, progress.done, progress.scored, progress.is_complete) == (4, 3, 3, False)
        assert progress.accuracy == pytest.approx(2 / 3)
        await run.state.evaluations.record(3)
        assert run.state.evaluations.under_way() == []
        assert run.state.evaluations.recorded()[0].scored == 3
    async with open_state() as run:
        assert [(e.version, e.prompts) for e in run.state.evaluations.recorded()] == [(3, 4)]
        assert run.state.evaluations.under_way() == []


async def test_a_pause_stops_work_and_batches_and_outlives_a_restart(open_state):
    async with open_state() as run:
        await run.publish(0)
        await run.fill(2)
        await run.work("ann")
        await run.score()
        await run.state.set_paused(True)
    async with open_state() as run:
        assert run.state.admission.wanted == 0
        assert (await wait_state(run)).reason is Waiting.PAUSED
        await run.state.set_paused(False)
        assert len((await ready_batch(run)).groups) == 2


async def test_a_restart_finds_everything_as_it_was(open_state):
    async with open_state(max_staleness=2) as run:
        await run.publish(0)
        await run.fill()
        (first, *_) = run.grant("ann", 8)
        await run.state.core.save()
        await run.push("ann", [run.complete(first, m) for m in range(4)])
        taken = await run.state.rewards.take(2)
        await run.state.rewards.record([Score(group_id=0, member=0, reward=0.5)])
        assert len(taken) == 2
    async with open_state(max_staleness=2) as run:
        core = run.state.core
        assert (run.state.admission.in_flight, run.state.admission.wanted) == (6, 0)
        assert run.state.admission.next_prompt_index == 6
        assert [slot.state for slot in core.groups.by_id[0].slots] == [SlotState.SCORED] + [SlotState.FILLED] * 3
        assert run.state.rewards.unscored == 3
        assert core.leases.in_flight(run.peer("ann")) == 4
        assert run.state.accepted() == 4
        lease = core.leases.get(core.groups.by_id[1].slots[0].lease_id)
        assert await run.reasons("ann", [run.complete(lease, 0)]) == [Reason.ACCEPTED]
        await run.fill(1)
        assert max(core.groups.by_id) == 6


async def test_a_batch_that_was_not_committed_is_ready_again(open_state):
    async with open_state() as run:
        await run.publish(0)
        await run.fill(2)
        await run.work("ann")
        await run.score()
        batch = await ready_batch(run)
        run.state.updates.requeue(batch)
        assert await ready_batch(run) == batch
    async with open_state() as run:
        assert await ready_batch(run) == batch
        await run.commit(batch, 1)
    async with open_state() as run:
        assert run.state.admission.in_flight == 0
        assert run.state.core.versions.trained == 1
        assert (await run.state.updates.ledger(5))[0].checkpoint == "c1"
        assert run.state.updates.lags() == {0: 8}


async def test_a_wait_keeps_its_start_as_long_as_its_reason(open_state):
    async with open_state() as run:
        await run.publish(0)
        await run.fill()
        first = await wait_state(run)
        run.clock.advance(30)
        assert (await wait_state(run)).since == first.since
        assert first.reason is Waiting.NO_NODES


async def test_old_completions_are_deleted_but_their_leases_still_refuse_replays(open_state):
    async with open_state(retain_updates=1, groups_per_update=1) as run:
        await run.publish(0)
        await run.fill(1)
        (lease,) = run.grant("ann")
        made = [run.complete(lease, m) for m in range(4)]
        await run.push("ann", made)
        await run.score()
        await run.commit(await ready_batch(run), 1)
        await run.fill(1)
        await run.work("ann")
        await run.score()
        await run.commit(await ready_batch(run), 2)
        db = await run.state.core.committer.execute(
            lambda db: db.execute("SELECT DISTINCT group_id FROM trajectories").fetchall()
        )
        assert db == [(1,)]
        assert await run.reasons("ann", made) == [Reason.ACCEPTED] * 4
        assert run.state.accepted() == 8


async def test_old_leases_are_deleted_in_the_end_and_a_replay_is_refused_all_the_same(open_state):
    async with open_state(retain_updates=1, retain_leases=2, groups_per_update=1) as run:
        await run.publish(0)
        await run.fill(1)
        (lease,) = run.grant("ann")
        made = [run.complete(lease, m) for m in range(4)]
        await run.push("ann", made)
        await run.score()
        for version in range(1, 4):
            kept = await run.state.core.committer.execute(
                lambda db: db.execute("SELECT count(*) FROM leases WHERE group_id = 0").fetchone()[0]
            )
            assert kept == 1
            await run.commit(await ready_batch(run), version)
            await run.fill(1)
            await run.work("ann")
            await run.score()
        db = await run.state.core.committer.execute(
            lambda db: db.execute("SELECT DISTINCT group_id FROM leases ORDER BY group_id").fetchall()
        )
        assert db == [(1,), (2,), (3,)]
        assert await run.reasons("ann", made) == [Reason.NO_LEASE] * 4
    async with open_state(retain_updates=1, retain_leases=2, groups_per_update=1) as run:
        assert run.state.updates.count == 3
