"""Many seeds of the simulator, and how near its figures are to a real run's.

    python -m benchmarks.simulate_sweep [--seeds N] [--first SEED] [--minutes M] [--quick]

1. Sweep: each seed draws a small run (2 to 12 nodes, all modes and bounds) and what goes wrong in it: loss, duplicates,
   partitions, deaths, kills of the coordinator, full disks, clocks, failing trainers and verifiers, liars of ten kinds.
   All invariants are looked at after every answer. A failure is shrunk and reported with its scenario.
2. Speed: simulated hours of 100 nodes in real seconds on one core.
3. Fidelity: the settings of `benchmarks.async_utilisation` simulated, beside the figures that it measured with the real
   coordinator, real nodes and real time (benchmarks/results/async_utilisation.json).
"""

import argparse
import json
import sys
import time
from collections import Counter
from typing import Any

from benchmarks._report import RESULTS, write_report
from benchmarks.async_utilisation import FULL, MEAN_S, PLACES
from echo_coordinator.simulate.scenario import Scenario, Swarm, TrainerModel, faults_named
from echo_coordinator.simulate.shrink import shrink
from echo_coordinator.simulate.sweep import drawn_scenario
from echo_coordinator.simulate.world import simulate
from echo_coordinator.state.audit_settings import AuditSettings
from echo_coordinator.state.work_settings import WorkSettings

WARM_UP = 2
"""Updates before the window that both sides count, which runs from the end of one update to the end of another."""
TOKENS_A_SECOND = 100.0
"""Of one place; a completion's length stands for its time, so any value does."""


def main() -> None:
    """Run all three and write benchmarks/results/simulate_sweep.json (with --quick: print only)."""
    parser = argparse.ArgumentParser(description="Many seeds of the simulator, its speed, its fidelity.")
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    parser.add_argument("--minutes", type=float, default=4.0, help="simulated time of each")
    parser.add_argument("--quick", action="store_true", help="ten seeds of a minute: shows that it works, no more")
    asked = parser.parse_args()
    seeds, minutes = (10, 1.0) if asked.quick else (asked.seeds, asked.minutes)
    figures = {
        "sweep": sweep(range(asked.first, asked.first + seeds), minutes),
        "speed": [speed(faults, 0.02 if asked.quick else 0.25) for faults in ("none", "home")],
        "fidelity": fidelity(20.0 if asked.quick else 60.0),
    }
    if asked.quick:
        print(json.dumps(figures, indent=2))
    else:
        write_report("simulate_sweep", figures)
    if figures["sweep"]["failures"]:
        sys.exit("an invariant broke; see the scenarios above")


def sweep(seeds: range, minutes: float) -> dict[str, Any]:
    """Simulate each seed and return what was looked at and what broke."""
    began, steps, events, updates, trained = time.process_time(), 0, 0, 0, 0
    verdicts: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    for seed in seeds:
        outcome = simulate(drawn_scenario(seed, duration_s=60 * minutes))
        steps, events = steps + outcome.steps, events + outcome.events
        if outcome.figures is not None:
            updates, trained = updates + outcome.figures.updates, trained + outcome.figures.trained
            verdicts.update(outcome.figures.verdicts)
            dropped.update({f"group: {cause}": n for cause, n in outcome.figures.dropped_groups.items()})
            dropped.update({f"slot: {cause}": n for cause, n in outcome.figures.dropped_slots.items()})
        if outcome.failure is not None:
            small = shrink(outcome)
            assert small.failure is not None
            told = {"seed": seed, "invariant": small.failure.invariant, "detail": small.failure.detail}
            failures.append({**told, "scenario": small.scenario.model_dump(mode="json")})
            print(f"seed {seed}: {told}", file=sys.stderr)
        if (seed + 1 - seeds.start) % 25 == 0:
            print(f"{seed + 1 - seeds.start} of {len(seeds)} seeds, {len(failures)} failures", file=sys.stderr)
    return {
        "seeds": [seeds.start, seeds.stop - 1],
        "simulated_hours": round(len(seeds) * minutes / 60, 2),
        "cpu_s": round(time.process_time() - began, 1),
        "times_all_invariants_were_checked": steps,
        "events": events,
        "updates": updates,
        "completions_trained": trained,
        "verdicts": dict(verdicts.most_common()),
        "dropped": dict(dropped.most_common()),
        "failures": failures,
    }


def speed(faults: str, hours: float) -> dict[str, Any]:
    """Return how long a simulated hour of a hundred nodes takes."""
    print(f"speed with faults {faults} ...", file=sys.stderr)
    scenario = Scenario(duration_s=3600 * hours, swarm=Swarm(nodes=100), faults=faults_named(faults, 100))
    began = time.process_time()
    outcome = simulate(scenario, every_step=False)
    cpu_s = time.process_time() - began
    return {
        "faults": faults,
        "nodes": 100,
        "simulated_hours": hours,
        "cpu_s": round(cpu_s, 1),
        "cpu_s_per_simulated_hour": round(cpu_s / hours, 1),
        "events": outcome.events,
    }


def fidelity(seconds: float) -> list[dict[str, Any]]:
    """Simulate the regimes of `async_utilisation` and return both sides' figures."""
    measured = json.loads((RESULTS / "async_utilisation.json").read_text(encoding="utf-8"))["figures"]["regimes"]
    rows: list[dict[str, Any]] = []
    for name, regime in FULL.items():
        for real in measured[name]["runs"]:
            print(f"fidelity: {name}, max_staleness {real['max_staleness']} ...", file=sys.stderr)
            rows.append({"regime": name, **_beside(name, regime.slower, real, seconds)})
    return rows


def _beside(name: str, slower: float, real: dict[str, Any], seconds: float) -> dict[str, Any]:
    scale, bound = FULL[name].scale, real["max_staleness"]
    scenario = Scenario(
        duration_s=seconds,
        swarm=Swarm(
            nodes=len(MEAN_S),
            speeds=tuple(PLACES / (slower * mean_s) * TOKENS_A_SECOND for mean_s in MEAN_S),
            places=PLACES,
            tokens=TOKENS_A_SECOND,
            spread=0.5,
            fetch_s=0.15,
            load_s=0.01,
        ),
        trainer=TrainerModel(step_s=scale.step_s, publish_s=0.1),
        work=WorkSettings(
            mode="async" if bound else "sequential",
            max_staleness=bound,
            group_size=scale.group_size,
            groups_per_update=scale.groups_per_update,
            max_tokens=2000,
            beat_s=1.0,
        ),
        audits=AuditSettings(share=0.0),
    )
    outcome = simulate(scenario, every_step=False)
    figures, ends = outcome.figures, outcome.updated_at_s[WARM_UP - 1 :]
    assert figures is not None
    per_minute = 60 * (len(ends) - 1) / (ends[-1] - ends[0])
    return {
        "max_staleness": bound,
        "busy_measured": real["status_busy_share"],
        "busy_simulated": round(figures.trainer_busy, 3),
        "updates_per_min_measured": real["updates_per_min"],
        "updates_per_min_simulated": round(per_minute, 1),
        "updates_difference": round(per_minute / real["updates_per_min"] - 1, 3),
        "lag_mean_measured": _mean(real["staleness"]),
        "lag_mean_simulated": round(figures.lag_mean, 2),
    }


def _mean(lags: dict[str, int]) -> float:
    return round(sum(int(lag) * count for lag, count in lags.items()) / max(1, sum(lags.values())), 2)


if __name__ == "__main__":
    main()
