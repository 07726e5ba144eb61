"""Which work is audited in what order, and what follows for the peer, its data, and those it shares groups with."""

from array import array
from pathlib import Path
from typing import Any

import pytest

from echo_coordinator.loops.auditing import Auditing
from echo_coordinator.state.audit_rows import PROBATION
from echo_coordinator.state.audit_rules import FREE, AuditVerdict, Drift, Finding
from echo_coordinator.state.audits import Share
from echo_coordinator.state.batch import Batch, Score
from echo_coordinator.state.groups import GroupState, SlotState
from echo_coordinator.trainer.probe_job import ProbeJob, ProbeValues
from echo_swarm.codec import pack_f32
from echo_swarm.trajectory import Reason
from echo_swarm.work import BackendReport, Hello, Role
from tests.unit.coordinator.conftest import RUN_ID, OpenRun, Run

pytestmark = pytest.mark.anyio

CLEAN = Finding(verdict=AuditVerdict.CLEAN, detail="", gap=0.001, drift=Drift(tokens=6, surprise=0.5, variance=2.0))
FAR = Finding(verdict=AuditVerdict.FAR, detail="two nats off", gap=2.0)
NOT_AUDITED = Finding(verdict=AuditVerdict.NOT_AUDITED, detail="the file is gone")


async def ready(run: Run, *names: str, each: int = 2) -> None:
    """Have groups of four filled and scored, `each` completions of each peer."""
    await run.fill()
    for _ in range(8):
        for name in names:
            for lease in run.grant(name, each):
                made = [run.complete(lease, member) for member in sorted(lease.outstanding)]
                assert set(await run.reasons(name, made)) == {Reason.ACCEPTED}
    await run.score()


async def begin(run: Run, *names: str) -> None:
    await run.publish(0)
    await ready(run, *names)


async def audit(run: Run, finding: Finding) -> Share | None:
    share = await run.state.audits.next()
    if share is not None:
        await run.state.audits.record(share, finding, 0.1, free=True)
    return share


async def audit_all(run: Run, finding: Finding) -> list[Share]:
    made: list[Share] = []
    while (share := await audit(run, finding)) is not None:
        made.append(share)
    return made


def join(run: Run, name: str) -> None:
    backend = BackendReport(backend="scripted", build="1", precision="float32", device="none", batch=4)
    hello = Hello(
        run_id=RUN_ID,
        software="test",
        role=Role.INFERENCE,
        instance=bytes(16),
        wall_s=run.clock.wall_s(),
        backend=backend,
        addresses=(),
    )
    run.state.core.roster.admit(run.peer(name), hello, run.clock.monotonic_s(), 0.0)


async def test_all_of_a_newcomer_is_audited_once_each_peers_part_by_itself(open_state: OpenRun) -> None:
    async with open_state() as run:
        await begin(run, "ann", "bob")
        shares = await audit_all(run, CLEAN)
        groups = run.state.core.groups.count("train", GroupState.READY)
        assert groups == 6
        assert sorted((s.group.group_id, s.peer) for s in shares) == sorted(
            (group, run.peer(name)) for group in range(groups) for name in ("ann", "bob")
        )
        assert {len(share.completions) for share in shares} == {2}
        assert all({made.peer for made in share.completions} == {share.peer} for share in shares)
        standing = run.state.audits.standing(run.peer("ann"))
        assert (standing.clean, standing.failed, standing.drift.tokens) == (groups, 0, 6 * groups)
        assert run.state.audits.word(run.peer("ann")) == "new"


async def test_a_proven_peer_is_audited_now_and_then_and_before_newcomers(open_state: OpenRun) -> None:
    async with open_state() as run:
        await begin(run, "ann")
        audited, seen, version = 0, 0, 0
        while seen < 120:
            audited += len(await audit_all(run, CLEAN))
            seen += run.state.core.groups.count("train", GroupState.READY)
            while isinstance(batch := await run.state.updates.take_batch(), Batch):
                version += 1
                await run.commit(batch, version)
            await ready(run, "ann")
        assert run.state.audits.word(run.peer("ann")) == "proven"
        # 16 in any case; from then on 1/2 + 1/3 + ... of the rest.
        assert FREE < audited < 60
        assert run.state.core.counters.get("work", "audits_missed") == 0


async def test_a_failed_audit_takes_back_what_was_not_trained_and_stops_the_peer(open_state: OpenRun) -> None:
    async with open_state() as run:
        join(run, "ann")
        join(run, "bob")
        await begin(run, "ann", "bob")
        batch = await run.state.updates.take_batch()
        assert isinstance(batch, Batch)
        await run.commit(batch, 1)
        await run.fill()
        held = run.grant("ann", 2)
        share = await audit(run, CLEAN)
        while share is not None and share.peer != run.peer("ann"):
            share = await audit(run, CLEAN)
        share = await run.state.audits.next()
        while share is not None and share.peer != run.peer("ann"):
            await run.state.audits.record(share, CLEAN, 0.1, free=True)
            share = await run.state.audits.next()
        assert share is not None
        await run.state.audits.record(share, FAR, 0.1, free=True)

        for group in run.state.core.groups.of_kind("train"):
            assert not [slot for slot in group.slots if slot.work and slot.work.peer == run.peer("ann")]
            assert group.state is GroupState.ACTIVE
        assert not any(lease.outstanding for lease in held)
        assert run.state.audits.word(run.peer("ann")) == "suspended"
        assert run.state.bars(run.peer("ann")) and not run.state.bars(run.peer("bob"))
        verdicts = await run.push("ann", [run.complete(held[0], min(held[0].draws))])
        assert verdicts[0].reason is Reason.LATE and "two nats off" in verdicts[0].detail
        assert any("two nats off" in event.text for event in await run.state.core.events(5))
        assert any("two nats off" in warning for warning in run.state.warnings())
        # What it did is done again by others, with other seeds, and trained on.
        await ready(run, "bob", each=16)
        assert isinstance(await run.state.updates.take_batch(), Batch)


async def test_work_that_is_being_scored_when_its_peer_fails_is_dropped_with_its_score(open_state: OpenRun) -> None:
    async with open_state() as run:
        await begin(run, "ann")
        while isinstance(batch := await run.state.updates.take_batch(), Batch):
            await run.commit(batch, batch.version + 1)
            break
        await run.fill()
        await run.work("ann", capacity=3)
        items = await run.state.rewards.take(100)
        assert len(items) == 3
        await audit(run, FAR)
        await run.state.rewards.record([Score(group_id=i.group_id, member=i.member, reward=1.0) for i in items])
        states = [s.state for g in run.state.core.groups.of_kind("train") for s in g.slots]
        assert set(states) == {SlotState.OPEN}
        assert not run.state.core.condemned
        await ready(run, "bob", each=16)
        assert isinstance(await run.state.updates.take_batch(), Batch)


async def test_suspensions_end_grow_and_give_way_to_one_completion_at_a_time(open_state: OpenRun) -> None:
    async with open_state() as run:
        ann, audits = run.peer("ann"), run.state.audits
        await begin(run, "ann")
        await audit(run, FAR)
        run.clock.advance(audits.settings.suspend_s - 1)
        assert run.state.bars(ann)
        run.clock.advance(2)
        assert not run.state.bars(ann) and audits.word(ann) == "probation"
        for alone in (True, False):
            assert len([m for lease in run.grant("ann", alone=alone) for m in lease.outstanding]) == int(alone)
        assert run.state.core.leases.in_flight(ann) == 1
        run.state.core.on_dropped(run.state.core.leases.release_all(ann, "released", run.clock.monotonic_s()))
        await ready(run, "ann", "bob", each=16)
        assert isinstance(await run.state.updates.take_batch(), Batch)
        while audits.standing(ann).clean < PROBATION:
            await ready(run, "ann", "bob", each=16)
            shares = await audit_all(run, CLEAN)
            assert shares
            while isinstance(batch := await run.state.updates.take_batch(), Batch):
                await run.commit(batch, batch.version + 1)
        assert audits.word(ann) == "new"
        now = run.clock.monotonic_s()
        assert run.state.core.leases.share(ann, capacity=8, tokens_per_s=0, alone=False, now=now) > 1


async def test_the_second_failure_costs_more_than_the_first(open_state: OpenRun) -> None:
    async with open_state() as run:
        ann, audits = run.peer("ann"), run.state.audits
        await run.publish(0)
        spans: list[float] = []
        for _ in range(3):
            await ready(run, "ann", each=16)
            for _ in range(20):
                await ready(run, "ann", each=1)
            await audit(run, FAR)
            spans.append(audits.standing(ann).until - run.clock.wall_s())
            run.clock.advance(spans[-1] + 1)
        assert spans == pytest.approx([300, 1200, 4800])


async def test_the_training_sides_own_failures_count_for_nobody(open_state: OpenRun) -> None:
    async with open_state() as run:
        await begin(run, "ann")
        shares = await audit_all(run, NOT_AUDITED)
        assert len(shares) == run.state.core.groups.count("train", GroupState.READY)
        standing = run.state.audits.standing(run.peer("ann"))
        assert (standing.clean, standing.failed) == (0, 0)
        assert not run.state.bars(run.peer("ann"))
        assert isinstance(await run.state.updates.take_batch(), Batch)
        assert any("the file is gone" in warning for warning in run.state.warnings())


async def test_what_was_trained_unaudited_is_counted(open_state: OpenRun) -> None:
    async with open_state() as run:
        await begin(run, "ann", "bob")
        assert len(run.state.audits.pending()) == 12
        await audit(run, CLEAN)
        batch = await run.state.updates.take_batch()
        assert isinstance(batch, Batch)
        await run.commit(batch, 1)
        assert len(run.state.audits.pending()) == 8
        assert run.state.core.counters.get("work", "audits_missed") == 3


async def test_standing_draws_and_suspensions_survive_a_restart(open_state: OpenRun) -> None:
    async with open_state() as run:
        await begin(run, "ann", "bob")
        first = await audit(run, CLEAN)
        assert first is not None
        waiting = await run.state.audits.next()
        before = dict(run.state.audits.standings)
    async with open_state() as run:
        assert run.state.audits.standings == before
        again = await run.state.audits.next()
        assert waiting is not None and again is not None
        assert (again.group.group_id, again.peer) == (waiting.group.group_id, waiting.peer)
        await run.state.audits.record(again, FAR, 0.1, free=False)
        failed = again.peer
    async with open_state() as run:
        assert run.state.bars(failed)
        assert not [
            slot
            for group in run.state.core.groups.of_kind("train")
            for slot in group.slots
            if slot.work and slot.work.peer == failed
        ]


@pytest.mark.parametrize("settings", [{"share": 0.0}])
async def test_audits_can_be_turned_off(open_state: OpenRun, settings: dict[str, Any]) -> None:
    async with open_state(audits=settings) as run:
        await begin(run, "ann")
        assert await run.state.audits.next() is None


async def test_a_run_may_only_warn(open_state: OpenRun) -> None:
    async with open_state(audits={"action": "warn"}) as run:
        join(run, "ann")
        await begin(run, "ann")
        await audit(run, FAR)
        assert not run.state.bars(run.peer("ann"))
        assert isinstance(await run.state.updates.take_batch(), Batch)
        assert any("two nats off" in warning for warning in run.state.warnings())


class Weights:
    """A trainer whose log-probabilities are -0.5 x (1 + version), for every token."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def probe(self, job: ProbeJob, *, timeout_s: float) -> tuple[ProbeValues, ...]:
        self.asked.append(job.weights)
        each = -0.5 * (1 + int(Path(job.weights).name))
        made: list[ProbeValues] = []
        for text in job.texts:
            logprobs = array("f", [each] * (len(text.completion_ids) // 4))
            flat = array("f", bytes(4 * len(logprobs)))
            made.append(
                ProbeValues(completion_ids=text.completion_ids, logprobs=logprobs, expected=logprobs, variance=flat)
            )
        return tuple(made)


@pytest.mark.parametrize("claimed", [[-0.5, -1.0, -1.0], [-2.0, -0.1, -2.0]])
async def test_completions_of_several_versions_are_audited_with_each(open_state: OpenRun, claimed: list[float]) -> None:
    async with open_state(groups_per_update=1) as run:
        join(run, "ann")
        await run.publish(0)
        await run.publish(1)
        await run.fill(1)
        (lease,) = run.grant("ann")
        lease.min_version = 0
        values = pack_f32(claimed)
        made = [run.complete(lease, m, oldest_version=0, logprobs=values) for m in sorted(lease.outstanding)]
        assert set(await run.reasons("ann", made)) == {Reason.ACCEPTED}
        await run.score()
        trainer, auditing = Weights(), Auditing(run.state, weights=lambda version, current: Path(f"/{version}"))
        assert await auditing.one(trainer)
        assert trainer.asked == ["/0", "/1"]
        standing = run.state.audits.standing(run.peer("ann"))
        assert (standing.clean, standing.failed) == ((1, 0) if claimed[0] == -0.5 else (0, 1))


async def test_what_a_peer_adds_to_an_audited_share_is_drawn_for_anew(open_state):
    """Slots of an accomplice who failed are open again; who passed with one completion cannot fill them unseen."""
    async with open_state(group_size=8, groups_per_update=1) as run:
        await run.publish(0)
        await run.fill(1)

        async def deliver(name: str, capacity: int) -> None:
            while leases := run.grant(name, capacity):
                for lease in leases:
                    await run.reasons(name, [run.complete(lease, m) for m in sorted(lease.outstanding)])
                if capacity == 1:
                    return

        await deliver("eve", 1)
        await deliver("fay", 8)
        await run.score()
        audits = run.state.audits
        while (share := await audits.next()) is not None:
            clean = share.peer == run.peer("eve")
            finding = Finding(verdict=AuditVerdict.CLEAN if clean else AuditVerdict.FAR, detail="")
            await audits.record(share, finding, 0.1, free=True)
        assert not audits.pending() and audits.word(run.peer("fay")) == "suspended"
        await deliver("eve", 8)
        await run.score()
        assert [peer for _, peer in audits.pending()] == [run.peer("eve")]
        share = await audits.next()
        assert share is not None and len(share.completions) == 8
        await audits.record(share, Finding(verdict=AuditVerdict.CLEAN, detail=""), 0.1, free=True)
        assert not audits.pending()
