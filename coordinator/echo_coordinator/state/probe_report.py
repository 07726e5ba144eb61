"""The classes of peers as a status shows them."""

from collections.abc import Mapping
from typing import Any

from echo_coordinator.state.probe_classes import MAX_CLASSES, ClassKey, ClassRecord
from echo_coordinator.state.probes import Probes
from echo_coordinator.state.roster import Node, Roster
from echo_swarm.status import ClassStatus

TREND = 8
"""Versions listed."""


def class_statuses(roster: Roster, probes: Probes, trained_gaps: Mapping[str, Any]) -> list[ClassStatus]:
    """Return one entry for each class that is live or was measured, those with most live peers first.

    Args:
        roster: who takes part.
        probes: what was measured.
        trained_gaps: mean gap over the tokens of the newest update by `backend/precision`, as in its metrics.

    """
    live: dict[ClassKey, list[Node]] = {key: [] for key in probes.classes.records}
    for node in roster.nodes():
        if node.live and node.backend is not None:
            live.setdefault((node.backend.backend, node.backend.precision), []).append(node)
    order = sorted(live, key=lambda key: (-len(live[key]), key))[:MAX_CLASSES]
    return [_status(key, live[key], roster, probes, trained_gaps.get("/".join(key))) for key in order]


def _status(key: ClassKey, nodes: list[Node], roster: Roster, probes: Probes, trained_gap: float | None) -> ClassStatus:
    record = probes.classes.records.get(key, ClassRecord())
    newest = max(record.by_version, default=None)
    gaps = [] if newest is None else list(record.by_version[newest].values())
    return ClassStatus(
        backend=key[0],
        precision=key[1],
        peers=len(nodes),
        measured=sum(node.peer in record.newest for node in nodes),
        set_aside=sum(node.peer in roster.set_aside for node in nodes),
        probes=record.probes,
        version=newest,
        gap_mean=sum(gap.mean for gap in gaps) / len(gaps) if gaps else None,
        gap_max=max((gap.most for gap in gaps), default=None),
        gap_bias=sum(gap.bias for gap in gaps) / len(gaps) if gaps else None,
        trend=record.trend(TREND),
        trained_gap=trained_gap,
    )
