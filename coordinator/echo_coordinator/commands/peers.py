"""`echo-coordinator peers`, `ban` and `pardon`: through the running coordinator, or else in the database itself."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from sqlite3 import Connection
from typing import Any, TypeVar

from rich.console import Console
from rich.text import Text

from echo_coordinator.commands.show import request
from echo_coordinator.control import NotRunning
from echo_coordinator.peer_requests import MAX_REASON
from echo_coordinator.run_folder import RunFolder
from echo_coordinator.run_keys import rotated_at
from echo_coordinator.state import audit_rows, ban_rows
from echo_coordinator.state.ban_rows import Ban
from echo_coordinator.state.database import open_database
from echo_swarm.errors import Unavailable, UsageError
from echo_swarm.identity import PeerId
from echo_swarm.peer_entry import PeerEntry, resolve_peer
from echo_swarm.render import counts, duration, literal, short_peer
from echo_swarm.succession import day
from echo_swarm.tables import Column, FittedTable

T = TypeVar("T")


def show_peers(root: Path, console: Console, *, as_json: bool) -> None:
    """Show every peer of a run, running or not. Raises UsageError, LocalFault."""
    try:
        entries = [PeerEntry.model_validate(entry) for entry in request(root, "peers")["peers"]]
    except NotRunning:
        entries = _in_database(root, lambda db: ban_rows.load_entries(db, time.time()))
    if as_json:
        print(json.dumps([entry.model_dump(mode="json") for entry in entries], indent=2))
    elif not entries:
        console.print("no peer has joined this run yet")
    else:
        console.print(peers_table(entries))
        if (note := _since_rotation(RunFolder(root), entries)) and not as_json:
            console.print(Text(note, style="dim"))


def _since_rotation(folder: RunFolder, entries: Sequence[PeerEntry]) -> str:
    """Return how many peers have not been here since the run got another key; empty when it has only had one."""
    made_at = rotated_at(folder)
    if made_at is None:
        return ""
    seen = [time.time() - entry.last_seen_s for entry in entries if entry.last_seen_s is not None]
    away = sum(at < made_at for at in seen)
    return f"the run's key was replaced on {day(made_at)}; {len(seen) - away} of these peers have been here since"


def ban_peer(root: Path, name: str, *, reason: str, take_back: bool) -> str:
    """Ban a peer and return what to tell. Raises UsageError, LocalFault."""
    if len(reason) > MAX_REASON:
        raise UsageError(f"the reason has {len(reason)} characters; at most {MAX_REASON} are told to the peer")
    try:
        reply = request(root, "ban", peer=name, reason=reason, take_back=take_back)
        taken = f"; {reply['taken_back']} completions of it were taken back" if take_back else ""
        return f"banned {reply['peer_id']}{taken}"
    except NotRunning:
        peer = _in_database(root, lambda db: _ban(db, name, reason, take_back))
        later = "; what it delivered and was not trained on is taken back at the next start" if take_back else ""
        return f"banned {peer}{later}"


def pardon_peer(root: Path, name: str) -> str:
    """Pardon a peer and return what to tell. Raises UsageError, LocalFault."""
    try:
        reply = request(root, "pardon", peer=name)
    except NotRunning:
        reply = _in_database(root, lambda db: _pardon(db, name))
    done = [word for word, is_so in (("its ban", reply["was_banned"]), ("its audits", reply["had_failed"])) if is_so]
    if not done:
        return f"{reply['peer_id']} is not banned and failed no audit; nothing was changed"
    return f"pardoned {reply['peer_id']}: {' and '.join(done)}; it begins as a newcomer"


def _in_database(root: Path, work: Callable[[Connection], T]) -> T:
    """Do something with the database of a run that is not running, in one transaction."""
    folder = RunFolder(root)
    try:
        with folder.locked(), closing(open_database(folder.database)) as db:
            db.execute("BEGIN IMMEDIATE")
            done = work(db)
            db.execute("COMMIT")
            return done
    except UsageError as e:
        if folder.wait_free(0.0):
            raise  # Not the lock: what was asked for makes no sense.
        raise Unavailable(f"the coordinator of {root} is starting or ending; try again in a moment") from e


def _ban(db: Connection, name: str, reason: str, take_back: bool) -> PeerId:
    peer, at = _find(db, name), time.time()
    before = ban_rows.load_bans(db).get(peer)
    takes_back = take_back or (before is not None and before.takes_back)
    ban_rows.write_ban(db, peer, Ban(at=at, reason=reason, takes_back=takes_back))
    return peer


def _pardon(db: Connection, name: str) -> dict[str, Any]:
    peer = _find(db, name)
    standing = audit_rows.load_standings(db).get(peer)
    had_failed = standing is not None and standing.failed > 0
    was_banned = ban_rows.delete_ban(db, peer)
    if had_failed or was_banned:
        audit_rows.delete_standing(db, peer)
    return {"peer_id": peer, "was_banned": was_banned, "had_failed": had_failed}


def _find(db: Connection, name: str) -> PeerId:
    return resolve_peer(name, [entry.peer_id for entry in ban_rows.load_entries(db, time.time())])


_COLUMNS = (
    Column(title="peer"),
    Column(title="class", spare=2),
    Column(title="standing"),
    Column(title="seen"),
    Column(title="accepted", number=True),
    Column(title="refused", sentence=True),
    Column(title="audits"),
    Column(title="in flight", number=True, spare=1),
    Column(title="why", sentence=True),
)


def peers_table(entries: Sequence[PeerEntry]) -> FittedTable:
    """Return one row a peer."""
    return FittedTable(columns=_COLUMNS, rows=[(_cells(entry), "" if entry.live else "dim") for entry in entries])


def _cells(entry: PeerEntry) -> list[Text]:
    kind = f"{entry.backend} {entry.precision}" if entry.backend else entry.role or "-"
    return [
        literal(short_peer(entry.peer_id)),
        literal(kind),
        literal(_standing(entry)),
        Text("never" if entry.last_seen_s is None else f"{duration(entry.last_seen_s)} ago"),
        Text(str(entry.accepted)),
        literal(counts(entry.rejected) or "0"),
        Text(f"{entry.audits_clean} clean, {entry.audits_failed} failed"),
        Text(str(entry.in_flight) if entry.limit is None else f"{entry.in_flight} of {entry.limit}"),
        literal(entry.detail),
    ]


def _standing(entry: PeerEntry) -> str:
    if entry.standing == "suspended":
        return f"suspended, {duration(entry.suspended_s)}"
    if entry.set_aside and entry.standing != "banned":
        return f"{entry.standing}, set aside"
    return entry.standing
