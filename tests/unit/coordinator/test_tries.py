"""Whose failures use up the tries of a slot, and when it gets another seed, in a whole run.

The rule of what a lease takes back is in `test_leases.py`.
"""

from typing import Any

import msgpack
import pytest

from echo_coordinator.state.groups import Slot, SlotState
from echo_coordinator.state.rows import pack_slots, unpack_slots
from echo_swarm.work import Release
from tests.unit.coordinator.conftest import OpenRun, Run

pytestmark = pytest.mark.anyio


def fail(run: Run, name: str, *, failed: bool = True) -> int:
    """Take one completion and hand it back. Returns the seed."""
    core = run.state.core
    (lease, *_) = run.grant(name, 1)
    (member,) = lease.draws
    release = Release(lease_ids=(lease.lease_id,), cause="no", leaving=False, failed=failed)
    now = run.clock.monotonic_s()
    core.on_dropped(core.leases.release(run.peer(name), release.lease_ids, "failed: no", now, failed=failed))
    return core.seed_of(lease, member)


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


async def test_who_hands_back_what_it_does_not_like_has_others_draw_the_same(open_state: OpenRun):
    async with open_state() as run:
        await run.publish(0)
        await run.fill(1)
        run.join("picky", "good")
        seeds = {fail(run, "picky", failed=failed) for failed in (True, False) * 5}
        assert len(seeds) == 1, "it is shown one draw, however often it asks"
        await run.state.core.save()
    async with open_state() as run:
        run.join("good")
        (lease,) = run.grant("good", 1)
        assert run.state.core.seed_of(lease, 0) in seeds, "and whoever is next makes that, also after a restart"


async def test_a_seed_at_which_two_peers_fail_is_replaced(open_state: OpenRun):
    async with open_state(max_attempts=4) as run:
        await run.publish(0)
        await run.fill(1)
        run.join("ann", "bob", "cid", "dan")
        seeds = [fail(run, name) for name in ("ann", "bob", "cid")]
        assert seeds[0] == seeds[1] != seeds[2]


@pytest.mark.parametrize("scored", [False, True])
async def test_what_was_accepted_and_taken_back_is_drawn_anew(open_state: OpenRun, scored: bool):
    async with open_state(max_attempts=10) as run:
        await run.publish(0)
        await run.fill(1)
        run.join("bad", "good")
        seeds: set[int] = set()
        for _ in range(3):
            (lease,) = run.grant("bad", 1)
            seeds.add(run.state.core.seed_of(lease, 0))
            await run.push("bad", [run.complete(lease, 0)])
            (group,) = run.state.core.groups.by_id.values()
            await run.score(lambda _group, _member: 1.0 if scored else None)
            if scored:
                run.state.core.condemn(group, [0])
        assert len(seeds) == 3


def test_slots_of_older_databases_get_seeds_that_nobody_had():
    packer: Any = msgpack
    (row,) = packer.unpackb(pack_slots([Slot(attempt=5, spared=3)]))
    for older in (row[:5], row[:6]):
        (slot,) = unpack_slots(packer.packb([older]))
        assert slot.draw >= 5
    (same,) = unpack_slots(packer.packb([row]))
    assert (same.attempt, same.spared, same.redrawn, same.draw) == (5, 3, 0, 1)
