"""Rows of peers, and how many of them are kept: identities cost nothing, so their rows must not grow without bound."""

from collections.abc import Callable, Iterable
from sqlite3 import Connection

from echo_swarm.identity import PeerId
from echo_swarm.trajectory import Reason
from echo_swarm.work import BackendReport, Role

MAX_IDLE_PEERS = 4096
"""Peers kept of which nothing was ever accepted: those that said hello last. Who delivered is kept for good."""


def write_peer(db: Connection, peer: str, role: Role, backend: BackendReport | None, at: float) -> None:
    """Write that a peer was here."""
    report = None if backend is None else backend.model_dump_json()
    db.execute(
        "INSERT INTO peers VALUES (?, ?, ?, ?, ?) ON CONFLICT (peer) DO UPDATE SET role = excluded.role, "
        "backend = excluded.backend, last_seen_at = excluded.last_seen_at",
        (peer, role.value, report, at, at),
    )


def load_peers(db: Connection, most: int) -> list[tuple[PeerId, Role, BackendReport | None, float]]:
    """Return (peer, role, backend, last seen at, seconds since 1970) of the `most` that said hello last."""
    rows = db.execute("SELECT peer, role, backend, last_seen_at FROM peers ORDER BY last_seen_at DESC LIMIT ?", (most,))
    return [(PeerId(p), Role(r), b and BackendReport.model_validate_json(b), at) for p, r, b, at in rows]


def surplus_peers(db: Connection, keep: int = MAX_IDLE_PEERS) -> list[PeerId]:
    """Return the peers beyond the newest `keep` of those that delivered nothing accepted."""
    if db.execute("SELECT count(*) FROM peers").fetchone()[0] <= keep:
        return []
    rows = db.execute(
        "SELECT peer FROM peers WHERE NOT EXISTS (SELECT 1 FROM counters WHERE scope = peers.peer AND name = ? "
        "AND value > 0) ORDER BY last_seen_at DESC, peer LIMIT -1 OFFSET ?",
        (Reason.ACCEPTED.value, keep),
    )
    return [PeerId(peer) for (peer,) in rows]


def delete_peers(db: Connection, peers: Iterable[PeerId]) -> None:
    """Delete peers with their counters; what those counted must have been added elsewhere in the same transaction."""
    keys = [(peer,) for peer in peers]
    db.executemany("DELETE FROM peers WHERE peer = ?", keys)
    db.executemany("DELETE FROM counters WHERE scope = ?", keys)


def write_and_prune(
    db: Connection,
    peer: PeerId,
    role: Role,
    backend: BackendReport | None,
    at: float,
    *,
    forget: Callable[[PeerId], bool],
) -> None:
    """Write that a peer was here, and delete the surplus that `forget` lets go (it adds up their counters)."""
    write_peer(db, peer, role, backend, at)
    delete_peers(db, [surplus for surplus in surplus_peers(db) if surplus != peer and forget(surplus)])
