"""What peers that are not proven may take together: a part of each group, and so much behind one network address.

A key costs nothing, so what one newcomer may do (`pace`) bounds nobody who makes many. Two rules for all of them:

1. Of a training group they may have `unproven_share` (one member at least), of an evaluation nothing, until the group
   was on offer for `lease_target_s`; what proven peers left by then is everybody's. No rule while no proven peer is
   here: a new run has only newcomers.
2. All of them behind one address hold at most `unproven_per_address` completions.

What of this is trained on is bounded in `selection`: a batch waits for the audits of what is above the share. So these
rules only decide who waits; nothing that was sampled is lost by them.
"""

from collections.abc import Callable

from echo_coordinator.state.core import RunCore
from echo_coordinator.state.groups import Group, SlotState
from echo_coordinator.state.leases import Offer
from echo_coordinator.state.standing_settings import StandingSettings
from echo_swarm.identity import PeerId
from echo_swarm.work import Role


class Newcomers:
    """The two rules over one run."""

    def __init__(
        self, core: RunCore, settings: StandingSettings, *, is_proven: Callable[[PeerId], bool], audited: bool
    ) -> None:
        """Describe them. Where nothing is `audited`, nobody can be proven, and there are no rules."""
        self._core = core
        self._settings = settings
        self._is_proven = is_proven
        self._audited = audited
        self._offered: dict[int, float] = {}
        """Group → when an unproven peer was first kept from its open members."""
        self._ended: set[int] = set()
        """Of these, the ones that are everybody's now."""

    def offer(self, peer: PeerId) -> Offer | None:
        """Return what bounds the members that a peer may have; None when nothing does."""
        if not self._audited or self._settings.unproven_share >= 1 or self._is_proven(peer) or not self._has_proven():
            return None
        return self._unreserved

    def room(self, peer: PeerId, capacity: int) -> int:
        """Return how many of `capacity` completions a peer may have as far as its network address goes."""
        node = self._core.roster.get(peer)
        if not self._audited or node is None or not node.network or self._is_proven(peer):
            return capacity
        held = sum(
            self._core.leases.in_flight(other.peer)
            for other in self._core.roster.nodes()
            if other.network == node.network and not self._is_proven(other.peer)
        )
        return max(0, min(capacity, self._settings.unproven_per_address - held))

    def reserve_ended(self) -> bool:
        """Whether something that was kept for proven peers is everybody's since the last call."""
        now, known = self._core.clock.monotonic_s(), self._core.groups.by_id
        self._offered = {group_id: since for group_id, since in self._offered.items() if group_id in known}
        reserve_s = self._core.settings.lease_target_s
        ended = {group_id for group_id, since in self._offered.items() if now - since >= reserve_s}
        news, self._ended = ended - self._ended, ended
        return bool(news)

    def _unreserved(self, group: Group, members: list[int], now: float) -> list[int]:
        if now - self._offered.get(group.group_id, now) >= self._core.settings.lease_target_s:
            return members
        share = int(self._settings.unproven_share * len(group.slots))
        most = 0 if group.kind == "eval" else max(1, share)
        held = sum(self._is_of_unproven(group, member) for member in range(len(group.slots)))
        allowed = members[: max(0, most - held)]
        if len(allowed) < len(members):
            self._offered.setdefault(group.group_id, now)
        return allowed

    def _is_of_unproven(self, group: Group, member: int) -> bool:
        slot = group.slots[member]
        if slot.state in (SlotState.OPEN, SlotState.VOID):
            return False
        lease = self._core.leases.get(slot.lease_id) if slot.lease_id else None
        peer = slot.work.peer if slot.work else lease.peer if lease else ""
        return not self._is_proven(PeerId(peer))

    def _has_proven(self) -> bool:
        roster = self._core.roster
        return any(
            node.live and node.role is Role.INFERENCE and not roster.is_barred(node.peer) and self._is_proven(node.peer)
            for node in roster.nodes()
        )
