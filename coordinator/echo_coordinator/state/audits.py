"""Audits of the run: which completions the trainer recomputes before they are trained on, and what follows.

    group complete ──draw──► waits ──► trainer recomputes ──► audit_rules.find ──► standing
                                                  clean │ failed
                 fewer audits, more trust ◄─────────────┴────────────► data taken back, no work for a while

The training side's own failures (no file of that version, a trainer that refuses) are counted and held against nobody.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from sqlite3 import Connection

from echo_coordinator.state import audit_rows, rows
from echo_coordinator.state.audit_budget import AuditBudget
from echo_coordinator.state.audit_rows import Standing, StoredAudit
from echo_coordinator.state.audit_rules import AGAINST, FREE, AuditVerdict, Finding, is_chosen, rate
from echo_coordinator.state.audit_settings import AuditSettings
from echo_coordinator.state.core import RunCore
from echo_coordinator.state.counters import WORK
from echo_coordinator.state.groups import Group, GroupState, SlotState
from echo_coordinator.state.rows import StoredTrajectory
from echo_swarm.identity import PeerId
from echo_swarm.render import short_peer
from echo_swarm.status import AuditStatus

LONGEST_SUSPENSION_S = 7 * 86_400.0
_DELIVERED = (SlotState.STORING, SlotState.FILLED, SlotState.SCORED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one peer contributed to a group, about to be audited."""

    group: Group
    peer: PeerId
    completions: tuple[StoredTrajectory, ...]
    work: frozenset[bytes]
    """Digests of these completions."""


@dataclass(frozen=True, slots=True)
class _Draw:
    """Whether a share is to be audited, and what it was when that was drawn."""

    chosen: bool
    work: frozenset[bytes]


class Audits:
    """The audits of one run."""

    def __init__(self, core: RunCore, settings: AuditSettings, connection: Connection) -> None:
        self._core = core
        self.settings = settings
        self.budget = AuditBudget(settings, core.clock.monotonic_s())
        self._secret = audit_rows.load_secret(connection)
        self.standings = audit_rows.load_standings(connection)
        first = min((group.group_id for group in core.groups.of_kind("train")), default=0)
        self._done = audit_rows.audited(connection, first)
        self.is_suspicious: Callable[[int, int], bool] = lambda _group_id, _member: False
        """Whether a completion, by group and member, is to be audited for certain."""
        self.fault = ""
        """Why the newest audit could not be made; empty if it could."""
        self._drawn: dict[int, dict[PeerId, _Draw]] = {}
        """By group: which peers' shares are to be audited."""
        self._quiet: dict[int, int] = {}
        """By group: the revision at which nothing was left to audit in it."""
        for peer, standing in self.standings.items():
            self._restrain(peer, standing)
            if self.is_suspended(peer):
                # What it delivered before may not all have been taken back when we ended.
                self.take_back(peer)

    # How peers stand.

    def standing(self, peer: PeerId) -> Standing:
        """Return how a peer stands; a newcomer's if it was never audited."""
        return self.standings.get(peer, Standing())

    def is_suspended(self, peer: PeerId) -> bool:
        """Whether a peer gets no work because of its audits."""
        if peer not in self._core.roster.suspended:
            return False
        if self._core.clock.wall_s() >= self.standing(peer).until:
            self._core.roster.suspended.discard(peer)
            return False
        return True

    def why_barred(self, peer: PeerId) -> str:
        """Return why what a peer pushes is not taken; empty if it is."""
        if not self.is_suspended(peer):
            return ""
        return f"the lease ended when this node failed an audit ({self.standing(peer).detail})"

    def word(self, peer: PeerId) -> str:
        """Return how a peer stands in a word: `new`, `proven`, `probation`, `suspended`."""
        return self.standing(peer).word(self._core.clock.wall_s())

    async def pardon(self, peer: PeerId, *, was_banned: bool = False) -> bool:
        """Forget the failures of a peer: it is a newcomer again, all of whose work is audited. False: it has none.

        So is one that was banned, whatever its audits showed before.
        """
        failed = bool(self.standing(peer).failed)
        if not failed and not was_banned:
            return False
        await self._core.committer.execute(lambda db: audit_rows.delete_standing(db, peer))
        self.standings.pop(peer, None)
        self._core.roster.suspended.discard(peer)
        self._restrain(peer, Standing())
        self._core.notify_all()
        return failed

    # Choosing.

    async def next(self) -> Share | None:
        """Return what is to be audited next: of proven peers first, since of those only few are drawn."""
        waiting = sorted(self.pending(), key=lambda pair: (self.standing(pair[1]).clean < FREE, pair[0].group_id))
        for group, peer in waiting:
            keys = [(group.group_id, member) for member in _members(group, peer)]
            stored = await self._core.committer.execute(lambda db, keys=keys: rows.load_trajectories(db, keys))
            if stored and group.state is GroupState.READY:
                work = frozenset(_work(group, peer))
                return Share(group=group, peer=peer, completions=tuple(stored.values()), work=work)
        return None

    def pending(self) -> list[tuple[Group, PeerId]]:
        """Draw for the groups that have become complete, and return what was drawn and not audited yet."""
        return list(self._pending()) if self.settings.share else []

    def _pending(self) -> Iterator[tuple[Group, PeerId]]:
        under_way = {group.group_id for group in self._core.groups.of_kind("train")}
        for gone in [group_id for group_id in self._drawn if group_id not in under_way]:
            self._forget(gone)
        for group in self._core.groups.of_kind("train"):
            if group.state is not GroupState.READY or self._quiet.get(group.group_id) == group.revision:
                continue
            drawn = self._draw(group)
            due = [peer for peer, chosen in drawn.items() if chosen and (group.group_id, peer) not in self._done]
            if not due:
                self._quiet[group.group_id] = group.revision
            yield from ((group, peer) for peer in due)

    def _draw(self, group: Group) -> dict[PeerId, bool]:
        """Draw for each peer of a group; again when it has delivered more since, into slots that were taken back."""
        drawn = self._drawn.setdefault(group.group_id, {})
        for peer in dict.fromkeys(PeerId(slot.work.peer) for slot in group.slots if slot.work):
            work, before = _work(group, peer), drawn.get(peer)
            if before is None or not before.work.issuperset(work):
                if before is not None:
                    self._done.discard((group.group_id, peer))
                odd = any(self.is_suspicious(group.group_id, member) for member in _members(group, peer))
                share = 1.0 if odd else rate(self.standing(peer).clean)
                chosen = is_chosen(self._secret, group.group_id, peer, work, share)
                drawn[peer] = _Draw(chosen, frozenset(work))
        return {peer: draw.chosen for peer, draw in drawn.items()}

    def unvetted(self, group: Group) -> int:
        """Return how many completions of a complete group unproven peers made and an audit is still to be made of."""
        if not self.settings.share:
            return 0
        waiting = [
            peer for peer, chosen in self._draw(group).items() if chosen and (group.group_id, peer) not in self._done
        ]
        return sum(len(_members(group, peer)) for peer in waiting if self.standing(peer).clean < FREE)

    def is_proven(self, peer: PeerId) -> bool:
        """Whether enough audits of a peer were clean, and none failed since."""
        return self.word(peer) == "proven"

    def _forget(self, group_id: int) -> None:
        self._quiet.pop(group_id, None)
        for peer, draw in self._drawn.pop(group_id).items():
            if (group_id, peer) in self._done:
                self._done.discard((group_id, peer))
            elif draw.chosen:
                self._core.counters.add(WORK, "audits_missed")

    # What follows.

    async def record(self, share: Share, finding: Finding, seconds: float, *, free: bool) -> None:
        """Write down what an audit showed, with all that follows from it, in one transaction."""
        core, peer, first = self._core, share.peer, share.completions[0]
        self.budget.spend(seconds, core.clock.monotonic_s(), free=free)
        audit = StoredAudit(
            group_id=share.group.group_id,
            peer=peer,
            at=core.clock.wall_s(),
            version=max(made.newest_version for made in share.completions),
            backend=first.backend,
            precision=first.precision,
            seconds=seconds,
            finding=finding,
        )
        standing = self._after(peer, finding)
        core.counters.add(WORK, f"audit_{finding.verdict.value}")
        self.fault = finding.detail if finding.verdict is AuditVerdict.NOT_AUDITED else ""
        if share.work.issuperset(_work(share.group, peer)):
            # Else it delivered more while the trainer computed: that is drawn for anew.
            self._done.add((share.group.group_id, peer))
        self.standings[peer] = standing
        if finding.verdict in AGAINST and self.settings.action == "quarantine":
            self._restrain(peer, standing)
            core.on_dropped(core.leases.release_all(peer, "failed an audit", core.clock.monotonic_s()))
            taken = self.take_back(peer)
            text = (
                f"{short_peer(peer)} failed an audit ({finding.verdict}): {finding.detail}; {taken} completions of it"
            )
            await core.record_event("audit", f"{text} were taken back")
        elif finding.verdict is AuditVerdict.CLEAN:
            self._restrain(peer, standing)

        def job(db: Connection) -> None:
            audit_rows.insert_audit(db, audit)
            audit_rows.write_standing(db, peer, standing)

        await core.committer.execute(job)
        core.notify_all()

    def _after(self, peer: PeerId, finding: Finding) -> Standing:
        before = self.standing(peer)
        if finding.verdict is AuditVerdict.CLEAN:
            return replace(
                before,
                clean=before.clean + 1,
                drift=before.drift + finding.drift,
                strays=before.strays + finding.strays,
            )
        if finding.verdict is AuditVerdict.NOT_AUDITED:
            return before
        pause_s = min(LONGEST_SUSPENSION_S, self.settings.suspend_s * 4.0 ** min(before.failed, 16))
        until = self._core.clock.wall_s() + pause_s if self.settings.action == "quarantine" else 0.0
        return Standing(failed=before.failed + 1, until=until, detail=f"{finding.verdict}: {finding.detail}")

    def _restrain(self, peer: PeerId, standing: Standing) -> None:
        held = self._core.leases.pace.on_probation
        if standing.on_probation and self.settings.action == "quarantine":
            held.add(peer)
        else:
            held.discard(peer)
        if self._core.clock.wall_s() < standing.until:
            self._core.roster.suspended.add(peer)

    def take_back(self, peer: PeerId) -> int:
        """Take back what a peer delivered and nobody trained on; its slots are open again with new seeds."""
        core, taken = self._core, 0
        for group in list(core.groups.of_kind("train")):
            if group.state not in (GroupState.ACTIVE, GroupState.READY):
                continue
            members = _members(group, peer)
            core.condemn(group, members)
            taken += len(members)
            # Should it ever work on this group again, that is looked at anew.
            self._drawn.get(group.group_id, {}).pop(peer, None)
            self._done.discard((group.group_id, peer))
        core.counters.add(WORK, "quarantined_completions", taken)
        return taken

    # For people.

    def suspended_s(self, peer: PeerId) -> float:
        """Return for how much longer a peer gets no work."""
        return max(0.0, self.standing(peer).until - self._core.clock.wall_s()) if self.is_suspended(peer) else 0.0

    def report(self) -> AuditStatus:
        """Return the account of all audits."""
        counts = self._core.counters.of(WORK)
        return AuditStatus(
            clean=counts.get("audit_clean", 0),
            failed=sum(counts.get(f"audit_{verdict.value}", 0) for verdict in AGAINST),
            not_made=counts.get("audit_not_audited", 0),
            missed=counts.get("audits_missed", 0),
            taken_back=counts.get("quarantined_completions", 0),
            trainer_share=self.budget.share_spent(self._core.clock.monotonic_s()),
            free_s=self.budget.free_s,
        )

    def warnings(self) -> list[str]:
        """Return what a person should know."""
        found = [f"the newest audit could not be made: {self.fault}"] if self.fault else []
        return found + [
            f"{short_peer(node.peer)} failed an audit: {self.standing(node.peer).detail}"
            for node in self._core.roster.nodes()
            if node.live and (self.is_suspended(node.peer) or (self._warns_only and self.standing(node.peer).failed))
        ]

    @property
    def _warns_only(self) -> bool:
        return self.settings.action == "warn"


def _work(group: Group, peer: PeerId) -> list[bytes]:
    """Return the digests of what a peer contributed to a group."""
    return [slot.work.digest for slot in group.slots if slot.work and slot.work.peer == peer]


def _members(group: Group, peer: str) -> list[int]:
    return [
        m for m, slot in enumerate(group.slots) if slot.work and slot.work.peer == peer and slot.state in _DELIVERED
    ]


def worst(findings: Sequence[Finding]) -> Finding:
    """Return what judgements of one share come to: the first against the peer, else one not made, else clean."""
    order = [*AGAINST, AuditVerdict.NOT_AUDITED, AuditVerdict.CLEAN]
    return min(findings, key=lambda finding: order.index(finding.verdict))
