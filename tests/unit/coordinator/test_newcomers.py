"""How much of groups, batches and addresses unproven peers may take together, and that nothing stalls by it."""

import anyio
import pytest

from echo_coordinator.state.audit_rows import Standing
from echo_coordinator.state.audit_rules import FREE, AuditVerdict, Drift, Finding
from echo_coordinator.state.batch import Batch, Prompt, WaitState
from echo_coordinator.state.counters import DROPPED_SLOTS
from echo_coordinator.state.groups import SlotState
from echo_swarm.addresses import network_of
from echo_swarm.codec import pack_u32
from echo_swarm.trajectory import Reason
from tests.unit.coordinator.conftest import OpenRun, Run

pytestmark = pytest.mark.anyio

CLEAN = Finding(verdict=AuditVerdict.CLEAN, detail="", drift=Drift(tokens=6, surprise=0.5, variance=2.0))
NOT_AUDITED = Finding(verdict=AuditVerdict.NOT_AUDITED, detail="the file is gone")
QUARTER = {"unproven_share": 0.25}


def prove(run: Run, *names: str) -> None:
    for name in names:
        run.state.audits.standings[run.peer(name)] = Standing(clean=FREE)


def members_of(run: Run, name: str) -> dict[int, int]:
    """How many members of each group a peer holds."""
    found: dict[int, int] = {}
    for group in run.state.core.groups.by_id.values():
        for slot in group.slots:
            lease = run.state.core.leases.get(slot.lease_id) if slot.lease_id else None
            if slot.state is SlotState.LEASED and lease is not None and lease.peer == run.peer(name):
                found[group.group_id] = found.get(group.group_id, 0) + 1
    return found


async def test_while_a_proven_peer_is_here_newcomers_share_a_quarter_of_each_group(open_state: OpenRun):
    async with open_state(standing=QUARTER, group_size=8, max_staleness=1, probe_members=64) as run:
        await run.publish(0)
        await run.fill()
        run.join("old", "ann", "bob")
        prove(run, "old")
        run.grant("ann", 3, alone=False)
        run.grant("bob", alone=False)
        groups = len(run.state.core.groups.by_id)
        together = {g: members_of(run, "ann").get(g, 0) + members_of(run, "bob").get(g, 0) for g in range(groups)}
        assert together == {group: 2 for group in range(groups)}
        run.grant("old", alone=False)
        assert members_of(run, "old") == {group: 6 for group in range(groups)}


async def test_what_proven_peers_leave_is_everybodys_after_a_while(open_state: OpenRun):
    async with open_state(standing=QUARTER, group_size=8, lease_target_s=20, probe_members=64) as run:
        await run.publish(0)
        await run.fill(2)
        run.join("old", "ann")
        prove(run, "old")
        run.grant("ann", alone=False)
        assert members_of(run, "ann") == {0: 2, 1: 2} and not run.state.newcomers.reserve_ended()
        run.clock.advance(20)
        assert run.state.newcomers.reserve_ended() and not run.state.newcomers.reserve_ended()
        run.grant("ann", alone=False)
        assert members_of(run, "ann") == {0: 8, 1: 8}


@pytest.mark.parametrize("why", ["nobody is proven", "who is proven is suspended", "no bound", "no audits"])
async def test_a_run_with_only_newcomers_starts_as_any_other(open_state: OpenRun, why: str):
    standing = {"unproven_share": 1.0} if why == "no bound" else QUARTER
    audits = {"share": 0.0} if why == "no audits" else {}
    async with open_state(standing=standing, audits=audits, group_size=8, probe_members=64) as run:
        await run.publish(0)
        await run.fill(2)
        run.join("old", "ann")
        if why != "nobody is proven":
            prove(run, "old")
        if why == "who is proven is suspended":
            run.state.core.roster.suspended.add(run.peer("old"))
        run.grant("ann", alone=False)
        assert members_of(run, "ann") == {0: 8, 1: 8}


async def test_evaluations_are_first_offered_to_proven_peers(open_state: OpenRun):
    async with open_state(standing=QUARTER, lease_target_s=20) as run:
        await run.publish(0)
        run.join("old", "ann")
        prove(run, "old")
        await run.state.evaluations.add(0, [Prompt(index=0, prompt_ids=pack_u32([5]))])
        assert run.grant("ann", alone=False) == []
        run.clock.advance(20)
        assert len(run.grant("ann", alone=False)) == 1


async def test_a_batch_waits_for_audits_of_what_newcomers_made_above_their_share(open_state: OpenRun):
    async with open_state(standing=QUARTER) as run:
        await run.publish(0)
        await run.fill(2)
        run.join("ann", "bob")
        for name in ("ann", "bob", "ann", "bob"):
            await run.work(name, capacity=2)
        await run.score()
        audits, waited = run.state.audits, 0
        while isinstance(await run.state.updates.take_batch(), WaitState):
            share = await audits.next()
            assert share is not None, "nothing can be audited, so this would wait for ever"
            # What the training side cannot audit is not held against its peer.
            await audits.record(share, NOT_AUDITED if waited else CLEAN, 0.1, free=True)
            waited += 1
        # Of four shares of two completions one was left.
        assert waited == 3


async def test_a_batch_of_proven_peers_waits_for_nothing_and_neither_does_one_without_audits(open_state: OpenRun):
    async with open_state(standing=QUARTER) as run:
        await run.publish(0)
        await run.fill(2)
        run.join("ann", "new")
        prove(run, "ann")
        await run.work("ann", capacity=6)
        assert await run.work("new", capacity=2) == 1
        await run.work("ann")
        await run.score()
        batch = await run.state.updates.take_batch()
        assert isinstance(batch, Batch)
        run.state.updates.requeue(batch)
    async with open_state(standing=QUARTER, audits={"share": 0}) as run:
        run.state.audits.standings.clear()
        assert isinstance(await run.state.updates.take_batch(), Batch)


async def test_newcomers_behind_one_address_hold_so_much_together(open_state: OpenRun):
    limits = {"unproven_share": 1.0, "unproven_per_address": 6}
    async with open_state(standing=limits, group_size=8) as run:
        await run.publish(0)
        await run.fill(2)
        run.join("ann", "bob", "old", network="192.0.2.1")
        run.join("far", network="192.0.2.2")
        run.join("unknown")
        prove(run, "old")
        room = run.state.newcomers.room
        run.grant("ann", room(run.peer("ann"), 4), alone=False)
        run.grant("old", 4, alone=False)
        rooms = {name: room(run.peer(name), 4) for name in ("ann", "bob", "old", "far", "unknown")}
        assert rooms == {"ann": 2, "bob": 2, "old": 4, "far": 4, "unknown": 4}


async def test_a_fast_newcomer_does_not_take_the_places_that_others_behind_its_address_wait_for(open_state: OpenRun):
    limits = {"unproven_share": 1.0, "unproven_per_address": 8}
    async with open_state(standing=limits, group_size=8, max_staleness=4, probe_members=64) as run:
        await run.publish(0)
        await run.fill(6)
        run.join("fast", "slow", "late", network="192.0.2.1")
        turn, fast = run.state.newcomers.take_turn, run.peer("fast")
        leases = run.grant("fast", turn(fast, 64), alone=False)
        assert run.state.core.leases.in_flight(fast) == 8
        assert [turn(run.peer(name), 4) for name in ("slow", "late")] == [0, 0]
        (lease,) = leases
        await run.state.core.save()
        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                for name in ("slow", "late"):  # Their requests wait, and are woken.
                    tasks.start_soon(run.state.core.work_changed.wait, 60, run.peer(name))
                await anyio.lowlevel.checkpoint()
                await run.push("fast", [run.complete(lease, member) for member in (0, 1, 2)])
        # It asks first and comes last: three places, one for each who waits before it, and no more than its part.
        assert turn(fast, 64) == 0
        assert run.state.core.leases.in_flight(fast) == 5
        assert turn(run.peer("slow"), 4) == 2
        run.grant("slow", 2, alone=False)
        assert turn(run.peer("late"), 4) == 1
        run.grant("late", 1, alone=False)
        await run.push("fast", [run.complete(lease, member) for member in (3, 4, 5, 6)])
        assert turn(fast, 64) == 4, "nobody waits any more"


async def test_who_was_turned_away_and_does_not_come_again_holds_no_place(open_state: OpenRun):
    limits = {"unproven_share": 1.0, "unproven_per_address": 4}
    async with open_state(standing=limits, group_size=8, max_staleness=4, probe_members=64) as run:
        await run.publish(0)
        await run.fill(2)
        run.join("fast", "gone", network="192.0.2.1")
        turn, fast = run.state.newcomers.take_turn, run.peer("fast")
        (lease,) = run.grant("fast", turn(fast, 64), alone=False)
        assert turn(run.peer("gone"), 4) == 0
        await run.state.core.save()
        await run.push("fast", [run.complete(lease, 0)])
        assert turn(fast, 64) == 0
        run.clock.advance(41)
        assert turn(fast, 64) == 1


async def test_the_training_sides_own_faults_are_held_against_nobody(open_state: OpenRun):
    """A verifier that fails, a group that was dropped, a lost audit: window, standing and quota stay as they were."""
    async with open_state(standing=QUARTER) as run:
        await run.publish(0)
        await run.fill(2)
        run.join("ann", "bob")
        await run.work("ann", capacity=4)
        await run.work("bob", capacity=4)
        pace, ann = run.state.core.leases.pace, run.peer("ann")
        before = pace.allowance(ann, run.clock.monotonic_s())
        await run.score(lambda group, member: None if member == 0 else float(member % 2))
        assert run.state.core.counters.get(DROPPED_SLOTS, Reason.UNSCORABLE.value) == 2
        await run.work("ann", capacity=4)
        await run.score()
        while (share := await run.state.audits.next()) is not None:
            await run.state.audits.record(share, NOT_AUDITED, 0.1, free=True)
        assert pace.allowance(ann, run.clock.monotonic_s()) >= before
        for name in ("ann", "bob"):
            assert run.state.audits.standing(run.peer(name)) == Standing()
            assert run.state.standing(run.peer(name)) == "" and not run.state.bars(run.peer(name))
        assert isinstance(await run.state.updates.take_batch(), Batch)


def test_addresses_of_one_connection_are_one_network():
    assert network_of("/ip4/192.0.2.7/tcp/4001") == network_of("/ip4/192.0.2.7/udp/1/quic") == "192.0.2.7"
    assert network_of("/ip6/2001:db8:1:2:3::4/tcp/1") == network_of("/ip6/2001:db8:1:2::1/tcp/9") == "2001:db8:1:2::/64"
    assert network_of("/ip6/::ffff:192.0.2.7/tcp/1") == "192.0.2.7"
    for nothing in (
        "",
        "/memory/3",
        "/ip4/127.0.0.1/tcp/1",
        "/ip6/::1/tcp/1",
        "/dns4/example.org/tcp/1",
        "/ip4/x/tcp/1",
    ):
        assert network_of(nothing) == ""
    assert network_of("/ip4/192.0.2.7/tcp/1/p2p/x/p2p-circuit") == ""
