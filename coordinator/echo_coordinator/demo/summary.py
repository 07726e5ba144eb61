"""What a demo run proved: the figures, and each promise that was not kept."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from echo_coordinator.run_folder import RunFolder
from echo_swarm.render import counts, short_peer
from echo_swarm.status import RunStatus

MIN_IMPROVEMENT = 0.15
"""Absolute rise of held-out greedy accuracy."""
MIN_UPDATES = 40

Problem = str


def node_counters(folder: Path) -> dict[str, dict[str, int]]:
    """Return the verdicts each node counted for itself, by peer id and reason.

    What a node decided by itself (`node_…`, such as over-stale work it did not push) never reached the coordinator.
    """
    found: dict[str, dict[str, int]] = {}
    for path in sorted(folder.glob("*/runs/*/status.json")):
        value: dict[str, Any] = json.loads(path.read_text())
        rejected = {str(k): int(v) for k, v in value["rejected"].items() if not str(k).startswith("node_")}
        found[str(value["peer_id"])] = {"accepted": int(value["accepted"]), **rejected}
    return found


def summarise(
    status: RunStatus, counters: dict[str, dict[str, int]], *, started: int, wall_s: float, run: RunFolder
) -> tuple[dict[str, Any], list[Problem]]:
    """Return the summary and the promises not kept.

    Args:
        status: the coordinator's last.
        counters: see `node_counters`.
        started: how many nodes were started.
        wall_s: how long it all took.
        run: the run's folder.

    """
    nodes = [
        {
            "peer_id": node.peer_id,
            "backend": node.backend,
            "accepted": node.accepted,
            "rejected": sum(node.rejected.values()),
            "rejected_by_reason": node.rejected,
            "counted_by_node": counters.get(node.peer_id),
        }
        for node in status.nodes
        if node.role == "inference"
    ]
    summary: dict[str, Any] = {
        "evaluations": [{"policy_version": e.policy_version, "accuracy": e.accuracy} for e in status.evaluations],
        "updates": status.updates,
        "nodes": nodes,
        "accepted": status.accepted,
        "rejected": status.rejected,
        "dropped_groups": status.dropped_groups,
        "staleness": {str(lag): count for lag, count in sorted(status.staleness.items())},
        "max_staleness": status.max_staleness,
        "wall_s": round(wall_s, 1),
        "trainer_busy_share": round(status.trainer_busy_share, 3),
        "waiting_s": status.waiting_s,
        "model_parameters": status.model_parameters,
        "bytes_served_coordinator": status.bytes_served_coordinator,
        "bytes_served_peers": status.bytes_served_peers,
        "mismatch": {
            f"{c.backend}/{c.precision}": c.model_dump(exclude={"backend", "precision"}) for c in status.classes
        },
        "run": str(run.root),
    }
    return summary, [*_run_problems(status), *_node_problems(status, counters, started), *_total_problems(status)]


def _run_problems(status: RunStatus) -> list[Problem]:
    problems: list[Problem] = []
    if status.state != "finished":
        problems.append(f"the run did not finish (state {status.state}, {status.updates} updates)")
    if status.updates < MIN_UPDATES:
        problems.append(f"{status.updates} updates, expected at least {MIN_UPDATES}")
    evaluated = [e.policy_version for e in status.evaluations]
    if len(evaluated) < 2 or evaluated[0] != 0 or evaluated[-1] != status.policy_version:
        problems.append(f"no evaluation of version 0 and of {status.policy_version}, the last (only of {evaluated})")
    else:
        rise = status.evaluations[-1].accuracy - status.evaluations[0].accuracy
        if rise < MIN_IMPROVEMENT:
            problems.append(f"held-out accuracy rose by {rise:.3f}, expected at least {MIN_IMPROVEMENT}")
    seen = {lag for lag, count in status.staleness.items() if count}
    if max(seen, default=0) > status.max_staleness:
        problems.append(f"trained with staleness {max(seen)}, allowed {status.max_staleness}")
    missing = set(range(status.max_staleness + 1)) - seen
    if missing:
        problems.append(f"no trajectory of staleness {', '.join(map(str, sorted(missing)))} was seen")
    return problems


def _node_problems(status: RunStatus, counters: dict[str, dict[str, int]], started: int) -> list[Problem]:
    nodes = [node for node in status.nodes if node.role == "inference"]
    problems = [] if len(nodes) == started else [f"{len(nodes)} of {started} nodes reached the coordinator"]
    for node in nodes:
        if not node.accepted:
            problems.append(f"node {short_peer(node.peer_id)} contributed nothing")
        own = counters.get(node.peer_id)
        ours = {reason: count for reason, count in {"accepted": node.accepted, **node.rejected}.items() if count}
        if own is None:
            problems.append(f"node {short_peer(node.peer_id)} left no summary")
        elif {reason: count for reason, count in own.items() if count} != ours:
            problems.append(f"node {short_peer(node.peer_id)} counted {own}, the coordinator {ours}")
    return problems


def _total_problems(status: RunStatus) -> list[Problem]:
    """Compare the run's totals with the sums over its nodes."""
    by_node: Counter[str] = Counter()
    for node in status.nodes:
        by_node.update({"accepted": node.accepted, **node.rejected})
    total = {reason: count for reason, count in {"accepted": status.accepted, **status.rejected}.items() if count}
    summed = {reason: count for reason, count in by_node.items() if count}
    return [] if total == summed else [f"the run counted {total} in all, its nodes together {summed}"]


def render_summary(summary: dict[str, Any]) -> RenderableType:
    """Return the table shown at the end."""
    table = Table(title="Echo Swarm demo", title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    curve = "  ".join(f"v{e['policy_version']}: {e['accuracy']:.3f}" for e in summary["evaluations"])
    table.add_row("held-out accuracy", curve or "-")
    table.add_row("updates", str(summary["updates"]))
    table.add_row("model", f"{summary['model_parameters']:,} parameters")
    table.add_row("trajectories", f"{summary['accepted']} accepted, {counts(summary['rejected']) or 'none'} rejected")
    table.add_row("staleness", "  ".join(f"{lag}: {count}" for lag, count in summary["staleness"].items()))
    for node in summary["nodes"]:
        row = f"{node['backend']}: {node['accepted']} accepted, {node['rejected']} rejected"
        table.add_row(f"node {short_peer(node['peer_id'])}", row)
    for name, found in summary["mismatch"].items():
        gap, version = found["gap_mean"], found["version"]
        told = "not measured" if gap is None else f"{gap:.1e} nats a token from the trainer at version {version}"
        table.add_row(f"mismatch {name}", told)
    table.add_row("trainer busy", f"{summary['trainer_busy_share']:.0%}")
    table.add_row("wall clock", f"{summary['wall_s']:.0f} s")
    verdict = Text("ok", style="bold green") if summary["ok"] else Text("failed", style="bold red")
    table.add_row("result", verdict)
    return Group(table)
