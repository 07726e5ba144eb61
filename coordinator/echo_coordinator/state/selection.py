"""Which groups go into the next batch, oldest first; what is dropped on the way; what is waited for. Pure.

The rules are those of docs/adr/0003-groups.md: incomplete groups, groups without signal, members that aged.
"""

from collections.abc import Callable
from dataclasses import dataclass

from echo_coordinator.state.batch import Waiting, WaitState
from echo_coordinator.state.groups import DropCause, Group, GroupState, GroupTable, SlotState
from echo_coordinator.state.work_settings import WorkSettings

PATIENCE = 4
"""Updates' worth of groups without signal that are replaced in a row before a smaller batch goes out."""
FAILING_AFTER = 10
"""Groups dropped incomplete in a row after which a person should look."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What `Selector.waiting` needs to know of the rest."""

    paused: bool
    published: bool
    """Whether version 0 is."""
    publication_lag: int
    live_nodes: int
    last_cause: str
    """Why the newest slot was taken back."""


class Selector:
    """Keeps the two streaks that bound waiting, and since when the present wait lasts."""

    def __init__(self, settings: WorkSettings) -> None:
        self._settings = settings
        self.unvetted: Callable[[Group], int] = lambda _: 0
        """Members of a group that unproven peers made and that wait for their audit."""
        self.unvetted_share = 1.0
        """Most of a batch that may be so."""
        self._flat_streak = 0
        self._failed_streak = 0
        self._wait: WaitState | None = None

    def on_settled(self, group: Group) -> None:
        """Apply the rule for groups without signal to one that has just become ready; count the streaks."""
        if group.state is GroupState.DROPPED:
            self._failed_streak += 1
            return
        self._failed_streak = 0
        if group.no_signal and self._settings.no_signal == "replace":
            self._flat_streak += 1
            group.state, group.cause = GroupState.DROPPED, DropCause.NO_SIGNAL

    @property
    def without_signal(self) -> bool:
        """Whether patience with groups without signal has run out."""
        return self._flat_streak >= PATIENCE * self._settings.groups_per_update

    @property
    def failing(self) -> bool:
        """Whether nothing but incomplete groups has come for a while."""
        return self._failed_streak >= FAILING_AFTER

    def drop_stale(self, groups: GroupTable, version: int) -> list[Group]:
        """Drop the ready groups all of whose members have aged and return them."""
        dropped: list[Group] = []
        for group in groups.of_kind("train"):
            if group.state is not GroupState.READY:
                continue
            scored = group.members(SlotState.SCORED)
            if all(group.is_aged(member, version, self._settings.max_staleness) for member in scored):
                group.state, group.cause = GroupState.DROPPED, DropCause.STALE
                dropped.append(group)
        return dropped

    def take(self, groups: GroupTable) -> list[Group]:
        """Return the groups of the next batch, or none when there is no batch yet."""
        chosen = self._next(groups)
        if chosen:
            self._flat_streak, self._wait = 0, None
        for group in chosen:
            group.state = GroupState.TRAINING
        return chosen

    def has_batch(self, groups: GroupTable) -> bool:
        """Whether `take` would return a batch."""
        return bool(self._next(groups))

    def _next(self, groups: GroupTable) -> list[Group]:
        wanted = self._settings.groups_per_update
        ready = sorted((g for g in groups.of_kind("train") if g.state is GroupState.READY), key=lambda g: g.group_id)
        if len(ready) < wanted and not (ready and self.without_signal):
            return []
        chosen = ready[:wanted]
        # Never for long: whatever is in the way waits for an audit, and audits go on while there is no batch.
        unvetted = sum(map(self.unvetted, chosen))
        members = sum(len(group.members(SlotState.SCORED)) for group in chosen)
        return chosen if unvetted <= self.unvetted_share * members else []

    def waiting(self, groups: GroupTable, situation: Situation, now: float) -> WaitState:
        """Say what the next batch waits for."""
        slots = groups.slot_counts("train")
        numbers = {
            "ready": groups.count("train", GroupState.READY),
            "needed": self._settings.groups_per_update,
            "active": groups.count("train", GroupState.ACTIVE),
            "open": slots[SlotState.OPEN],
            "leased": slots[SlotState.LEASED],
            "unscored": slots[SlotState.STORING] + slots[SlotState.FILLED],
            "nodes": situation.live_nodes,
        }
        reason, detail = self._reason(numbers, situation)
        since = self._wait.since if self._wait is not None and self._wait.reason is reason else now
        self._wait = WaitState(reason=reason, since=since, detail=detail, numbers=numbers)
        return self._wait

    def _reason(self, numbers: dict[str, int], situation: Situation) -> tuple[Waiting, str]:
        ready, needed = numbers["ready"], numbers["needed"]
        progress = f"{ready} of {needed} groups ready"
        if situation.paused:
            return Waiting.PAUSED, f"the run is paused; {progress}"
        if not situation.published:
            return Waiting.STARTING, "version 0 is not published yet"
        if self.failing:
            return Waiting.FAILING, (
                f"the last {self._failed_streak} groups were dropped because their completions did not come or were "
                f"refused, most recently: {situation.last_cause or 'unknown'}; {progress}"
            )
        if self.without_signal:
            return Waiting.NO_SIGNAL, (
                f"the last {self._flat_streak} groups had equal rewards and were replaced; the task is too easy or "
                f"too hard, or group_size too small; {progress}"
            )
        if ready + numbers["active"] < needed:
            if situation.publication_lag:
                return Waiting.PUBLISHING, f"the newest update is being published; {progress}"
            return Waiting.PROMPTS, f"prompts are being added; {progress}"
        if not situation.live_nodes and numbers["open"] + numbers["leased"]:
            return Waiting.NO_NODES, f"no inference node is connected; {progress}"
        if numbers["unscored"] and not numbers["open"] + numbers["leased"]:
            return Waiting.SCORING, f"{numbers['unscored']} completions wait for their reward; {progress}"
        return Waiting.SAMPLING, f"nodes are sampling {numbers['leased']} completions; {progress}"
