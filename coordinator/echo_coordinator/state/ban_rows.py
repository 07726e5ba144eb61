"""Rows of bans, and of all that is known of peers, for whoever looks after a run; also while it does not run."""

from dataclasses import dataclass
from sqlite3 import Connection

from echo_coordinator.state import audit_rows, peer_rows
from echo_coordinator.state.audit_rows import Standing
from echo_swarm.identity import PeerId
from echo_swarm.peer_entry import PeerEntry
from echo_swarm.trajectory import Reason

_EVERYBODY = 1 << 40
"""No limit on the rows read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ban:
    """A decision of the run's owner."""

    at: float
    """Seconds since 1970."""
    reason: str
    """In the owner's words; the peer is told."""
    takes_back: bool
    """Also what the peer delivered before is not used, as far as it was not trained on."""


def write_ban(db: Connection, peer: PeerId, ban: Ban) -> None:
    """Write a ban, in place of an earlier one of that peer."""
    db.execute("INSERT OR REPLACE INTO bans VALUES (?, ?, ?, ?)", (peer, ban.at, ban.reason, ban.takes_back))


def delete_ban(db: Connection, peer: PeerId) -> bool:
    """Lift a ban. False: there is none."""
    return db.execute("DELETE FROM bans WHERE peer = ?", (peer,)).rowcount > 0


def load_bans(db: Connection) -> dict[PeerId, Ban]:
    """Return all bans."""
    rows = db.execute("SELECT peer, at, reason, takes_back FROM bans")
    return {PeerId(peer): Ban(at=at, reason=why, takes_back=bool(back)) for peer, at, why, back in rows}


def load_entries(db: Connection, wall_s: float) -> list[PeerEntry]:
    """Return what the database has of every peer, in the order in which they said hello, the latest first.

    Args:
        db: of the run.
        wall_s: seconds since 1970, now.

    """
    standings, bans = audit_rows.load_standings(db), load_bans(db)
    seen = {peer: (role, backend, at) for peer, role, backend, at in peer_rows.load_peers(db, _EVERYBODY)}
    entries: list[PeerEntry] = []
    for peer in dict.fromkeys([*seen, *bans, *standings]):
        role, backend, at = seen.get(peer, (None, None, None))
        standing, ban = standings.get(peer, Standing()), bans.get(peer)
        rows = db.execute("SELECT name, value FROM counters WHERE scope = ? AND value > 0", (peer,))
        counts = {str(name): int(value) for name, value in rows}
        entries.append(
            PeerEntry(
                peer_id=peer,
                role=role.value if role else "",
                backend=backend.backend if backend else "",
                precision=backend.precision if backend else "",
                standing=standing.word(wall_s) if ban is None else "banned",
                detail=standing.detail if ban is None else ban.reason,
                suspended_s=max(0.0, standing.until - wall_s),
                banned_at=None if ban is None else ban.at,
                accepted=counts.pop(Reason.ACCEPTED.value, 0),
                rejected=counts,
                audits_clean=standing.clean,
                audits_failed=standing.failed,
                last_seen_s=None if at is None else max(0.0, wall_s - at),
            )
        )
    return entries
