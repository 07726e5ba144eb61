"""What peers that are not proven may take together: a part of each group, and so much behind one network address.

A key costs nothing, so what one newcomer may do (`pace`) bounds nobody who makes many. Two rules for all of them:

1. Of a training group they may have `unproven_share` (one member at least), of an evaluation nothing, until the group
   was on offer for `lease_target_s`; what proven peers left by then is everybody's. No rule while no proven peer is
   here: a new run has only newcomers.
2. All of them behind one address hold at most `unproven_per_address` completions, in fair turns (`address_turns`).

What of this is trained on is bounded in `selection`: a batch waits for the audits of what is above the share. So these
rules only decide who waits; nothing that was sampled is lost by them.
"""

from collections.abc import Callable

from echo_coordinator.state.address_turns import AddressTurns
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
        self._turns = AddressTurns(settings.unproven_per_address, core.leases.in_flight)
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
        network = self._bounded_by(peer)
        now = self._core.clock.monotonic_s()
        return self._turns.room(network, peer, self._sharing(network), capacity, now) if network else capacity

    def take_turn(self, peer: PeerId, capacity: int) -> int:
        """Return the same for a peer that asks for work; one that is turned away has its turn before those after it."""
        room = self.room(peer, capacity)
        if capacity and (network := self._bounded_by(peer)):
            self._turns.asked(network, peer, room, self._core.clock.monotonic_s())
        return room

    def next_in_turn(self, peer: PeerId, count: int) -> list[PeerId]:
        """Return who waits for the places behind its address that a peer has made free, and comes first."""
        network = self._bounded_by(peer)
        return self._turns.next(network, count, self._core.clock.monotonic_s()) if network else []

    def _bounded_by(self, peer: PeerId) -> str:
        node = self._core.roster.get(peer)
        return "" if not self._audited or node is None or self._is_proven(peer) else node.network

    def _sharing(self, network: str) -> list[PeerId]:
        nodes = self._core.roster.nodes()
        return [node.peer for node in nodes if node.network == network and not self._is_proven(node.peer)]

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
