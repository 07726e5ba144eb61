"""Finished work that the coordinator refuses: what is final, what is tried again how often, and what waits."""

from collections.abc import Callable
from pathlib import Path

import pytest

from echo_node.backoff import Backoff
from echo_node.outbox import Dropped
from echo_node.pusher import MAX_ODD_ANSWERS
from echo_swarm.errors import RemoteError
from echo_swarm.identity import PeerId
from echo_swarm.trajectory import Reason
from echo_swarm.work import Push, PushReply
from tests.swarm.support.node_harness import RunningNode, Swarm, make_swarm, until

pytestmark = pytest.mark.anyio


def refusing(swarm: Swarm, refuse: Callable[[int], RemoteError | None]) -> list[bytes]:
    """Have pushes answered with what `refuse` returns for the number of each; returns those that were refused."""
    push, refused = swarm.coordinator._push, []
    swarm.coordinator.endless = False
    swarm.coordinator.publish(0)

    async def answer(peer: PeerId, message: Push) -> PushReply:
        error = refuse(len(refused))
        if error is None:
            return await push(peer, message)
        refused.append(message.envelope)
        raise error

    swarm.coordinator._push = answer
    return refused


def in_a_hurry(running: RunningNode) -> None:
    running.node.pusher._backoff = Backoff(first_s=0.01, limit_s=0.02)


@pytest.mark.parametrize("code", [Reason.MALFORMED, Reason.BAD_SIGNATURE, Reason.UNKNOWN_RUN, Reason.OVER_QUOTA])
async def test_work_that_is_refused_for_a_reason_is_not_pushed_again_and_shown(tmp_path: Path, code: Reason):
    swarm = make_swarm(tmp_path)
    refused = refusing(swarm, lambda before: RemoteError(code.value, "no") if before == 0 else None)
    async with swarm.serving(), swarm.node() as running:
        swarm.coordinator.wish(4)
        await until(lambda: refused and running.node.outbox.pending() == 0)
        swarm.coordinator.wish(4)
        await until(lambda: len(swarm.coordinator.accepted) == 4)
        await running.leave()
    assert len(refused) == 1
    assert running.node.status().rejected == {code.value: 1}
    assert any("the coordinator refused 4 trajectories: " in line for line in running.lines)


@pytest.mark.parametrize("code", ["internal", "refused", "unknown_method"])
async def test_work_that_makes_no_sense_to_the_coordinator_is_given_up_after_a_few_tries_and_the_rest_goes_on(
    tmp_path: Path, code: str
):
    swarm = make_swarm(tmp_path)
    refused = refusing(swarm, lambda before: RemoteError(code, "no") if before < MAX_ODD_ANSWERS else None)
    async with swarm.serving(), swarm.node() as running:
        in_a_hurry(running)
        swarm.coordinator.wish(4)
        await until(lambda: len(refused) == MAX_ODD_ANSWERS and running.node.outbox.pending() == 0)
        swarm.coordinator.wish(4)
        await until(lambda: len(swarm.coordinator.accepted) == 4)
        await running.leave()
    assert len(set(refused)) == 1
    assert running.node.status().rejected == {Dropped.UNANSWERED.value: 4}


async def test_a_coordinator_that_cannot_take_work_now_is_asked_again_for_as_long_as_it_lasts(tmp_path: Path):
    swarm, tries = make_swarm(tmp_path), 4 * MAX_ODD_ANSWERS
    trouble = RemoteError("unavailable", "the disk is full")
    refused = refusing(swarm, lambda before: trouble if before < tries else None)
    async with swarm.serving(), swarm.node() as running:
        in_a_hurry(running)
        swarm.coordinator.wish(4)
        await until(lambda: len(refused) >= 2)
        assert "a usable answer to a push" in running.node.activity.headline or len(refused) == tries
        await until(lambda: len(swarm.coordinator.accepted) == 4)
        await running.leave()
    assert len(refused) == tries and running.node.status().accepted == 4
    told = [line for line in running.lines if "a usable answer to a push" in line]
    assert len(told) == 1 and "the disk is full" in told[0]
