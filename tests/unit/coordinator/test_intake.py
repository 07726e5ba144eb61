"""Pushes: every one gets an answer, what is accepted is on disk, nothing counts twice."""

import sqlite3
import tracemalloc

import anyio
import pytest

from echo_coordinator.state import fault_quota, rows
from echo_coordinator.state.fault_quota import BURST, REPLAY_COST
from echo_coordinator.state.intake import Busy
from echo_coordinator.state.leases import LiveLease
from echo_swarm import codec
from echo_swarm.envelope import seal
from echo_swarm.errors import BadSignature, MalformedMessage, RemoteError
from echo_swarm.trajectory import Reason, Submission, Trajectory

pytestmark = pytest.mark.anyio


async def started(run, groups: int = 2) -> None:
    await run.publish(0)
    await run.fill(groups)


async def test_the_same_push_again_gets_the_same_answer_and_counts_once(open_state):
    async with open_state() as run:
        await started(run)
        (lease, _) = run.grant("ann", 8)
        made = [run.complete(lease, 0), run.complete(lease, 1, seed=1)]
        raw = run.sealed("ann", made)
        first = await run.state.intake.submit(run.peer("ann"), raw)
        assert await run.state.intake.submit(run.peer("ann"), raw) == first
        assert [verdict.reason for verdict in first] == [Reason.ACCEPTED, Reason.WRONG_SAMPLING]
    async with open_state() as run:
        assert await run.state.intake.submit(run.peer("ann"), raw) == first
        assert (run.state.accepted(), run.state.rejected()) == (1, {"wrong_sampling": 1})


async def test_concurrent_pushes_of_the_same_work_count_once(open_state):
    async with open_state() as run:
        await started(run)
        (lease, *_) = run.grant("ann", 4)
        raw = run.sealed("ann", [run.complete(lease, m) for m in range(4)])
        answers = []

        async def push() -> None:
            answers.append(await run.state.intake.submit(run.peer("ann"), raw))

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(push)
        assert all([v.reason for v in answer] == [Reason.ACCEPTED] * 4 for answer in answers) and len(answers) == 8
        assert run.state.accepted() == 4
        assert run.state.rewards.unscored == 4


async def test_other_content_for_a_member_that_was_answered_is_a_duplicate(open_state):
    async with open_state() as run:
        await started(run)
        (lease, *_) = run.grant("ann", 4)
        assert await run.reasons("ann", [run.complete(lease, 0)]) == [Reason.ACCEPTED]
        other = run.complete(lease, 0, token_ids=codec.pack_u32([1, 2, 3]))
        assert await run.reasons("ann", [other]) == [Reason.DUPLICATE]
        assert await run.reasons("ann", [other]) == [Reason.DUPLICATE]
        assert run.state.rejected() == {"duplicate": 1}


async def test_a_lease_of_one_peer_cannot_be_fulfilled_by_another(open_state):
    async with open_state() as run:
        await started(run)
        (lease, *_) = run.grant("ann", 4)
        made = [run.complete(lease, 0)]
        assert await run.reasons("bob", made) == [Reason.NO_LEASE]
        assert await run.reasons("ann", made) == [Reason.ACCEPTED]
        assert await run.reasons("bob", [run.complete(lease, 1)]) == [Reason.NO_LEASE]
        for stranger in ({"lease_id": b"?" * 16}, {"group_id": 1}, {"member": 99}):
            made = [run.complete(lease, 1).model_copy(update=stranger)]
            assert await run.reasons("ann", made) == [Reason.NO_LEASE]


async def test_a_replay_by_another_peer_is_refused_after_a_restart(open_state):
    async with open_state() as run:
        await started(run)
        (lease, *_) = run.grant("ann", 4)
        made = [run.complete(lease, 0)]
        await run.push("ann", made)
        raw = run.sealed("ann", made)
    async with open_state() as run:
        assert await run.reasons("bob", made) == [Reason.NO_LEASE]
        with pytest.raises(BadSignature, match="push your own work"):
            await run.state.intake.submit(run.peer("bob"), raw)


async def test_late_work_is_taken_while_nobody_else_has_the_slot(open_state):
    async with open_state() as run:
        await started(run, 1)
        (lease,) = run.grant("ann")
        run.clock.advance(run.state.core.settings.lease_s)
        await run.state.core.tick()
        assert run.state.core.leases.in_flight(run.peer("ann")) == 0
        assert await run.reasons("ann", [run.complete(lease, 0)]) == [Reason.ACCEPTED]
        (other,) = run.grant("bob")
        assert sorted(other.draws) == [1, 2, 3]
        assert await run.reasons("ann", [run.complete(lease, 1)]) == [Reason.LATE]
        assert await run.reasons("bob", [run.complete(other, m) for m in other.draws]) == [Reason.ACCEPTED] * 3


async def test_work_for_a_group_that_was_closed_is_late(open_state):
    async with open_state(max_attempts=1) as run:
        await started(run, 1)
        first, second = run.grant("ann", 3)[0], run.grant("bob")[0]
        await run.state.core.save()
        run.state.core.on_dropped(
            run.state.core.leases.release(run.peer("ann"), [first.lease_id], "failed: broken", 0, failed=True)
        )
        assert not run.state.core.groups.by_id
        late = run.complete(second, 3, seed=0)
        assert await run.reasons("bob", [late]) == [Reason.LATE]
        assert await run.reasons("bob", [late]) == [Reason.LATE]
        assert run.state.rejected() == {"late": 1}


async def test_what_a_worker_claims_about_its_reward_has_no_place(open_state):
    async with open_state() as run:
        await started(run)
        (lease, *_) = run.grant("ann", 4)
        for claim in (1.0, 1e9, float("nan")):
            wire = Submission(run_id="ab" * 16, trajectories=(run.complete(lease, 0),)).to_wire()
            wire["trajectories"][0]["reward"] = claim
            raw = _sealed_raw(run, "ann", wire)
            with pytest.raises(MalformedMessage, match="reward"):
                await run.state.intake.submit(run.peer("ann"), raw)
        empty = run.complete(lease, 0, token_ids=b"", logprobs=b"")
        assert await run.reasons("ann", [empty]) == [Reason.BAD_LENGTH]
        assert run.state.rejected() == {"malformed": 3, "bad_length": 1}


async def test_token_ids_outside_the_vocabulary_are_refused_at_the_door(open_state):
    async with open_state() as run:
        await started(run)
        (lease, *_) = run.grant("ann", 4)
        made = [
            run.complete(lease, 0, token_ids=b"\xff\xff\xff\xff" + codec.pack_u32([1, 3])),
            run.complete(lease, 1, token_ids=codec.pack_u32([100, 1, 3])),
            run.complete(lease, 2, token_ids=codec.pack_u32([200_476, 1, 3])),
            run.complete(lease, 3, token_ids=codec.pack_u32([99, 1, 3])),
        ]
        assert await run.reasons("ann", made) == [Reason.OUT_OF_VOCABULARY] * 3 + [Reason.ACCEPTED]


async def test_hostile_bytes_are_refused_without_memory_and_the_next_good_push_is_served(open_state):
    async with open_state() as run:
        await started(run)
        (lease, *_) = run.grant("ann", 4)
        good = run.sealed("ann", [run.complete(lease, 0)])
        hostile = [
            bytes.fromhex("9ffd74f7dd74fffdbd"),
            bytes.fromhex("c6ffffffff"),
            bytes.fromhex("ddffffffff"),
            b"\x91" * 100_000 + b"\xc0",
            good + b"\x00",
            good[:-1],
            bytes.fromhex("c70101ff"),
            bytes.fromhex("82a16101a16102"),
            b"",
        ]
        tracemalloc.start()
        for raw in hostile:
            with pytest.raises(MalformedMessage):
                await run.state.intake.submit(run.peer("eve"), raw)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 10 << 20
        assert run.state.rejected() == {"malformed": len(hostile)}
        verdicts = await run.state.intake.submit(run.peer("ann"), good)
        assert [verdict.reason for verdict in verdicts] == [Reason.ACCEPTED]


async def test_a_changed_byte_and_another_run_are_refused_and_counted_once_each(open_state):
    async with open_state() as run:
        await started(run)
        (lease, *_) = run.grant("ann", 4)
        made = [run.complete(lease, 0), run.complete(lease, 1)]
        raw = bytearray(run.sealed("ann", made))
        raw[len(raw) // 3] ^= 1
        with pytest.raises((BadSignature, MalformedMessage)):
            await run.state.intake.submit(run.peer("ann"), bytes(raw))
        with pytest.raises(RemoteError, match="unknown_run"):
            await run.state.intake.submit(run.peer("ann"), run.sealed("ann", made, "cd" * 16))
        assert sum(run.state.rejected().values()) == 2
        assert run.state.rejected()["unknown_run"] == 1


async def test_the_completions_of_two_fresh_peers_differ_in_their_seeds(open_state):
    async with open_state(group_size=8) as run:
        await started(run, 1)
        ann, bob = run.grant("ann", 4)[0], run.grant("bob", 4)[0]
        seeds = [run.state.core.seed_of(lease, m) for lease in (ann, bob) for m in lease.draws]
        assert len(set(seeds)) == 8
        run.state.core.on_dropped(run.state.core.leases.release(run.peer("bob"), [bob.lease_id], "released", 0))
        (again,) = run.grant("cid")
        assert [run.state.core.seed_of(again, m) for m in again.draws] == seeds[4:], (
            "what one hands back, another draws"
        )


async def test_a_group_with_copied_completions_is_flagged(open_state):
    async with open_state() as run:
        await started(run, 1)
        same = codec.pack_u32([42, 42, 3])
        ann, bob = run.grant("ann", 2)[0], run.grant("bob", 2)[0]
        await run.push("ann", [run.complete(ann, m, token_ids=same) for m in ann.draws])
        await run.push("bob", [run.complete(bob, m, token_ids=same) for m in bob.draws])
        await run.score()
        assert run.state.core.counters.get("work", "duplicate_completions") == 2
        assert run.state.core.counters.get("work", "groups_with_duplicates") == 1


async def test_a_full_queue_answers_busy_by_bytes_and_loses_nothing(open_state):
    """The disk stalls while peers go on pushing."""
    async with open_state(pending_bytes=1 << 16, max_tokens=512, groups_per_update=16) as run:
        await started(run, 48)
        values = codec.pack_f32([-0.1] * 512)

        def long(lease: LiveLease, member: int) -> Trajectory:
            ids = [lease.group_id + 4, member + 4, *([7] * 509), 3]
            return run.complete(lease, member, token_ids=codec.pack_u32(ids), logprobs=values)

        raws = [run.sealed("ann", [long(lease, m) for m in lease.draws]) for lease in run.grant("ann")]
        outcomes, pending = [], []

        async def push(raw: bytes) -> None:
            while isinstance(outcome := await run.state.intake.submit(run.peer("ann"), raw), Busy):
                outcomes.append(outcome)
                pending.append(run.state.core.committer.pending_bytes)
                await anyio.sleep(0.001)

        async with anyio.create_task_group() as tasks:
            # All of them arrive before the first commit ends.
            for raw in raws[:24]:
                tasks.start_soon(push, raw)
        assert outcomes and outcomes[0].retry_after_s > 0
        assert max(pending) <= 1 << 16
        assert run.state.core.committer.pending_bytes == 0
        for raw in raws:
            await push(raw)
        assert run.state.accepted() == 48 * 4


async def test_a_write_that_fails_leaves_no_trace_and_the_peer_may_come_again(open_state, monkeypatch):
    async with open_state() as run:
        await started(run)
        (lease, *_) = run.grant("ann", 4)
        raw = run.sealed("ann", [run.complete(lease, 0), run.complete(lease, 1, seed=0)])

        def full(*_: object) -> None:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error

        with monkeypatch.context() as broken:
            broken.setattr(rows, "insert_trajectories", full)
            outcome = await run.state.intake.submit(run.peer("ann"), raw)
        assert isinstance(outcome, Busy) and outcome.retry_after_s > 0
        assert "no room left" in run.state.warnings()[0]
        assert (run.state.accepted(), run.state.rejected()) == (0, {})
        verdicts = await run.state.intake.submit(run.peer("ann"), raw)
        assert [verdict.reason for verdict in verdicts] == [Reason.ACCEPTED, Reason.WRONG_SAMPLING]
        assert run.state.warnings() == []


async def test_a_peer_that_floods_with_junk_is_cut_off_and_others_are_served(open_state):
    async with open_state() as run:
        await started(run)
        (lease, *_) = run.grant("bob", 4)
        for number in range(BURST):
            with pytest.raises(MalformedMessage):
                await run.state.intake.submit(run.peer("ann"), number.to_bytes(4, "big"))
        with pytest.raises(RemoteError, match="over_quota"):
            await run.state.intake.submit(run.peer("ann"), b"more")
        assert await run.reasons("bob", [run.complete(lease, 0)]) == [Reason.ACCEPTED]
        assert run.state.rejected() == {"malformed": BURST, "over_quota": 1}


@pytest.mark.parametrize("known", ["lease", "refusal"])
async def test_a_replay_without_end_is_cut_off_and_an_outbox_sent_again_is_not(open_state, monkeypatch, known: str):
    monkeypatch.setattr(fault_quota, "BURST", 16)
    async with open_state() as run:
        await started(run)
        (lease, *_) = run.grant("ann", 4)
        work = [run.complete(lease, member) for member in range(4)]
        if known == "refusal":
            work = [trajectory.model_copy(update={"lease_id": b"?" * 16}) for trajectory in work]
        raw, most = run.sealed("ann", work), int(16 / REPLAY_COST / 4)
        first = await run.state.intake.submit(run.peer("ann"), raw)
        seen = 0
        with pytest.raises(RemoteError, match="over_quota"):
            while seen <= most:
                assert await run.state.intake.submit(run.peer("ann"), raw) == first
                seen += 1
        assert most - 8 <= seen <= most
        run.clock.advance(60)
        assert await run.state.intake.submit(run.peer("ann"), raw) == first
        assert sum(run.state.rejected().values()) == (1 if known == "lease" else 5)


async def test_refusals_by_a_peers_own_fault_lower_what_it_may_have_in_flight(open_state):
    async with open_state() as run:
        await started(run)
        pace, ann = run.state.core.leases.pace, run.peer("ann")
        leases = run.grant("ann")
        await run.state.core.save()
        assert await run.reasons("ann", [run.complete(leases[0], m) for m in range(4)]) == [Reason.ACCEPTED] * 4
        shown = pace.allowance(ann, run.clock.monotonic_s())
        assert shown > run.state.core.settings.probe_members
        assert await run.reasons("ann", [run.complete(leases[1], 0, seed=0)]) == [Reason.WRONG_SAMPLING]
        assert pace.allowance(ann, run.clock.monotonic_s()) == shown - 1


def _sealed_raw(run, name: str, wire: dict) -> bytes:
    """Sign a payload that our own classes would not make."""

    class Submission:
        """Its name is the envelope's type."""

        def to_wire(self) -> dict:
            return wire

    return seal(run.identity(name), Submission())
