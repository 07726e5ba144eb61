"""Whose failures use up the tries of a slot, in a whole run; the rule itself is in `test_leases.py`."""

import pytest

from echo_coordinator.state.groups import SlotState
from echo_swarm.work import Release
from tests.unit.coordinator.conftest import OpenRun, Run

pytestmark = pytest.mark.anyio


def fail(run: Run, name: str) -> None:
    core = run.state.core
    (lease, *_) = run.grant(name, 1)
    release = Release(lease_ids=(lease.lease_id,), cause="no", leaving=False, failed=True)
    now = run.clock.monotonic_s()
    core.on_dropped(core.leases.release(run.peer(name), release.lease_ids, "failed: no", now, failed=True))


async def test_a_peer_that_fails_at_everything_has_no_prompt_given_up_while_another_is_here(open_state: OpenRun):
    async with open_state(max_attempts=2) as run:
        await run.publish(0)
        await run.fill(1)
        run.join("bad", "good")
        for _ in range(20):
            fail(run, "bad")
        (group,) = run.state.core.groups.by_id.values()
        assert group.members(SlotState.VOID) == [] and group.slots[0].attempt == 20
        await run.state.core.save()
    async with open_state(max_attempts=2) as run:
        (group,) = run.state.core.groups.by_id.values()
        assert (group.slots[0].attempt, group.slots[0].spared) == (20, 19), "what was spared is spared after a restart"
        run.join("good")
        assert await run.work("good") == 4


async def test_who_is_suspended_or_gone_does_not_keep_a_poisonous_prompt_alive(open_state: OpenRun):
    async with open_state(max_attempts=2) as run:
        await run.publish(0)
        await run.fill(1)
        run.join("only", "gone", "suspended")
        run.state.core.roster.leave(run.peer("gone"))
        run.state.core.roster.suspended.add(run.peer("suspended"))
        for _ in range(2):
            fail(run, "only")
        (group,) = run.state.core.groups.by_id.values()
        assert group.members(SlotState.VOID) == [0]


async def test_failed_audits_and_unscorable_completions_of_one_peer_use_up_one_try(open_state: OpenRun):
    async with open_state(max_attempts=2) as run:
        await run.publish(0)
        await run.fill(1)
        run.join("bad", "good")
        for _ in range(6):
            await run.work("bad", capacity=1)
            await run.score(lambda _group, _member: None)
        for _ in range(6):
            await run.work("bad", capacity=1)
            await run.score()
            (group,) = run.state.core.groups.by_id.values()
            run.state.core.condemn(group, [0])
        assert group.members(SlotState.VOID) == [] and group.slots[0].attempt == 12
