"""What a node writes down about itself at every beat, and how that is read again by `echo-node status`.

One small file a run, replaced as a whole: no socket, so that nothing is left over when the node is killed. Whether it
still runs follows from its age, see `liveness`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from echo_node.config import StatePaths, run_dirs
from echo_node.liveness import age_and_life, boot_id
from echo_node.outbox import Dropped
from echo_node.swaps import Swap, summary
from echo_swarm.checkpoint.files import read_file, write_atomically
from echo_swarm.clock import Clock
from echo_swarm.identity import peer_id_of
from echo_swarm.render import counts, duration, size, spaced
from echo_swarm.succession import RunKeys
from echo_swarm.trajectory import Reason
from echo_swarm.work import Role

_LIMIT_BYTES = 1 << 20
LEFT_BANNED = "left (banned)"
"""The last state of a node that the run's owner banned."""
LEFT_REFUSED = "left (its backend is not taken)"
"""The last state of a node that was told `backend_refused`."""
_NOBODYS_FAULT: dict[str, str] = {
    # The run moved on while the work was under way; a faster machine would see some of it too.
    Reason.STALE: "too old (not your fault)",
    Dropped.STALE: "too old (not your fault)",
    Reason.UNSCORABLE: "could not be scored (not your fault)",
}
_OUTCOMES = frozenset({*Reason, *Dropped})


class KeyChange(BaseModel):
    """The run's key was replaced, and the node has followed."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    at: float
    """Seconds since 1970, by the clock of who replaced it."""
    before: str
    """The coordinator's peer id until then."""
    after: str


class LocalStatus(BaseModel):
    """One node in one run, in its own words. Readers ignore what they do not know."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    run_id: str
    run_name: str = ""
    role: str = Role.INFERENCE.value
    peer_id: str
    pid: int
    written_at: float
    """Seconds since 1970."""
    written_up_s: float | None = None
    boot: str = ""
    """See `liveness.Stamp`."""
    started_at: float
    """Seconds since 1970, by the machine's clock at that time."""
    up_s: float = 0.0
    """From the start until this was written, on the clock that nobody sets; a sleep of the machine does not count."""
    beat_s: float
    running: bool = True
    """False in the last one, written when the node leaves."""
    state: str
    """What it does or waits for."""
    standing: str = ""
    """Why it gets no work, or less than others, in the coordinator's words; empty if it gets what others get."""
    backend: str = ""
    build: str = ""
    precision: str = ""
    device: str = ""
    batch: int = 0
    head_version: int | None = None
    held_version: int | None = None
    loaded_version: int | None = None
    swaps: tuple[Swap, ...] = ()
    """The last changes of version, oldest first, and where their time went."""
    tokens: int = 0
    """Completion tokens made since the start."""
    tokens_per_s: float = 0.0
    pending: int = 0
    """Trajectories that wait for their verdicts."""
    accepted: int = 0
    rejected: dict[str, int] = Field(default_factory=dict[str, int])
    """Trajectories by reason, since the first join; `node_…` are the node's own decisions."""
    tokens_accepted: int = 0
    bytes_sent: int = 0
    """To the coordinator."""
    bytes_received: int = 0
    """From the coordinator, model versions not counted."""
    bytes_served: int = 0
    """Pieces of model versions, to other nodes."""
    bytes_fetched_coordinator: int = 0
    bytes_fetched_peers: int = 0
    bytes_fetched_mirrors: int = 0
    held_versions: tuple[int, ...] = ()
    """Of a seeder: versions of which at least one file is whole here."""
    held_bytes: int = 0
    """Of a seeder: what all versions take on this disk."""
    key_changes: int = 0
    """How often the run's key was replaced, as far as this node knows."""
    key_change: KeyChange | None = None
    """The last time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A status file as found."""

    status: LocalStatus
    age_s: float
    live: bool


def split_counters(counters: Mapping[str, int]) -> tuple[int, dict[str, int], int]:
    """Return (accepted, rejected by reason, accepted tokens) from the outbox's counters."""
    rejected = {name: n for name, n in counters.items() if name in _OUTCOMES and name != Reason.ACCEPTED and n}
    return counters.get(Reason.ACCEPTED, 0), rejected, counters.get("tokens_accepted", 0)


def key_change(keys: RunKeys) -> KeyChange | None:
    """Return the last replacement of the run's key that this node has followed."""
    if (last := keys.last) is None:
        return None
    return KeyChange(at=last.made_at, before=peer_id_of(last.old_key), after=peer_id_of(last.new_key))


def write_status(path: Path, status: LocalStatus) -> None:
    """Replace the status file."""
    write_atomically(path, json.dumps(status.model_dump(mode="json")).encode())


def read_statuses(state_dir: Path, clock: Clock, *, boot: str | None = None) -> list[Seen]:
    """Return what the nodes of a state folder last said, the latest first. Damaged files are skipped.

    `boot` is which start of the machine this is; asked of the machine when it is not given.
    """
    boot = boot_id() if boot is None else boot
    found: list[Seen] = []
    folder = run_dirs(state_dir)
    for run_dir in folder.iterdir() if folder.is_dir() else ():
        raw = read_file(StatePaths(state_dir=state_dir, run_id=run_dir.name).status, _LIMIT_BYTES)
        try:
            status = LocalStatus.model_validate_json(raw or b"")
        except ValidationError:
            continue
        age_s, live = age_and_life(status, clock, boot)
        found.append(Seen(status=status, age_s=age_s, live=live))
    return sorted(found, key=lambda seen: seen.age_s)


def in_words(rejected: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of what was not accepted under words that tell a volunteer whose doing it was."""
    found: dict[str, int] = {}
    for code, count in rejected.items():
        words = _NOBODYS_FAULT.get(code, spaced(code))
        found[words] = found.get(words, 0) + count
    return found


def summary_lines(status: LocalStatus) -> list[str]:
    """Return what the machine did, for the end of a join."""
    taken = duration(status.up_s)
    if status.role == Role.SEEDER:
        return [f"seeded for {taken}: {held_words(status)}", _traffic(status)]
    rejected = sum(status.rejected.values())
    listed = counts(in_words(status.rejected))
    swaps = [summary(status.swaps)] if status.swaps else []
    return [
        f"took part for {taken}: {status.tokens} tokens made",
        f"trajectories since the first join: {status.accepted} accepted ({status.tokens_accepted} tokens), "
        f"{rejected} not accepted{f' ({listed})' if listed else ''}",
        *_unanswered(status.pending),
        _traffic(status),
        *swaps,
    ]


def held_words(status: LocalStatus) -> str:
    """Return which versions a seeder holds."""
    held = status.held_versions
    if not held:
        return "no version yet"
    which = f"version {held[0]}" if len(held) == 1 else f"{len(held)} versions, {held[0]} to {held[-1]}"
    return f"{which} ({size(status.held_bytes)})"


def _traffic(status: LocalStatus) -> str:
    coordinator, peers = size(status.bytes_fetched_coordinator), size(status.bytes_fetched_peers)
    return (
        f"work and beats: {size(status.bytes_sent)} sent, {size(status.bytes_received)} received; model versions: "
        f"{coordinator} from the coordinator, {peers} from peers, "
        f"{size(status.bytes_fetched_mirrors)} from mirrors, {size(status.bytes_served)} served to peers"
    )


def _unanswered(pending: int) -> list[str]:
    if not pending:
        return []
    return [
        f"{pending} trajectories have no verdict yet: they are kept, and handed in when this node joins the run again; "
        "the coordinator may count some of them already"
    ]
