"""How the last versions reached the nodes, as a table for a terminal, and who was at fault."""

from collections.abc import Container, Sequence

from rich.console import RenderableType
from rich.text import Text

from echo_swarm.status import FaultStatus, VersionTransfers
from echo_swarm.tables import Column, FittedTable
from echo_swarm.words import counts, duration, literal, short_peer, size, spaced

SHOWN_VERSIONS = 5
SHOWN_FAULTS = 8


def transfers_parts(versions: Sequence[VersionTransfers], refused: dict[str, int]) -> list[RenderableType]:
    """Return the table, and a line for each source that was at fault; nothing before there is something to tell."""
    told = [entry for entry in versions if entry.told or entry.nodes]
    shown = told[:SHOWN_VERSIONS] + [entry for entry in told[SHOWN_VERSIONS:] if entry.is_base]
    if not shown:
        return []
    parts: list[RenderableType] = [FittedTable(columns=_COLUMNS, rows=[(_cells(entry), "") for entry in shown])]
    if not all(entry.timed for entry in shown):
        parts.append(Text("(r) published before the coordinator's restart: what nodes still tell", style="dim"))
    if refused:
        parts.append(literal(f"not counted, since it cannot be: {counts(refused)}", style="dim"))
    return parts + _faults(versions, {entry.policy_version for entry in shown})


_COLUMNS = (
    Column(title="transfers"),
    Column(title="had it", number=True),
    Column(title="50\N{NO-BREAK SPACE}%", number=True),
    Column(title="100\N{NO-BREAK SPACE}%", number=True),
    Column(title="coordinator", number=True),
    Column(title="peers", number=True),
    Column(title="mirrors", number=True),
    Column(title="in deltas", number=True),
    Column(title="on disk", number=True, spare=1),
    Column(title="served", number=True, spare=2),
    Column(title="slowest", number=True, spare=3),
    Column(title="failures", number=True, spare=4),
)


def _cells(entry: VersionTransfers) -> list[Text]:
    name = f"v{entry.policy_version}" + (" + base" if entry.is_base else "") + ("" if entry.timed else " (r)")
    return [
        Text(name),
        Text(f"{entry.had}/{entry.nodes}" if entry.nodes else "-"),
        Text("-" if entry.half_s is None else duration(entry.half_s)),
        Text("-" if entry.all_s is None else duration(entry.all_s)),
        Text(size(entry.bytes_coordinator)),
        Text(size(entry.bytes_peers)),
        Text(size(entry.bytes_mirrors)),
        Text(size(entry.bytes_deltas)),
        Text(size(entry.bytes_disk)),
        Text("-" if entry.bytes_served is None else size(entry.bytes_served)),
        Text(duration(entry.slowest_s) if entry.told else "-"),
        Text(str(entry.failures)),
    ]


def _faults(versions: Sequence[VersionTransfers], shown: Container[int]) -> list[RenderableType]:
    """Return a line a source and kind of fault, with the versions, lies first: those of all versions that are known."""
    found: dict[tuple[str, str], list[tuple[int, FaultStatus]]] = {}
    for entry in versions:
        for fault in entry.faults:
            if not fault.lie and entry.policy_version not in shown:
                continue
            found.setdefault((fault.source, fault.reason), []).append((entry.policy_version, fault))
    ordered = sorted(found.values(), key=lambda seen: (not seen[0][1].lie, -max(f.named_by for _, f in seen)))
    lines: list[RenderableType] = [_fault_line(seen) for seen in ordered[:SHOWN_FAULTS]]
    left_out = len(ordered) - SHOWN_FAULTS + sum(entry.faults_left_out for entry in versions)
    if len(ordered) > SHOWN_FAULTS or any(entry.faults_left_out for entry in versions):
        lines.append(Text(f"  and {max(1, left_out)} more sources at fault (--json)", style="dim"))
    return lines


def _fault_line(seen: Sequence[tuple[int, FaultStatus]]) -> Text:
    fault = seen[0][1]
    source = fault.source if "://" in fault.source else short_peer(fault.source)
    versions = ", ".join(f"v{version}" for version in sorted({version for version, _ in seen}))
    named_by = max(fault.named_by for _, fault in seen)
    words = f"{'liar' if fault.lie else 'failed'}: {source} {spaced(fault.reason)}, named by {named_by} ({versions})"
    return literal(words, style="red" if fault.lie else "dim")
