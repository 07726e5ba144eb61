"""What a run forgets of work that is settled, so that its database grows by the ledger's lines and little else."""

from sqlite3 import Connection

_SETTLED = "SELECT group_id FROM groups WHERE state IN ('consumed', 'dropped') AND update_no BETWEEN ? - 64 AND ?"
"""Up to an update. Asked at each update: looking back a little is enough, and the cost does not grow with the run."""
_DONE_WITH = "(kind = 'train' OR pinned_version IN (SELECT version FROM evaluations))"


def prune(db: Connection, before_update: int) -> None:
    """Delete the completions of groups that were settled up to an update. Their leases stay: see `prune_leases`."""
    bounds = (before_update, before_update)
    db.execute(f"DELETE FROM trajectories WHERE group_id IN ({_SETTLED})", bounds)
    kept = db.execute(
        "SELECT group_id, kind, prompt_index, x'', pinned_version, state, cause, no_signal, update_no, x'' "
        f"FROM groups WHERE group_id IN ({_SETTLED}) AND {_DONE_WITH} AND (slots <> x'' OR prompt_ids <> x'')",
        bounds,
    ).fetchall()
    # Rows that are made smaller where they are would leave their pages nearly empty for good: nothing is written there
    # again. Taken out and put back, they come to lie close together.
    db.executemany("DELETE FROM groups WHERE group_id = ?", [(row[0],) for row in kept])
    db.executemany("INSERT INTO groups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", kept)


def prune_leases(db: Connection, before_update: int) -> None:
    """Delete the leases of groups that were settled up to an update.

    Until then whoever pushes their work again hears the same verdicts; from then on, that there is no such lease.
    """
    db.execute(f"DELETE FROM leases WHERE group_id IN ({_SETTLED} AND {_DONE_WITH})", (before_update, before_update))
