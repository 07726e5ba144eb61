"""From accepted completion to reward. The verifier runs elsewhere; what a worker claims has no place to stand."""

import math
from collections.abc import Iterable

from echo_coordinator.state import rows
from echo_coordinator.state.batch import Score, ScoreItem
from echo_coordinator.state.core import RunCore
from echo_coordinator.state.groups import Group, SlotState
from echo_coordinator.state.leases import Dropped
from echo_swarm.identity import PeerId


class Rewards:
    """Hands out completions and takes in their rewards."""

    def __init__(self, core: RunCore) -> None:
        self._core = core

    @property
    def unscored(self) -> int:
        """Completions without a reward yet, those handed out included."""
        return len(self._core.scoring)

    async def take(self, limit: int) -> list[ScoreItem]:
        """Return completions to score; each is handed out once, until `record` or `requeue`."""
        core = self._core
        keys = core.scoring.take(limit)
        if not keys:
            return []
        stored = await core.committer.execute(lambda db: rows.load_trajectories(db, keys))
        items: list[ScoreItem] = []
        for group_id, member in keys:
            group = core.groups.by_id.get(group_id)
            found = stored.get((group_id, member))
            if group is None or found is None:
                # Its group was dropped meanwhile.
                core.scoring.done((group_id, member))
                continue
            items.append(
                ScoreItem(
                    group_id=group_id,
                    member=member,
                    kind=group.kind,
                    prompt_index=group.prompt_index,
                    token_ids=found.token_ids,
                )
            )
        return items

    def requeue(self, items: Iterable[ScoreItem]) -> None:
        """Give back completions whose scoring was interrupted."""
        self._core.scoring.put_back([(item.group_id, item.member) for item in items])
        self._core.changed.notify()

    async def record(self, scores: Iterable[Score]) -> None:
        """Take in rewards. A completion that cannot be scored is dropped and its slot tried again."""
        core = self._core
        for score in scores:
            group = core.groups.by_id.get(score.group_id)
            out = core.scoring.done((score.group_id, score.member))
            if not out or group is None or group.slots[score.member].state is not SlotState.FILLED:
                continue
            if (score.group_id, score.member) in core.condemned:
                core.on_dropped([core.take_back(group, score.member)])
            elif score.reward is None or not math.isfinite(score.reward):
                self._unscorable(group, score.member)
            else:
                slot = group.slots[score.member]
                slot.state, slot.reward = SlotState.SCORED, float(score.reward)
                core.groups.mark(group)
                core.settle(group)
        await core.save()
        core.changed.notify()

    def _unscorable(self, group: Group, member: int) -> None:
        work = group.slots[member].work
        peer = PeerId(work.peer if work else "")
        core = self._core
        spared = not core.leases.tries.uses_up(group.slots[member], peer, core.clock.monotonic_s())
        group.drop(member, core.settings.max_attempts, spared=spared, accepted=True)
        core.groups.mark(group)
        core.on_dropped([Dropped(peer=peer, group=group, member=member, cause="unscorable")])
