"""What a simulation showed, in figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echo_coordinator.simulate.node import SimNode
from echo_coordinator.simulate.scenario import Scenario
from echo_coordinator.simulate.site import Site
from echo_coordinator.state.counters import DROPPED_GROUPS, DROPPED_SLOTS, TOTAL, WORK


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of the whole simulated time, start included."""

    hours: float
    updates: int
    updates_per_hour: float
    trainer_busy: float
    """Share of the time since the first batch."""
    waited: Mapping[str, float]
    """Share of that time by cause, the largest first."""
    nodes_busy: float
    """Share of their living time in which their places sampled, all nodes together."""
    samples_per_s: float
    """Accepted."""
    samples_needed_per_s: float
    """What a trainer that never waits consumes."""
    lag_mean: float
    lag_percentiles: Mapping[str, int]
    """Staleness of trained completions, in versions: p50, p90, p99, max."""
    trained: int
    aged: int
    """Consumed too old: counted in the baseline only."""
    verdicts: Mapping[str, int]
    dropped_groups: Mapping[str, int]
    dropped_slots: Mapping[str, int]
    dropped_by_nodes: int
    """Thrown away by nodes, as too old, before it was pushed."""
    groups: int
    """Groups that were decided: trained or dropped."""
    audits_failed: int
    crashes: int


def figures_of(scenario: Scenario, site: Site, nodes: Sequence[SimNode], seconds: float) -> Figures | None:
    """Return the figures of a simulation that has come to its end; None while the coordinator is away."""
    state, trainer = site.state, site.trainer
    if state is None or trainer is None:
        return None
    trainer.activity.stop(seconds)
    busy_s = site.busy_s + trainer.activity.busy_s
    waited_s = dict(site.waited_s)
    for cause, spent_s in trainer.activity.waited_s.items():
        waited_s[cause] = waited_s.get(cause, 0.0) + spent_s
    counted_s = max(1e-9, busy_s + sum(waited_s.values()))
    counters, lags = state.core.counters, state.updates.lags()
    trained = sum(lags.values())
    dropped = {cause: count for cause, count in counters.of(DROPPED_GROUPS).items() if count}
    work = scenario.work
    return Figures(
        hours=seconds / 3600,
        updates=state.updates.count,
        updates_per_hour=state.updates.count / seconds * 3600,
        trainer_busy=busy_s / counted_s,
        waited={cause: s / counted_s for cause, s in sorted(waited_s.items(), key=lambda item: -item[1]) if s > 0},
        nodes_busy=sum(node.busy_s for node in nodes) / max(1e-9, sum(node.alive_s for node in nodes)),
        samples_per_s=state.accepted() / seconds,
        samples_needed_per_s=work.groups_per_update * work.group_size / scenario.trainer.step_s,
        lag_mean=sum(lag * count for lag, count in lags.items()) / max(1, trained),
        lag_percentiles={name: _percentile(lags, share) for name, share in _PERCENTILES.items()},
        trained=trained,
        aged=counters.get(WORK, "aged_members"),
        verdicts={name: count for name, count in counters.of(TOTAL).items() if count},
        dropped_groups=dropped,
        dropped_slots={name: count for name, count in counters.of(DROPPED_SLOTS).items() if count},
        dropped_by_nodes=sum(node.dropped_stale for node in nodes),
        groups=counters.get(WORK, "trained_groups") + sum(dropped.values()),
        audits_failed=state.audits.report().failed,
        crashes=site.lives - 1,
    )


_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def _percentile(lags: Mapping[int, int], share: float) -> int:
    left = share * sum(lags.values())
    for lag, count in sorted(lags.items()):
        left -= count
        if left <= 0:
            return lag
    return max(lags, default=0)
