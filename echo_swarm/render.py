"""A run's status as tables for a terminal. Used by both command lines; knows nothing but `RunStatus`."""

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from echo_swarm.status import NodeStatus, RunStatus

_BARS = "▁▂▃▄▅▆▇█"


def render_run_status(status: RunStatus) -> RenderableType:
    """Return the whole status of a run."""
    parts: list[RenderableType] = [_headline(status), _facts(status), nodes_table(status.nodes)]
    parts += [Text(f"! {warning}", style="yellow") for warning in status.warnings]
    return Group(*parts)


def nodes_table(nodes: Iterable[NodeStatus]) -> RenderableType:
    """Return one row a peer, the living first."""
    ordered = sorted(nodes, key=lambda node: (not node.live, -node.accepted))
    if not ordered:
        return Text("no node has joined yet", style="dim")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("node", "role", "backend", "device", "version", "seen", "tok/s", "accepted", "rejected", "state"):
        table.add_column(title, justify="right" if title in {"version", "tok/s", "accepted"} else "left")
    for node in ordered:
        backend = f"{node.backend} {node.precision}".strip() or "-"
        table.add_row(
            short_peer(node.peer_id),
            node.role + (" (outbound only)" if node.outbound_only else ""),
            backend,
            node.device or "-",
            "-" if node.held_version is None else str(node.held_version),
            f"{duration(node.last_seen_s)} ago" + ("" if node.live else " (gone)"),
            f"{node.tokens_per_s:.0f}",
            str(node.accepted),
            counts(node.rejected) or "0",
            node.state,
            style=None if node.live else "dim",
        )
    return table


def _headline(status: RunStatus) -> Text:
    version = "no version yet" if status.policy_version is None else f"version {status.policy_version}"
    age = "" if status.version_age_s is None else f", {duration(status.version_age_s)} old"
    planned = "" if status.updates_planned is None else f" of {status.updates_planned}"
    text = Text(f"{status.name} ", style="bold")
    text.append(f"({status.run_id[:8]}) ", style="dim")
    text.append(f"{status.state}", style="green" if status.state == "running" else "yellow")
    text.append(f" · {status.mode}, max staleness {status.max_staleness} · {version}{age}")
    text.append(f" · {status.updates}{planned} updates")
    return text


def _facts(status: RunStatus) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for label, value in _fact_rows(status):
        table.add_row(label, value)
    return table


def _fact_rows(status: RunStatus) -> Iterable[tuple[str, RenderableType]]:
    trainer = status.trainer
    words = f"{trainer.state} for {duration(trainer.since_s)}" + (f": {trainer.detail}" if trainer.detail else "")
    yield "trainer", Text(words, style="" if trainer.normal else "red")
    waits = ", ".join(f"{cause} {duration(seconds)}" for cause, seconds in status.waiting_s.items() if seconds >= 0.5)
    yield "busy", f"{status.trainer_busy_share:.0%}" + (f" (waited: {waits})" if waits else "")
    buffer = status.buffer
    used = buffer.in_flight + buffer.ready + buffer.training
    yield (
        "buffer",
        f"{used}/{buffer.capacity} groups: {buffer.in_flight} being sampled, {buffer.ready} ready, "
        f"{buffer.training} in training, {size(buffer.bytes)}",
    )
    rejected = counts(status.rejected)
    yield (
        "trajectories",
        f"{status.accepted} accepted, {rejected or 'none'} rejected, {status.trajectories_per_s:.1f}/s, "
        f"{status.tokens_per_s:.0f} tokens/s",
    )
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
        shown = "  ".join(f"v{e.policy_version}: {e.accuracy:.3f}" for e in status.evaluations[-8:])
        yield "evaluation", shown
    yield (
        "served",
        f"{size(status.bytes_served_coordinator)} by the coordinator, {size(status.bytes_served_peers)} by peers",
    )


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """Return the last `width` values as a line of bars between their smallest and largest."""
    shown = list(values)[-width:]
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(_BARS[int((value - low) / span * (len(_BARS) - 1))] for value in shown)


def counts(by_reason: dict[str, int]) -> str:
    """Return `late 3, stale 1`, the largest first; empty when all are zero."""
    ordered = sorted(by_reason.items(), key=lambda item: -item[1])
    return ", ".join(f"{reason} {count}" for reason, count in ordered if count)


def short_peer(peer_id: str) -> str:
    """Return the end of a peer id; its beginning is the same for every Ed25519 key."""
    return f"…{peer_id[-8:]}"


def duration(seconds: float) -> str:
    """Return a length of time in its two largest units."""
    whole = int(seconds)
    if whole < 60:
        return f"{seconds:.0f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def size(count: int) -> str:
    """Return a number of bytes with a decimal unit."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
