"""How busy the trainer is, sequentially and asynchronously, beside what the capacity rule predicts.

    python -m benchmarks.async_utilisation [--quick]

The coordinator's real wiring and eight real nodes on an in-memory network in one process. The nodes' scripted engines
sleep for lognormal times, differently long on each node; the trainer sleeps for a fixed time an update; rewards are
seeded coin tosses, so that one group in eight has no signal and is dropped. Three regimes:

- `enough`: the nodes' total rate suffices, and an update lasts several times as long as a completion;
- `too_slow`: the same with completions of two and a half times the length, so that the rate does not suffice;
- `short_updates`: rates as in `enough`, but an update is as short as a completion of the slowest node.

The capacity rule: the trainer never waits while Σ rateᵢ·(1 - dropᵢ) ≥ batch / step time; else it works for that share
of the time. rateᵢ is measured on each node as completions a second while it had work: it includes what swapping
weights costs (a swap drains the batch) and excludes waiting for leases, so whatever the coordinator makes a node
wait for shows as a difference between measured and predicted.
"""

import argparse
import sys
from dataclasses import asdict, dataclass
from typing import Any

import anyio

from benchmarks._report import write_report
from benchmarks._utilisation_run import Measured, Scale, measure
from echo_node.backends.options import ScriptedOptions

LONG = Scale(step_s=5.0, groups_per_update=44, group_size=4, warm_up_updates=2, window_s=20.0)
SHORT = Scale(step_s=1.0, groups_per_update=8, group_size=4, warm_up_updates=2, window_s=12.0)
QUICK = Scale(step_s=0.6, groups_per_update=5, group_size=4, warm_up_updates=1, window_s=1.2)

MEAN_S = (0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 1.0)
"""Mean time of one completion on each node."""
PLACES = 4
"""Completions at once on each node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regime:
    """Nodes and a trainer that fit together in one way."""

    scale: Scale
    slower: float = 1.0
    """Factor on the nodes' times."""
    staleness: tuple[int, ...] = (0, 1, 2, 4, 8)
    """Bounds to run; 0 is the sequential mode."""


FULL = {
    "enough": Regime(scale=LONG),
    "too_slow": Regime(scale=LONG, slower=2.5),
    "short_updates": Regime(scale=SHORT),
}
QUICK_ONLY = {"enough": Regime(scale=QUICK, slower=0.2, staleness=(0, 2))}


def main() -> None:
    """Run all and write benchmarks/results/async_utilisation.json (with --quick: print only)."""
    parser = argparse.ArgumentParser(description="Trainer utilisation, measured and predicted.")
    parser.add_argument("--quick", action="store_true", help="a few updates each: shows that it works, no more")
    quick = parser.parse_args().quick
    figures = anyio.run(_all, QUICK_ONLY if quick else FULL)
    if not quick:
        write_report("async_utilisation", figures)
    _print(figures)


async def _all(wanted: dict[str, Regime]) -> dict[str, Any]:
    return {"regimes": {name: await _regime(name, regime) for name, regime in wanted.items()}}


async def _regime(name: str, regime: Regime) -> dict[str, Any]:
    nodes = [ScriptedOptions(batch=PLACES, mean_s=regime.slower * mean_s, sigma=0.5) for mean_s in MEAN_S]
    runs: list[dict[str, Any]] = []
    for bound in regime.staleness:
        print(f"{name}: max_staleness {bound} ...", file=sys.stderr)
        runs.append(_figures(regime.scale, bound, await measure(regime.scale, bound, nodes)))
        runs[-1]["updates_per_min_vs_sequential"] = round(runs[-1]["updates_per_min"] / runs[0]["updates_per_min"], 2)
    scale = {**asdict(regime.scale), "batch": regime.scale.batch, "places_per_node": PLACES}
    return {"scale": scale, "mean_s": [node.mean_s for node in nodes], "runs": runs}


def _figures(scale: Scale, max_staleness: int, measured: Measured) -> dict[str, Any]:
    predicted = predicted_busy_share(scale, measured) if max_staleness else None
    idle_points = None if predicted is None else round(100 * (predicted - measured.busy_share), 1)
    return {
        "mode": "async" if max_staleness else "sequential",
        "max_staleness": max_staleness,
        "busy_share": round(measured.busy_share, 3),
        "predicted_busy_share": None if predicted is None else round(predicted, 3),
        "idle_measured_minus_predicted_points": idle_points,
        "status_busy_share": round(measured.status_busy_share, 3),
        "updates_per_min": round(60 * measured.updates / measured.seconds, 1),
        "updates": measured.updates,
        "seconds": round(measured.seconds, 1),
        "waiting_s": {cause: round(seconds, 2) for cause, seconds in measured.waiting_s.items()},
        "staleness": {str(lag): count for lag, count in sorted(measured.staleness.items())},
        "trained_groups": measured.trained_groups,
        "dropped_groups": measured.dropped_groups,
        "dropped_slots": measured.dropped_slots,
        "group_time_s": _quantiles(measured.group_time_s),
        "rate_needed_per_s": round(scale.batch / scale.step_s, 1),
        "rate_nominal_per_s": round(sum(node.nominal_rate for node in measured.nodes), 1),
        "rate_per_s": round(sum(node.rate for node in measured.nodes), 1),
        "starved_share_by_node": [round(node.starved_share, 3) for node in measured.nodes],
        "refused_share_by_node": [round(node.refused_share, 3) for node in measured.nodes],
    }


def _quantiles(times: tuple[float, ...]) -> dict[str, float]:
    return {f"p{share}": round(times[len(times) * share // 100], 2) for share in (10, 50, 90, 99)} if times else {}


def predicted_busy_share(scale: Scale, measured: Measured) -> float:
    """Return min(1, Σ rateᵢ·(1 - dropᵢ) / (batch / step time)).

    dropᵢ: what was refused of node i's, and of the rest the share that went into groups that were dropped.
    """
    dropped = sum(measured.dropped_groups.values())
    kept = measured.trained_groups / max(1, measured.trained_groups + dropped)
    usable = sum(node.rate * (1 - node.refused_share) * kept for node in measured.nodes)
    return min(1.0, usable / (scale.batch / scale.step_s))


def _print(figures: dict[str, Any]) -> None:
    print("\nregime         staleness   busy  predicted  idle-pred   upd/min  x seq  group p90, s   staleness seen")
    for regime, found in figures["regimes"].items():
        for run in found["runs"]:
            predicted, points = run["predicted_busy_share"], run["idle_measured_minus_predicted_points"]
            print(
                f"{regime:14} {run['max_staleness']:9} {run['busy_share']:6.1%} "
                f"{'' if predicted is None else format(predicted, '.1%'):>10} {'' if points is None else points:>10} "
                f"{run['updates_per_min']:9} {run['updates_per_min_vs_sequential']:6} "
                f"{run['group_time_s'].get('p90', ''):13}   {run['staleness']}"
            )


if __name__ == "__main__":
    main()
