"""From a scenario that fails to a small one that fails in the same way.

Greedy: of all simpler variants, the first that breaks the same invariant is the new one, until none does. Each is cut
off shortly after its failure, so that trying gets cheaper as it goes.
"""

import time
from collections.abc import Callable, Iterator

from echo_coordinator.simulate.scenario import Faults, Scenario
from echo_coordinator.simulate.world import Outcome, simulate

TAIL_S = 2.0
"""Kept after the moment of the failure."""

Run = Callable[[Scenario], Outcome]


def shrink(failed: Outcome, *, limit_s: float = 60.0, run: Run = simulate) -> Outcome:
    """Return the outcome of the smallest scenario found within `limit_s` of real time; `failed` must have a failure."""
    assert failed.failure is not None, "only failures are shrunk"
    until = time.monotonic() + limit_s
    best, invariant = failed, failed.failure.invariant
    found = True
    while found and time.monotonic() < until:
        found = False
        for scenario in simpler(_cut_off(best)):
            if time.monotonic() >= until:
                break
            outcome = run(scenario)
            if outcome.failure is not None and outcome.failure.invariant == invariant:
                best, found = outcome, True
                break
    cut = run(_cut_off(best))
    return cut if cut.failure is not None and cut.failure.invariant == invariant else best


def _cut_off(outcome: Outcome) -> Scenario:
    assert outcome.failure is not None
    return outcome.scenario.model_copy(update={"duration_s": outcome.failure.at_s + TAIL_S})


def simpler(scenario: Scenario) -> Iterator[Scenario]:
    """Yield variants with less in them, those that save most first."""
    yield from _fewer_nodes(scenario)
    yield from _fewer_faults(scenario)
    yield from _less_work(scenario)


def _fewer_nodes(scenario: Scenario) -> Iterator[Scenario]:
    nodes = scenario.swarm.nodes
    for fewer in sorted({nodes // 4, nodes // 2, nodes - 1} - {0, nodes}):
        yield scenario.model_copy(update={"swarm": scenario.swarm.model_copy(update={"nodes": fewer})})


def _fewer_faults(scenario: Scenario) -> Iterator[Scenario]:
    faults, none = scenario.faults, Faults()
    for name in Faults.model_fields:
        if name not in ("liars", "partition_s", "absent_s", "down_s") and getattr(faults, name) != getattr(none, name):
            yield _with_faults(scenario, {name: getattr(none, name)})
    for kind in faults.liars:
        yield _with_faults(scenario, {"liars": {k: n for k, n in faults.liars.items() if k != kind}})
    for kind, count in faults.liars.items():
        if count > 1:
            yield _with_faults(scenario, {"liars": {**faults.liars, kind: count // 2}})


def _with_faults(scenario: Scenario, changes: dict[str, object]) -> Scenario:
    return scenario.model_copy(update={"faults": scenario.faults.model_copy(update=changes)})


def _less_work(scenario: Scenario) -> Iterator[Scenario]:
    if scenario.eval_every:
        yield scenario.model_copy(update={"eval_every": 0})
    work = scenario.work
    for name, least in (("groups_per_update", 1), ("group_size", 2), ("max_staleness", 1)):
        if (value := getattr(work, name)) > least:
            # Some settings go with others; a variant that cannot be is no variant.
            changed = work.model_copy(update={name: max(least, value // 2), "min_group_members": None})
            yield scenario.model_copy(update={"work": changed})
    if scenario.swarm.spread:
        yield scenario.model_copy(update={"swarm": scenario.swarm.model_copy(update={"spread": 0.0})})
