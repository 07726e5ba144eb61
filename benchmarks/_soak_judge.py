"""What the looks of the soak benchmark say: slopes, who is shown that is gone, whether throughput follows the peers."""

import math
import os
import statistics
from collections.abc import Sequence
from typing import Any

Look = dict[str, Any]
HOUR_S = 3600.0
CORRELATION = 0.7
"""Of a minute's accepted completions with the mean number of live nodes."""
CALM_LOAD = 12.5
"""For each core. In minutes with more than that, what others compute decides how much is sampled."""
RSS_MB_PER_HOUR, RSS_SHARE_PER_HOUR = 5.0, 0.03
"""What memory may seem to grow: whichever is more."""
HANDLES = 3
"""What the fitted number of open files may rise in the window."""
FOLDER_MB_PER_HOUR = 2.0
"""For each part of a folder that is no history."""


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the straight line of least squares through (seconds, value), a second; 0 for one point."""
    if len(points) < 2:
        return 0.0
    mean_x, mean_y = (statistics.fmean(values) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Pearson's, or None where one side never changes."""
    if len(pairs) < 3:
        return None
    xs, ys = zip(*pairs, strict=True)
    if len(set(xs)) == 1 or len(set(ys)) == 1:
        return None
    found = statistics.correlation(xs, ys)
    return None if math.isnan(found) else round(found, 3)


def late(looks: Sequence[Look], share: float) -> list[Look]:
    """Return the looks of the last part of the time."""
    first_s = looks[-1]["at_s"] * (1 - share)
    return [look for look in looks if look["at_s"] >= first_s]


def processes(looks: Sequence[Look], who: str) -> dict[str, Any]:
    """Return for each process of a family how its memory and its handles went."""
    found: dict[str, Any] = {}
    for kind in sorted({kind for look in looks for kind in look[who]}):
        there = [look for look in looks if kind in look[who]]
        rss = [(look["at_s"], look[who][kind]["rss_mb"]) for look in there]
        handles = [(look["at_s"], float(look[who][kind]["handles"])) for look in there]
        threads = [look[who][kind]["threads"] for look in there]
        window_s = rss[-1][0] - rss[0][0]
        found[kind] = {
            "rss_mb": {"first": rss[0][1], "last": rss[-1][1], "most": max(value for _, value in rss)},
            "rss_mb_per_hour": round(slope(rss) * HOUR_S, 2),
            "handles": {"first": int(handles[0][1]), "last": int(handles[-1][1])},
            "handles_risen": round(slope(handles) * window_s, 1),
            "threads": {"least": min(threads), "most": max(threads)},
        }
    return found


def folders(looks: Sequence[Look], which: str) -> dict[str, Any]:
    """Return for each part of a folder how its bytes went."""
    found: dict[str, Any] = {}
    for part in sorted({part for look in looks for part in look[which]}):
        sizes = [(look["at_s"], look[which].get(part, 0) / 1e6) for look in looks]
        found[part] = {
            "mb": {"first": round(sizes[0][1], 3), "last": round(sizes[-1][1], 3), "most": round(max(sizes)[1], 3)},
            "mb_per_hour": round(slope(sizes) * HOUR_S, 3),
        }
    return found


def throughput(minutes: Sequence[Look]) -> dict[str, Any]:
    """Return how a minute's accepted completions go with the nodes alive in it."""
    pairs = [(minute["alive"], minute["accepted_per_s"]) for minute in minutes]
    rates = [rate / alive for alive, rate in pairs if alive]
    most = CALM_LOAD * (os.cpu_count() or 1)
    calm = [pair for pair, minute in zip(pairs, minutes, strict=True) if minute["load"] < most]
    return {
        "correlation": correlation(pairs),
        "calm": {"load_below": most, "minutes": len(calm), "correlation": correlation(calm)},
        "per_node_per_s": {
            "mean": round(statistics.fmean(rates), 3),
            "deviation": round(statistics.pstdev(rates), 3),
            "of_the_first_half": round(statistics.fmean(rates[: len(rates) // 2 or 1]), 3),
            "of_the_second_half": round(statistics.fmean(rates[len(rates) // 2 :]), 3),
        },
    }


def by_minute(looks: Sequence[Look]) -> list[Look]:
    """Return means over each whole minute, and what the look at its end saw."""
    found: list[Look] = []
    before = looks[0]
    for number in range(1, int(looks[-1]["at_s"] // 60) + 1):
        within = [look for look in looks if 60 * (number - 1) < look["at_s"] <= 60 * number]
        if not within:
            continue
        last, seconds = within[-1], within[-1]["at_s"] - before["at_s"]
        found.append(
            {
                "minute": number,
                "alive": round(statistics.fmean(look["alive"] for look in within), 2),
                "live_in_status": round(statistics.fmean(look["live_in_status"] for look in within), 2),
                "in_dht": last["in_dht"],
                "listed": last["listed"],
                "accepted_per_s": round((last["accepted"] - before["accepted"]) / seconds, 2) if seconds else 0.0,
                "version": last["version"],
                "load": last["load"],
                "coordinator_rss_mb": {kind: p["rss_mb"] for kind, p in last["coordinator"].items()},
                "coordinator_handles": {kind: p["handles"] for kind, p in last["coordinator"].items()},
                "node_rss_mb": {kind: p["rss_mb"] for kind, p in last["node"].items()},
                "node_handles": {kind: p["handles"] for kind, p in last["node"].items()},
                "run_mb": round(sum(last["run_folder"].values()) / 1e6, 2),
                "node_mb": round(sum(last["node_folder"].values()) / 1e6, 2),
                "status_ms": round(max(look["status_ms"] for look in within), 1),
                "status_bytes": last["status_bytes"],
            }
        )
        before = last
    return found


def complaints(figures: dict[str, Any], history: Sequence[str]) -> list[str]:
    """Return what is not as it should be."""
    found: list[str] = []
    for who in ("coordinator", "node"):
        for kind, seen in figures[who].items():
            allowed = max(RSS_MB_PER_HOUR, RSS_SHARE_PER_HOUR * seen["rss_mb"]["first"])
            if seen["rss_mb_per_hour"] > allowed:
                found.append(f"{who}'s {kind} grows by {seen['rss_mb_per_hour']} MB an hour")
            if seen["handles_risen"] > HANDLES:
                found.append(f"{who}'s {kind} opened {seen['handles_risen']} more files")
    for which in ("run_folder", "node_folder"):
        found += [
            f"{which}: {part} grows by {seen['mb_per_hour']} MB an hour"
            for part, seen in figures[which].items()
            if part not in history and seen["mb_per_hour"] > FOLDER_MB_PER_HOUR
        ]
    seen = figures["throughput"]
    follows = seen["correlation"] if seen["calm"]["correlation"] is None else seen["calm"]["correlation"]
    if follows is not None and follows < CORRELATION:
        found.append(f"throughput does not follow the peers: correlation {follows}")
    return found
