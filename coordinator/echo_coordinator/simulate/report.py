"""An outcome for people: a table within 80 columns, and what limits the run."""

import textwrap
from collections.abc import Mapping
from typing import Any

from echo_coordinator.simulate.figures import Figures
from echo_coordinator.simulate.scenario import Scenario
from echo_coordinator.simulate.world import Outcome

WIDTH = 80
BUSY = 0.95
"""A trainer that works for this share of the time is as good as never idle."""
_LABEL = 22


def lines(outcome: Outcome) -> list[str]:
    """Return the report of an outcome without a failure."""
    figures, scenario = outcome.figures, outcome.scenario
    head = (
        f"{outcome.simulated_s / 3600:.3g} simulated hours, {scenario.swarm.nodes} nodes, seed {scenario.seed}, in "
        f"{outcome.wall_s:.1f} s"
    )
    if figures is None:
        return [head, "The coordinator was away at the end: no figures."]
    rows = [
        ("updates", f"{figures.updates}, {figures.updates_per_hour:.4g} an hour"),
        ("trainer busy", f"{figures.trainer_busy:.1%} of the time since its first batch"),
        ("trainer waits for", _shares(figures.waited)),
        ("nodes busy", f"{figures.nodes_busy:.1%} of their places' time"),
        ("samples accepted", f"{figures.samples_per_s:.4g} a second; the trainer can use "
         f"{figures.samples_needed_per_s:.4g}"),
        ("lag in versions", f"mean {figures.lag_mean:.2f}, "
         + ", ".join(f"{name} {lag}" for name, lag in figures.lag_percentiles.items())),
        ("trained", f"{figures.trained} completions, {figures.aged} more too old"),
        ("verdicts", _shares(_of_all(figures.verdicts))),
        ("dropped groups", _shares({k: n / max(1, figures.groups) for k, n in figures.dropped_groups.items()})),
        ("slots tried again", _counts(figures.dropped_slots)),
        ("dropped by nodes", f"{figures.dropped_by_nodes} completions, as too old to push"),
        ("failed audits", str(figures.audits_failed)),
        ("coordinator killed", f"{figures.crashes} times"),
    ]  # fmt: skip
    shown = [wrapped for label, text in rows if text for wrapped in _row(label, text)]
    told = textwrap.wrap(advice(scenario, figures), WIDTH)
    return [head, "", *shown, "", *told]


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain values, as `--json` prints it."""
    figures, failure = outcome.figures, outcome.failure
    return {
        "figures": None if figures is None else _plain(figures),
        "advice": "" if figures is None else advice(outcome.scenario, figures),
        "failure": None if failure is None else _plain(failure),
        "digest": outcome.digest,
        "simulated_s": outcome.simulated_s,
        "wall_s": round(outcome.wall_s, 3),
        "scenario": outcome.scenario.model_dump(mode="json"),
    }


def advice(scenario: Scenario, figures: Figures) -> str:
    """Return what limits the run, and what would help."""
    if not figures.updates:
        return "No update came about: simulate for longer (--hours), or look at what the nodes' work was refused for."
    waits = figures.waited.get("sampling", 0.0) + figures.waited.get("no_nodes", 0.0)
    if figures.trainer_busy >= BUSY:
        if figures.nodes_busy < 0.7:
            enough = max(1, round(scenario.swarm.nodes * figures.nodes_busy / 0.9))
            return (
                f"The trainer limits: it is busy {figures.trainer_busy:.0%} of the time, and the nodes only "
                f"{figures.nodes_busy:.0%}. About {enough} such nodes would do; or train on more groups an update."
            )
        return "Nothing is wasted: trainer and nodes are both busy nearly all the time."
    if figures.waited.get("publishing", 0.0) > max(waits, 0.05):
        share = figures.waited["publishing"]
        return f"Publication limits: the trainer waits for it {share:.0%} of the time. Make versions smaller or rarer."
    if scenario.work.max_staleness == 0:
        return (
            f"Sequential: the trainer waits {1 - figures.trainer_busy:.0%} of the time while nodes sample for it. "
            "Faster or more nodes shorten that; asynchronously (--max-staleness 1 or more) both work at once."
        )
    if figures.nodes_busy >= 0.6:
        more = max(1, round(scenario.swarm.nodes * (1 / max(0.05, figures.trainer_busy) - 1)))
        return (
            f"Sampling limits: the trainer waits for samples {waits:.0%} of the time with the nodes "
            f"{figures.nodes_busy:.0%} busy. Add about {more} such nodes, or train on fewer groups an update."
        )
    return (
        f"Neither side is busy: the trainer waits for samples {waits:.0%} of the time, the nodes are busy only "
        f"{figures.nodes_busy:.0%}. Nodes wait for room below max_staleness = {scenario.work.max_staleness}: raise it, "
        "or shorten completions and the time that nodes take to fetch and load a version."
    )


def _row(label: str, text: str) -> list[str]:
    indent = " " * _LABEL
    return textwrap.wrap(text, WIDTH, initial_indent=f"{label:{_LABEL}}", subsequent_indent=indent)


def _shares(parts: Mapping[str, float]) -> str:
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {share:.1%}" for name, share in ordered if share)


def _counts(parts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(parts.items(), key=lambda item: -item[1]))


def _of_all(counts: Mapping[str, int]) -> dict[str, float]:
    return {name: count / max(1, sum(counts.values())) for name, count in counts.items()}


def _plain(found: Any) -> dict[str, Any]:
    return {name: getattr(found, name) for name in found.__dataclass_fields__}
