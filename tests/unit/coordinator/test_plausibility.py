"""What no honest sampler delivers: copies are refused, odd values are audited, and honest work shows no sign."""

import numpy as np
import pytest

from echo_coordinator.state.audit_rows import Standing
from echo_coordinator.state.audits import Share
from echo_coordinator.state.counters import WORK
from echo_coordinator.state.plausibility import COPY_NATS, is_certain, is_constant, is_loop, nats
from echo_swarm.codec import pack_f32, pack_u32
from echo_swarm.trajectory import FinishReason, Reason
from tests.unit.coordinator.conftest import END, OpenRun, Run

TEXT = [*range(10, 49), END]
"""Forty tokens."""
pytestmark = pytest.mark.anyio
PROVEN = Standing(clean=10_000)


def f32(values: list[float]) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    return np.array(values, dtype="<f4")


def u32(values: list[int]) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    return np.array(values, dtype="<u4")


def drawn(count: int, nats_each: float = 1.0) -> list[float]:
    """Values that vary."""
    return [-nats_each * (0.5 + (7 * place % 11) / 11) for place in range(count)]


async def deliver(run: Run, name: str, ids: list[int], logprobs: list[float]) -> Reason:
    """Take one completion and deliver this text as it."""
    (lease,) = run.grant(name, 1)
    (member,) = lease.outstanding
    made = run.complete(lease, member, token_ids=pack_u32(ids), logprobs=pack_f32(logprobs))
    if ids[-1] != END:
        made = made.model_copy(update={"finish_reason": FinishReason.LENGTH})
    (reason,) = await run.reasons(name, [made])
    return reason


async def test_improbable_tokens_are_taken_once_whoever_delivers_them_again(open_state: OpenRun):
    async with open_state(max_tokens=64) as run:
        await run.publish(0)
        await run.fill()
        assert await deliver(run, "ann", TEXT, drawn(40)) is Reason.ACCEPTED
        for sybil in ("ann", "bob", "eve"):
            assert await deliver(run, sybil, TEXT, drawn(40)) is Reason.COPIED
        # One token more is another text.
        assert await deliver(run, "bob", [9, *TEXT], drawn(41)) is Reason.ACCEPTED
        assert run.state.rejected(run.peer("eve")) == {} and run.state.rejected()["copied"] == 3


async def test_what_was_taken_back_keeps_nobody_else_from_delivering_it(open_state: OpenRun):
    async with open_state(max_tokens=64) as run:
        await run.publish(0)
        await run.fill()
        assert await deliver(run, "eve", TEXT, drawn(40)) is Reason.ACCEPTED
        assert await deliver(run, "ann", TEXT, drawn(40)) is Reason.COPIED
        await run.score()
        assert await run.state.bans.ban(run.peer("eve"), "", take_back=True) == 1
        assert await deliver(run, "bob", TEXT, drawn(40)) is Reason.ACCEPTED


async def test_who_draws_again_what_could_not_be_stored_is_no_copier(open_state: OpenRun):
    async with open_state(max_tokens=64) as run:
        await run.publish(0)
        await run.fill()
        (lease,) = run.grant("ann", 1)
        made = run.complete(lease, 0, token_ids=pack_u32(TEXT), logprobs=pack_f32(drawn(40)))
        for lease_id, member, reason in ((1, 0, Reason.ACCEPTED), (2, 0, Reason.ACCEPTED), (2, 1, Reason.COPIED)):
            again = made.model_copy(update={"lease_id": bytes([lease_id] * 16), "member": member})
            assert run.state.intake.look(again).reason is reason


async def test_probable_texts_may_coincide(open_state: OpenRun):
    async with open_state(max_tokens=64) as run:
        await run.publish(0)
        await run.fill()
        for name in ("ann", "bob", "eve"):
            assert await deliver(run, name, TEXT, drawn(40, 0.5)) is Reason.ACCEPTED
        assert nats(f32(drawn(40, 0.5))) < COPY_NATS < nats(f32(drawn(40)))


async def test_a_copy_that_calls_itself_probable_is_audited_for_certain(open_state: OpenRun):
    async with open_state(max_tokens=64, groups_per_update=1, group_size=2) as run:
        await run.publish(0)
        await run.fill(1)
        run.state.audits.standings[run.peer("ann")] = run.state.audits.standings[run.peer("eve")] = PROVEN
        assert await deliver(run, "ann", TEXT, drawn(40)) is Reason.ACCEPTED
        assert await deliver(run, "eve", TEXT, drawn(40, 0.1)) is Reason.ACCEPTED
        await run.score()
        share = await run.state.audits.next()
        assert isinstance(share, Share) and share.peer == run.peer("eve")
        assert run.state.core.counters.get(WORK, "sign_known") == 1


async def test_a_push_whose_write_failed_is_no_copy_of_itself(open_state: OpenRun):
    async with open_state(max_tokens=64) as run:
        await run.publish(0)
        await run.fill()
        (lease,) = run.grant("ann", 1)
        made = run.complete(lease, 0, token_ids=pack_u32(TEXT), logprobs=pack_f32(drawn(40)))
        assert run.state.intake.look(made).reason is Reason.ACCEPTED
        assert await run.reasons("ann", [made]) == [Reason.ACCEPTED]


@pytest.mark.parametrize(
    ("sign", "ids", "logprobs"),
    [
        ("certain", TEXT, [0.0] * 40),
        ("constant", TEXT, [-0.5] * 40),
        ("loop", [11, 12, 13] * 22, drawn(66, 0.2)),  # Without an end token: as long as allowed.
    ],
)
async def test_odd_completions_of_a_proven_peer_are_audited_for_certain(
    open_state: OpenRun, sign: str, ids: list[int], logprobs: list[float]
):
    async with open_state(max_tokens=len(ids), groups_per_update=1, group_size=2) as run:
        await run.publish(0)
        await run.fill(1)
        run.state.audits.standings[run.peer("ann")] = run.state.audits.standings[run.peer("bob")] = PROVEN
        plain = [*range(20, 20 + 39), END]
        assert await deliver(run, "bob", plain, drawn(40)) is Reason.ACCEPTED
        assert await deliver(run, "ann", ids, logprobs) is Reason.ACCEPTED
        assert run.state.core.counters.get(WORK, f"sign_{sign}") == 1
        await run.score()
        waiting = [peer for _, peer in run.state.audits.pending()]
        assert waiting == [run.peer("ann")]


def test_signs_need_enough_tokens_and_nothing_else_shows_them():
    assert is_certain(f32([0.0] * 32)) and not is_certain(f32([0.0] * 31)) and not is_certain(f32([0.0] * 31 + [-0.01]))
    assert (
        is_constant(f32([-1.5] * 8)) and not is_constant(f32([-1.5] * 7)) and not is_constant(f32([-1.5] * 8 + [-1.6]))
    )
    assert not is_constant(f32([0.0] * 64))
    for period in (1, 2, 16):
        assert is_loop(u32([place % period for place in range(200)]))
    assert not is_loop(u32([place % 17 for place in range(200)])) and not is_loop(u32([1] * 63))
    assert not is_loop(u32([*([1] * 63), 2])) and not is_loop(u32([*([1] * 100), 2, *([1] * 63)]))
