"""A run's status as tables for a terminal. Used by both command lines; knows nothing but `RunStatus`."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from echo_swarm.status import AuditStatus, ClassStatus, EvaluationStatus, NodeStatus, RunStatus, StreamStatus
from echo_swarm.tables import Column, FittedTable
from echo_swarm.transfer_table import transfers_parts
from echo_swarm.wire import clean
from echo_swarm.words import counts, duration, literal, short_peer, size, spaced, sparkline

__all__ = ["counts", "duration", "literal", "render_run_status", "short_peer", "size", "spaced", "sparkline"]

SEEDER = "seeder"
"""The role of peers that only store and serve."""
_EVALUATIONS = 5
"""Shown beside the first."""


def render_run_status(status: RunStatus) -> RenderableType:
    """Return the whole status of a run."""
    seeders = [node for node in status.nodes if node.role == SEEDER]
    samplers = [node for node in status.nodes if node.role != SEEDER]
    parts: list[RenderableType] = [_headline(status), _facts(status), nodes_table(samplers)]
    if seeders:
        parts.append(seeders_table(seeders))
    if any(entry.probes or entry.trained_gap is not None for entry in status.classes):
        parts.append(classes_table(status.classes))
    parts += transfers_parts(status.transfers, status.transfers_refused)
    if status.key_changed_at is not None:
        parts.append(_key_line(status.key_changes, status.key_changed_at))
    parts += [literal(f"! {warning}", style="yellow") for warning in status.warnings]
    return Group(*parts)


def _key_line(changes: int, at: float) -> Text:
    day = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))
    often = "once" if changes == 1 else f"{changes} times, last"
    return Text(f"the run's key was replaced {often} on {day}; invites from before still lead here", style="dim")


def nodes_table(nodes: Iterable[NodeStatus]) -> RenderableType:
    """Return one row a peer, the living first."""
    ordered = sorted(nodes, key=lambda node: (not node.live, -node.accepted))
    if not ordered:
        return Text("no node has joined yet", style="dim")
    return FittedTable(
        columns=_NODE_COLUMNS, rows=[(_node_cells(node), "" if node.live else "dim") for node in ordered]
    )


def seeders_table(seeders: Iterable[NodeStatus]) -> RenderableType:
    """Return one row a seeder, the living first, then those that served most."""
    ordered = sorted(seeders, key=lambda node: (not node.live, -node.bytes_served))
    return FittedTable(
        columns=_SEEDER_COLUMNS, rows=[(_seeder_cells(node), "" if node.live else "dim") for node in ordered]
    )


def classes_table(classes: Iterable[ClassStatus]) -> RenderableType:
    """Return one row a class of backends: how far it is from the trainer."""
    return FittedTable(columns=_CLASS_COLUMNS, rows=[(_class_cells(entry), "") for entry in classes])


_CLASS_COLUMNS = (
    Column(title="gap to trainer"),
    Column(title="peers", number=True),
    Column(title="set aside", number=True, spare=2),
    Column(title="version", number=True),
    Column(title="mean", number=True),
    Column(title="max", number=True),
    Column(title="bias", number=True, spare=3),
    Column(title="trend", spare=4),
    Column(title="in training", number=True, spare=1),
)


def _class_cells(entry: ClassStatus) -> list[Text]:
    measured = f"{entry.measured}/{entry.peers}" if entry.peers else "0"
    trend = [gap for _, gap in entry.trend]
    return [
        literal(f"{entry.backend} {entry.precision}"),
        Text(measured),
        Text(str(entry.set_aside)),
        Text("-" if entry.version is None else str(entry.version)),
        Text("not measured" if entry.gap_mean is None else _nats(entry.gap_mean)),
        Text(_nats(entry.gap_max)),
        Text("-" if entry.gap_bias is None else f"{entry.gap_bias:+.1e}"),
        Text(sparkline(trend) if len(trend) > 1 else "-"),
        Text(_nats(entry.trained_gap)),
    ]


def _nats(gap: float | None) -> str:
    return "-" if gap is None else f"{gap:.1e}"


_NODE_COLUMNS = (
    Column(title="node"),
    Column(title="role", spare=3),
    Column(title="backend", spare=1),
    Column(title="version", number=True, spare=2),
    Column(title="seen"),
    Column(title="tok/s", number=True),
    Column(title="accepted", number=True),
    Column(title="rejected", sentence=True),
    Column(title="doing", sentence=True),
)


def _node_cells(node: NodeStatus) -> list[Text]:
    return [
        literal(short_peer(node.peer_id)),
        literal(node.role),
        literal(node.backend or "-"),
        Text("-" if node.held_version is None else str(node.held_version)),
        Text(f"{duration(node.last_seen_s)} ago"),
        Text(f"{node.tokens_per_s:.0f}" if node.live else "-"),
        Text(str(node.accepted)),
        literal(counts(node.rejected) or "0"),
        literal(_doing(node)),
    ]


_SEEDER_COLUMNS = (
    Column(title="seeder"),
    Column(title="version", number=True),
    Column(title="seen"),
    Column(title="served", number=True),
    Column(title="from peers", number=True, spare=1),
    Column(title="doing", sentence=True),
)


def _seeder_cells(node: NodeStatus) -> list[Text]:
    return [
        literal(short_peer(node.peer_id)),
        Text("-" if node.held_version is None else str(node.held_version)),
        Text(f"{duration(node.last_seen_s)} ago"),
        Text(size(node.bytes_served)),
        Text(size(node.bytes_fetched_peers)),
        literal(_doing(node)),
    ]


def _doing(node: NodeStatus) -> str:
    if node.standing == "banned":
        return f"banned: {node.standing_detail}" if node.standing_detail else "banned"
    if not node.live:
        return "(gone)"
    if node.standing == "suspended":
        return f"suspended for {duration(node.suspended_s)}: {node.standing_detail.partition(':')[0]}"
    return f"set aside: {spaced(node.probe)}" if node.set_aside else node.state


def _headline(status: RunStatus) -> Text:
    version = "no version yet" if status.policy_version is None else f"version {status.policy_version}"
    age = "" if status.version_age_s is None else f", {duration(status.version_age_s)} old"
    planned = "" if status.updates_planned is None else f" of {status.updates_planned}"
    text = literal(f"{status.name} ", style="bold")
    text.append(f"({clean(status.run_id[:8])}) ", style="dim")
    text.append(f"{status.state}", style="green" if status.state == "running" else "yellow")
    text.append(f" · {clean(status.mode)}, max staleness {status.max_staleness} · {version}{age}")
    text.append(f" · {status.updates}{planned} updates")
    return text


def _facts(status: RunStatus) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for label, value in _fact_rows(status):
        alarming = label == "trainer" and not status.trainer.normal
        table.add_row(label, literal(value, style="red" if alarming else ""))
    return table


def _fact_rows(status: RunStatus) -> Iterable[tuple[str, str]]:
    trainer = status.trainer
    words = f"{spaced(trainer.state)} for {duration(trainer.since_s)}"
    words += f": {trainer.detail}" if trainer.detail else ""
    yield "trainer", words
    waits = ", ".join(f"{spaced(cause)} {duration(s)}" for cause, s in status.waiting_s.items() if s >= 0.5)
    yield "trainer busy", f"{status.trainer_busy_share:.0%}" + (f" (waited: {waits})" if waits else "")
    buffer = status.buffer
    # A group is begun when it waits for a node, too.
    begun = "being sampled" if any(node.live for node in status.nodes) else "waiting for a node"
    used = buffer.in_flight + buffer.ready + buffer.training
    yield (
        "buffer",
        f"{used}/{buffer.capacity} groups: {buffer.in_flight} {begun}, {buffer.ready} ready, "
        f"{buffer.training} in training, {size(buffer.bytes)}",
    )
    yield (
        "trajectories",
        f"{status.accepted} accepted, {_rejected(status.rejected)}, {status.trajectories_per_s:.1f}/s, "
        f"{status.tokens_per_s:.0f} tokens/s",
    )
    if any((status.audits.clean, status.audits.failed, status.audits.not_made)):
        yield "audits", _audits(status.audits)
    if status.dropped_groups:
        yield "dropped groups", counts(status.dropped_groups)
    if status.staleness:
        yield "staleness", "  ".join(f"{lag}: {count}" for lag, count in sorted(status.staleness.items()))
    rewards = [u.reward_mean for u in status.recent_updates if u.reward_mean is not None]
    if rewards:
        yield "reward", f"{sparkline(rewards)} {rewards[-1]:.3f}"
    last = status.recent_updates[-1] if status.recent_updates else None
    if last and last.ratio_min is not None and last.ratio_mean is not None and last.ratio_max is not None:
        yield (
            "ratio",
            f"min {last.ratio_min:.3f}, mean {last.ratio_mean:.3f}, max {last.ratio_max:.3f}, "
            f"clipped {last.clipped_share or 0:.1%}",
        )
    if status.evaluations:
        yield "evaluation", _evaluations(status.evaluations)
    yield (
        "served",
        f"{size(status.bytes_served_coordinator)} by the coordinator, {size(status.bytes_served_peers)} by peers",
    )
    if ended := "; ".join(
        f"{service}: {words}" for service, entry in status.streams.items() if (words := _ended(entry))
    ):
        yield "streams ended", ended
    if status.nodes:
        yield "nodes", _nodes_summary(status.nodes)


def _evaluations(evaluations: Sequence[EvaluationStatus]) -> str:
    """Return the first, against which people compare, and the last ones."""
    words = [f"v{e.policy_version}: {e.accuracy:.3f}" for e in evaluations]
    if len(words) > _EVALUATIONS + 1:
        words = [words[0], "…", *words[-_EVALUATIONS:]]
    return "  ".join(words)


def _audits(audits: AuditStatus) -> str:
    words = f"{audits.clean} clean, {audits.failed} failed"
    words += f" ({audits.taken_back} completions taken back)" if audits.taken_back else ""
    others = ((audits.not_made, "could not be made"), (audits.missed, "missed"))
    words += "".join(f", {count} {what}" for count, what in others if count)
    return f"{words}; {audits.trainer_share:.1%} of the trainer's time"


def _ended(streams: StreamStatus) -> str:
    """Return the causes that there were, those first that tell of a flood."""
    causes = (
        (streams.crowded_streams, "too slow while memory was full"),
        (streams.evicted_streams, "not in use while places were full"),
        (streams.refused_streams, "beyond what a peer may open"),
        (streams.malformed_streams, "broke the protocol"),
    )
    return ", ".join(f"{count} {cause}" for count, cause in causes if count)


def _rejected(by_reason: dict[str, int]) -> str:
    total = sum(by_reason.values())
    return f"{total} rejected ({counts(by_reason)})" if total else "none rejected"


def _nodes_summary(nodes: Sequence[NodeStatus]) -> str:
    """Return how many of each role live, on what they run, and which versions they hold."""
    live = [node for node in nodes if node.live]
    roles = ", ".join(f"{count} {role}" for role, count in Counter(node.role for node in live).items())
    parts = [f"{roles} live" if live else "none live"]
    if gone := len(nodes) - len(live):
        parts[0] += f", {gone} gone"
    backends = Counter(f"{n.backend} {n.precision} on {n.device}" for n in live if n.backend)
    if backends:
        parts.append(", ".join(f"{count} × {name}" for name, count in backends.most_common()))
    held = Counter(node.held_version for node in live if node.held_version is not None)
    if held:
        parts.append("holding " + ", ".join(f"v{version}: {held[version]}" for version in sorted(held, reverse=True)))
    if outbound := sum(node.outbound_only for node in live):
        parts.append(f"{outbound} outbound only")
    return " · ".join(parts)
