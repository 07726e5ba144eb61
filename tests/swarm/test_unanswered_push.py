"""A push that gets no answer: the work behind it goes on, and nothing is on its way twice at a time."""

from collections import Counter
from pathlib import Path

import anyio
import pytest

from echo_node import pusher
from echo_swarm.identity import PeerId
from echo_swarm.work import Push, PushReply
from tests.swarm.support.node_harness import Swarm, make_swarm, until

pytestmark = pytest.mark.anyio


class Silence:
    """A coordinator that never answers the pushes of some submissions."""

    def __init__(self, swarm: Swarm, chosen: int) -> None:
        self.swarm, self.chosen, self.unanswered = swarm, chosen, list[bytes]()
        self.going, self.most, self.twice = Counter[bytes](), 0, False
        self.gate = anyio.Event()
        self.tries = Counter[bytes]()
        self._answer = swarm.coordinator._push
        swarm.coordinator.endless = False
        swarm.coordinator.publish(0)
        swarm.coordinator._push = self.push

    async def push(self, peer: PeerId, message: Push) -> PushReply:
        work = message.envelope
        if work not in self.unanswered and len(self.unanswered) < self.chosen:
            self.unanswered.append(work)
        self.tries[work] += 1
        self.going[work] += 1
        self.twice |= self.going[work] > 1
        self.most = max(self.most, self.going.total())
        try:
            if work in self.unanswered:
                await self.gate.wait()
            return await self._answer(peer, message)
        finally:
            self.going[work] -= 1


@pytest.mark.parametrize("silent", [1, 2])
async def test_work_behind_unanswered_pushes_is_delivered_meanwhile(tmp_path: Path, monkeypatch, silent: int):
    monkeypatch.setattr(pusher, "SLOW_S", 0.05)
    swarm = make_swarm(tmp_path)
    silence = Silence(swarm, silent)
    async with swarm.serving(), swarm.node() as running:
        for n in range(1, 8):
            swarm.coordinator.wish(2)
            await until(lambda n=n: len(silence.tries) >= n)
        await until(lambda: len(swarm.coordinator.accepted) == 2 * (7 - silent))
        await until(lambda: running.node.outbox.pending() == 2 * silent)
        silence.gate.set()
        await running.leave()
    assert silence.most <= pusher.LANES and not silence.twice


async def test_with_all_lanes_silent_others_go_first_once_they_are_given_up(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(pusher, "SLOW_S", 0.05)
    monkeypatch.setattr(pusher, "PUSH_TIMEOUT_S", 1.0)
    swarm = make_swarm(tmp_path)
    silence = Silence(swarm, pusher.LANES)
    async with swarm.serving(), swarm.node() as running:
        for n in range(1, 7):
            swarm.coordinator.wish(2)
            await until(lambda n=n: running.node.outbox.pending() + len(swarm.coordinator.accepted) >= 2 * n)
        await until(lambda: len(swarm.coordinator.accepted) == 2 * (6 - pusher.LANES))
        silence.gate.set()
        await until(lambda: len(swarm.coordinator.accepted) == 12)
        await until(lambda: running.node.outbox.pending() == 0)
        await running.leave()
    assert silence.most <= pusher.LANES and not silence.twice
