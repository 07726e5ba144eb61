"""Rows of audits: the secret they are drawn with, what they showed, how each peer stands."""

import secrets
from dataclasses import dataclass
from sqlite3 import Connection

from echo_coordinator.state.audit_rules import FREE, NO_STRAYS, NOTHING, Drift, Finding, Strays
from echo_swarm.identity import PeerId

PROBATION = 4
"""Clean audits in a row after a failure before a peer may hold more than one completion."""
KEPT_GROUPS = 100_000
"""Audits of groups that lie further back are forgotten; standings stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """How a peer stands after its audits."""

    clean: int = 0
    """Audits in a row."""
    failed: int = 0
    """Audits ever."""
    until: float = 0.0
    """Seconds since 1970 at which it may have work again."""
    detail: str = ""
    """Of its last failure, for people."""
    drift: Drift = NOTHING
    """Of its clean audits."""
    strays: Strays = NO_STRAYS
    """Of the same."""

    @property
    def on_probation(self) -> bool:
        """Whether it failed, and too few audits were clean since."""
        return self.failed > 0 and self.clean < PROBATION

    def word(self, wall_s: float) -> str:
        """Return how the peer stands at a time (seconds since 1970): `suspended`, `probation`, `proven` or `new`."""
        if wall_s < self.until:
            return "suspended"
        if self.on_probation:
            return "probation"
        return "proven" if self.clean >= FREE else "new"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAudit:
    """One audit."""

    group_id: int
    peer: PeerId
    at: float
    """Seconds since 1970."""
    version: int
    backend: str
    precision: str
    seconds: float
    """That the trainer spent on it."""
    finding: Finding


def load_secret(db: Connection) -> bytes:
    """Return the run's secret; made when it is asked for first."""
    db.execute("INSERT OR IGNORE INTO secrets VALUES ('audits', ?)", (secrets.token_bytes(32),))
    return bytes(db.execute("SELECT value FROM secrets WHERE name = 'audits'").fetchone()[0])


def write_secret(db: Connection, secret: bytes) -> None:
    """Choose the run's secret, before it is asked for first: for simulations, which have to draw the same again."""
    db.execute("INSERT INTO secrets VALUES ('audits', ?)", (secret,))


def insert_audit(db: Connection, audit: StoredAudit) -> None:
    """Write an audit."""
    found = audit.finding
    db.execute(
        "INSERT OR REPLACE INTO audits VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            audit.group_id,
            audit.peer,
            audit.at,
            audit.version,
            audit.backend,
            audit.precision,
            found.verdict.value,
            found.detail,
            audit.seconds,
            found.drift.tokens,
            found.gap,
            found.bias,
            found.drift.surprise,
            found.drift.variance,
        ),
    )
    db.execute("DELETE FROM audits WHERE group_id < ?", (audit.group_id - KEPT_GROUPS,))


def audited(db: Connection, first_group: int) -> set[tuple[int, PeerId]]:
    """Return the (group, peer) that were audited, from a group on."""
    rows = db.execute("SELECT group_id, peer FROM audits WHERE group_id >= ?", (first_group,))
    return {(group_id, PeerId(peer)) for group_id, peer in rows}


def write_standing(db: Connection, peer: PeerId, standing: Standing) -> None:
    """Write how a peer stands."""
    drift, strays = standing.drift, standing.strays
    db.execute(
        "INSERT OR REPLACE INTO standings VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            peer,
            standing.clean,
            standing.failed,
            standing.until,
            standing.detail,
            drift.tokens,
            drift.surprise,
            drift.variance,
            strays.sum,
            strays.room,
            strays.variance,
            drift.gap,
        ),
    )


def delete_standing(db: Connection, peer: PeerId) -> None:
    """Forget how a peer stood: it is a newcomer again."""
    db.execute("DELETE FROM standings WHERE peer = ?", (peer,))


def load_standings(db: Connection) -> dict[PeerId, Standing]:
    """Return how all peers stand that were ever audited."""
    rows = db.execute(
        "SELECT peer, clean, failed, until, detail, tokens, surprise, variance, strays, strays_room, strays_variance, "
        "gap FROM standings"
    )
    return {
        PeerId(peer): Standing(
            clean=clean,
            failed=failed,
            until=until,
            detail=detail,
            drift=Drift(tokens=tokens, surprise=surprise, variance=variance, gap=gap),
            strays=Strays(sum=strays, room=room, variance=spread),
        )
        for peer, clean, failed, until, detail, tokens, surprise, variance, strays, room, spread, gap in rows
    }
