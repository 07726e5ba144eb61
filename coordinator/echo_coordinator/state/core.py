"""What all parts of the run's state share, and what happens to a slot whoever touches it.

Memory decides, the committer writes. `admission`, `rewards`, `updates`, `evaluations` and `intake` each do one thing
to it; `run_state` puts them together.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection

from echo_coordinator.state import peer_rows, rows
from echo_coordinator.state.batch import Event
from echo_coordinator.state.committer import Commit, Committer, commit_in_thread
from echo_coordinator.state.counters import DROPPED_GROUPS, DROPPED_SLOTS, STRANGERS, WORK, Counters, Rate, SignalWindow
from echo_coordinator.state.groups import Group, GroupState, GroupTable, Kind, SlotState
from echo_coordinator.state.intake_rules import Demand
from echo_coordinator.state.leases import Dropped, LeaseBook, LiveLease
from echo_coordinator.state.roster import MAX_ENTRIES, Roster
from echo_coordinator.state.scoring_queue import ScoringQueue
from echo_coordinator.state.seeds import member_seed
from echo_coordinator.state.selection import Selector
from echo_coordinator.state.signals import Signal
from echo_coordinator.state.staleness import Versions, VersionWindow, version_window
from echo_coordinator.state.transfers import TransferTable
from echo_coordinator.state.unsaved import Unsaved
from echo_coordinator.state.work_settings import WorkSettings
from echo_swarm.clock import Clock
from echo_swarm.identity import PeerId
from echo_swarm.trajectory import Reason
from echo_swarm.work import BackendReport, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a completion is checked against beside the settings; from the run's manifest."""

    run_id: str
    vocabulary_size: int
    """Ids at or above it are refused. Reserved ids below it are accepted: models can sample them."""
    end_token_ids: tuple[int, ...]
    precisions: tuple[str, ...] = ("float32",)
    """Of the published weights and of the trainer's passes: nobody can be nearer to it than these allow."""


class RunCore:
    """The run in memory. Used on one event loop."""

    def __init__(
        self,
        connection: Connection,
        path: Path,
        settings: WorkSettings,
        facts: RunFacts,
        clock: Clock,
        commit: Commit = commit_in_thread,
    ) -> None:
        self.settings = settings
        self.facts = facts
        self.clock = clock
        self.groups = GroupTable()
        self.leases = LeaseBook(self.groups, settings)
        self.counters = Counters(rows.load_counters(connection))
        self.roster = Roster(settings.beat_s)
        self.leases.tries.source_of, self.leases.tries.others = self.roster.source_of, self.roster.is_from_elsewhere
        self.selector = Selector(settings)
        self.transfers = TransferTable()
        self.signal_window = SignalWindow(settings.group_size)
        self.accepted_rate = Rate()
        self.token_rate = Rate()
        self.scoring = ScoringQueue()
        self.unsaved = Unsaved(self.groups, self.leases, self.counters)
        self.committer = Committer(
            connection,
            str(path),
            max_pending_bytes=settings.pending_bytes,
            flush=self.unsaved.write,
            flushed=self.unsaved.written,
            commit=commit,
        )
        self.changed = Signal()
        """Something happened that the wiring loop may act on."""
        self.work_changed = Signal()
        """Something happened that may give nodes work."""
        self.artifacts = rows.load_versions(connection)
        """Digests of the artifact files, by published version, the newest last."""
        self.trained_version = 0
        """Of the newest committed update."""
        self.oldest_version = 0
        """Nothing is sampled with versions before this one: they were rolled back."""
        self.paused = False
        self.stopping = False
        self.finished = False
        self.condemned: set[tuple[int, int]] = set()
        """(group, member) taken back while being stored or scored: dropped as soon as that is over."""
        self.on_taken_back: Callable[[bytes], None] = lambda _tokens_digest: None
        """Told of accepted completions that are taken back."""
        self.next_in_turn: Callable[[PeerId, int], list[PeerId]] = lambda _peer, _count: []
        """Says who waits for places that a peer has made free."""
        self.last_cause = ""
        """Why the newest slot was taken back."""
        self._restore(connection)

    @property
    def versions(self) -> Versions:
        """Trained and published version."""
        published = next(reversed(self.artifacts), None)  # Versions only rise, and this is asked for all the time.
        return Versions(trained=max(self.trained_version, published or 0), published=published)

    def window(self) -> VersionWindow | None:
        """Return the versions that training leases ask for now; None before version 0 is published."""
        return version_window(self.settings.max_staleness, self.versions, self.oldest_version)

    def seed_of(self, lease: LiveLease, member: int) -> int:
        """Return the sampling seed of a member of a lease."""
        return member_seed(self.settings.seed, lease.group_id, member, lease.draws[member])

    def temperature(self, kind: Kind) -> float:
        """Return what completions of a kind are sampled at."""
        return self.settings.temperature if kind == "train" else 0.0

    def demand(self, group: Group, lease: LiveLease) -> Demand:
        """Return what the completions of a lease have to fit."""
        versions = self.versions
        return Demand(
            trains=group.kind == "train",
            trained_version=versions.trained,
            published_version=-1 if versions.published is None else versions.published,
            artifacts=self.artifacts,
            max_staleness=self.settings.max_staleness,
            min_version=lease.min_version,
            max_version=lease.max_version,
            temperature=self.temperature(group.kind),
            max_tokens=self.settings.max_tokens,
            prompt_digest=group.prompt_digest,
            vocabulary_size=self.facts.vocabulary_size,
            end_token_ids=tuple(dict.fromkeys(self.facts.end_token_ids)),
        )

    def notify_all(self) -> None:
        """Wake the loop and the nodes that wait for work."""
        self.changed.notify()
        self.work_changed.notify()

    async def save(self) -> None:
        """Bring to disk what only memory knows."""
        if not self.unsaved.is_empty:
            await self.committer.execute(lambda _: None)

    async def tick(self) -> None:
        """Do what time asks for: end leases, declare peers gone. Call about once a second."""
        now = self.clock.monotonic_s()
        dropped = self.leases.expire(now, alone=self.roster.alone())
        for peer in self.roster.sweep(now):
            dropped += self.leases.lose(peer, now)
            self.changed.notify()
        self.on_dropped(dropped)
        await self.save()

    async def write_peer(self, peer: PeerId, role: Role, backend: BackendReport | None) -> None:
        """Bring to disk that a peer said hello, and forget the longest gone of those that never delivered."""
        at = self.clock.wall_s()
        await self.committer.execute(
            lambda db: peer_rows.write_and_prune(db, peer, role, backend, at, forget=self._forget_peer)
        )

    def _forget_peer(self, peer: PeerId) -> bool:
        node = self.roster.get(peer)
        if (node is not None and node.live) or self.counters.get(peer, Reason.ACCEPTED.value):
            return False
        self.counters.fold(peer, STRANGERS)
        return True

    async def record_event(self, kind: str, text: str) -> None:
        """Keep something worth telling a person."""
        event = Event(at=self.clock.wall_s(), kind=kind, text=text)
        await self.committer.execute(lambda db: rows.insert_event(db, event))

    async def events(self, limit: int) -> list[Event]:
        """Return the newest events, newest first."""
        return await self.committer.execute(lambda db: rows.load_events(db, limit))

    # The life of slots and groups.

    def on_filled(self, peer: PeerId, filled: list[tuple[Group, int]]) -> None:
        """Completions of a peer, by group and member, are on disk."""
        count, tokens = 0, 0
        for group, member in filled:
            work = group.slots[member].work
            if work is None or group.state is not GroupState.ACTIVE:
                continue
            self.scoring.put((group.group_id, member))
            self.leases.learn_length(work.tokens)
            count, tokens = count + 1, tokens + work.tokens
        if not count:
            return
        now = self.clock.monotonic_s()
        self.accepted_rate.add(now, count)
        self.token_rate.add(now, tokens)
        # Its allowance grew; a request of this peer may be waiting for that alone. Others may wait for its places.
        for other in (*self.next_in_turn(peer, count), peer):
            self.work_changed.notify_one(other)
        self.counters.add(WORK, "tokens", tokens)
        self.changed.notify()

    def on_dropped(self, dropped: list[Dropped]) -> None:
        """Slots were taken back."""
        for drop in dropped:
            self.last_cause = drop.cause
            self.counters.add(DROPPED_SLOTS, drop.cause.partition(":")[0])
            self.settle(drop.group)
        if dropped:
            self.work_changed.notify()

    def settle(self, group: Group) -> None:
        """See whether nothing more can come for a group, and apply the rules to it if so."""
        if not group.settle(self.settings):
            return
        self.groups.mark(group)
        self.changed.notify()
        if group.kind == "eval":
            return
        if group.state is GroupState.READY:
            self.signal_window.add(group.rewards())
            if copies := group.copies():
                self.counters.add(WORK, "duplicate_completions", copies)
                self.counters.add(WORK, "groups_with_duplicates")
        self.selector.on_settled(group)
        if group.state is GroupState.DROPPED:
            self.close([group])

    def condemn(self, group: Group, members: Iterable[int]) -> None:
        """Take back completions that were accepted; the group, if it was ready, is under way again."""
        dropped: list[Dropped] = []
        for member in members:
            if group.slots[member].state is SlotState.SCORED:
                dropped.append(self.take_back(group, member))
            else:
                self.condemned.add((group.group_id, member))
        self.on_dropped(dropped)

    def take_back(self, group: Group, member: int) -> Dropped:
        """Open the slot of one completion again whose peer failed an audit; `on_dropped` follows."""
        slot = group.slots[member]
        if slot.work:
            self.on_taken_back(slot.work.tokens_digest)
        peer = PeerId(slot.work.peer if slot.work else "")
        dropped = Dropped(peer=peer, group=group, member=member, cause="failed audit")
        self.condemned.discard((group.group_id, member))
        spared = not self.leases.tries.uses_up(slot, peer, self.clock.monotonic_s())
        group.reopen(member, self.settings.max_attempts, spared=spared)
        self.groups.mark(group)
        return dropped

    def close(self, dropped: list[Group]) -> None:
        """Count groups that were dropped and let go of them; their capacity is free again."""
        for group in dropped:
            cause = group.cause.value if group.cause else "unknown"
            self.counters.add(DROPPED_GROUPS, cause)
            self.groups.mark(group)
            self.let_go(group.group_id)
        if dropped:
            self.changed.notify()

    def let_go(self, group_id: int) -> None:
        """Forget a group and its leases; the database keeps them."""
        self.groups.forget(group_id)
        self.condemned = {key for key in self.condemned if key[0] != group_id} if self.condemned else self.condemned
        self.leases.forget_group(group_id)

    def _restore(self, connection: Connection) -> None:
        facts = rows.load_facts(connection)
        self.next_prompt_index = facts.get("next_prompt_index", 0)
        self.paused = bool(facts.get("paused", 0))
        self.oldest_version = facts.get("oldest_version", 0)
        for update in rows.load_updates(connection, 1):
            self.unsaved.update_no, self.trained_version = update.update_no, update.new_version
        now = self.clock.monotonic_s()
        for group in rows.load_open_groups(connection):
            self.groups.add(group)
            self._restore_leases(connection, group, now)
            for member in group.members(SlotState.FILLED):
                self.scoring.put((group.group_id, member))
        wall_s = self.clock.wall_s()
        for peer, role, backend, seen_at in peer_rows.load_peers(connection, MAX_ENTRIES):
            # Before the clock's start, as a rule. The wall clock may have been set back meanwhile.
            self.roster.restore(peer, role, backend, now - max(0.0, wall_s - seen_at))

    def _restore_leases(self, connection: Connection, group: Group, now: float) -> None:
        # Nobody could renew while we were down: each lease gets a fresh term, since its peer may well have gone on.
        for lease in rows.load_group_leases(
            connection,
            group.group_id,
            deadline=now + self.settings.lease_s,
            hard_deadline=now + self.settings.lease_max_s,
        ):
            lease.outstanding = {
                member
                for member, slot in enumerate(group.slots)
                if slot.state is SlotState.LEASED and slot.lease_id == lease.lease_id
            }
            lease.granted_at = now
            self.leases.restore(lease)
