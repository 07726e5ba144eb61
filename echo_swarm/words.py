"""Figures and names in the words that people read."""

from collections.abc import Sequence

from rich.text import Text

from echo_swarm.wire import clean

_BARS = "▁▂▃▄▅▆▇█"


def literal(text: str, *, style: str = "") -> Text:
    """Return text that is shown as it stands. A bare string is markup to rich, and peers write some of these."""
    return Text(clean(text), style=style)


def spaced(code: str) -> str:
    """Return a code such as `no_nodes` as people read it."""
    return code.replace("_", " ")


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
    """Return a length of time as people say it: 24 s, 1 min 5 s, 12 min, 3 h 10 min, 2 d 1 h."""
    whole = int(seconds)
    if whole < 60:
        return f"{min(59.0, seconds):.0f} s"
    if whole < 600:
        return _two(whole // 60, "min", whole % 60, "s")
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 86_400:
        return _two(whole // 3600, "h", whole % 3600 // 60, "min")
    return _two(whole // 86_400, "d", whole % 86_400 // 3600, "h")


def _two(large: int, large_unit: str, small: int, small_unit: str) -> str:
    return f"{large} {large_unit}" + (f" {small} {small_unit}" if small else "")


def size(count: int) -> str:
    """Return a number of bytes with a decimal unit."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
