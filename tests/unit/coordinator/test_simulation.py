"""The simulator: time that jumps, the same run for the same seed, invariants that catch what is planted."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from echo_coordinator.simulate.report import WIDTH, lines
from echo_coordinator.simulate.scenario import Faults, Scenario, Swarm, TrainerModel, faults_named
from echo_coordinator.simulate.shrink import shrink
from echo_coordinator.simulate.sweep import drawn_scenario
from echo_coordinator.simulate.virtual_time import NothingLeft, run_virtually
from echo_coordinator.simulate.world import Outcome, simulate
from echo_coordinator.state import groups, intake, intake_rules, selection, updates
from echo_coordinator.state.counters import Counters
from echo_coordinator.state.leases import LeaseBook
from echo_coordinator.state.work_settings import WorkSettings
from echo_swarm.errors import UsageError

SMALL = WorkSettings(max_staleness=1, group_size=4, groups_per_update=2, max_tokens=64, lease_s=10, lease_target_s=5)


def small(**changes: Any) -> Scenario:
    """Four nodes, an update every few seconds, a minute."""
    values: dict[str, Any] = dict(
        seed=3,
        duration_s=60.0,
        swarm=Swarm(nodes=4, speed=(50, 100), places=2, tokens=20, fetch_s=0.5, load_s=0.1),
        trainer=TrainerModel(step_s=2.0, publish_s=0.2),
        work=SMALL,
    )
    return Scenario(**{**values, **changes})


def test_an_hour_of_sleeping_takes_no_time() -> None:
    async def main() -> float:
        with anyio.move_on_after(7200) as scope:
            await anyio.sleep(3600)
            await asyncio.get_running_loop().create_future()
        assert scope.cancelled_caught
        return asyncio.get_running_loop().time()

    assert run_virtually(main) == pytest.approx(7200)


def test_tasks_that_wait_for_each_other_end_the_simulation() -> None:
    async def main() -> None:
        await anyio.Event().wait()

    with pytest.raises(NothingLeft, match="no task can go on"):
        run_virtually(main)


def test_a_small_run_without_faults_trains_and_loses_nothing() -> None:
    outcome = simulate(small())
    assert outcome.failure is None and outcome.figures is not None
    assert outcome.simulated_s == 60 and outcome.steps > 100
    assert outcome.figures.updates > 5 and outcome.figures.trained > 40
    assert set(outcome.figures.verdicts) == {"accepted"}
    assert outcome.figures.lag_percentiles["max"] <= SMALL.max_staleness


def test_the_sequential_mode_trains_on_the_present_policy_alone() -> None:
    work = SMALL.model_copy(update={"mode": "sequential", "max_staleness": 0})
    figures = simulate(small(work=work)).figures
    assert figures is not None and figures.updates > 3
    assert figures.lag_percentiles["max"] == 0 and figures.trainer_busy < 0.9


def test_the_same_scenario_is_the_same_run_and_another_seed_is_another() -> None:
    hostile = drawn_scenario(7, duration_s=60)
    first, again = simulate(hostile), simulate(hostile)
    assert first.digest == again.digest and first.figures == again.figures
    # How often the invariants are looked at changes nothing.
    assert simulate(hostile, every_step=False).digest == first.digest
    assert simulate(hostile.model_copy(update={"seed": 8})).digest != first.digest


def test_the_run_does_not_depend_on_how_bytes_hash() -> None:
    program = (
        "from echo_coordinator.simulate.world import simulate\n"
        "from echo_coordinator.simulate.sweep import drawn_scenario\n"
        "print(*[simulate(drawn_scenario(seed, duration_s=60)).digest for seed in (2, 9, 10)])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "4242"}
    elsewhere = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    here = [simulate(drawn_scenario(seed, duration_s=60)).digest for seed in (2, 9, 10)]
    assert elsewhere.stdout.split() == here


@pytest.mark.parametrize("seed", range(12))
def test_nothing_breaks_whatever_goes_wrong(seed: int) -> None:
    outcome = simulate(drawn_scenario(seed, duration_s=90))
    assert outcome.failure is None, (outcome.failure, outcome.scenario.model_dump_json())


# Planted faults: each decider made wrong in one way must be found out.


def broken(scenario: Scenario) -> Outcome:
    outcome = simulate(scenario)
    assert outcome.failure is not None, "the planted fault was not found"
    return outcome


def in_hostile_hands(**faults: Any) -> Scenario:
    return small(faults=Faults(delay_s=0.05, **faults))


def test_a_replay_that_is_accepted_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "_is_free", lambda group, member, lease_id: group.state == "active")
    monkeypatch.setattr(intake, "work_digest", lambda trajectory: os.urandom(16))
    real: Callable[..., Any] = intake.Intake._decide

    def forgetful(self: intake.Intake, peer: Any, trajectory: Any, past: Any, plan: Any) -> Any:
        lease = self._leases.get(trajectory.lease_id)
        if lease is not None:
            lease.verdicts.pop(trajectory.member, None)
        return real(self, peer, trajectory, past, plan)

    monkeypatch.setattr(intake.Intake, "_decide", forgetful)
    failure = broken(in_hostile_hands(liars={"replay": 2})).failure
    assert failure and failure.invariant in ("conserved", "no_lies")


def test_staleness_that_is_not_looked_at_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups.Group, "is_aged", lambda self, member, current, most: False)
    monkeypatch.setattr(intake_rules, "is_fresh", lambda current, oldest, most: True)
    slow = Swarm(nodes=6, speed=(2, 100), places=4, tokens=30, fetch_s=5.0, load_s=0.1)
    failure = broken(small(swarm=slow, duration_s=300.0)).failure
    assert failure and failure.invariant == "fresh"


def test_a_lie_that_is_accepted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_rules, "_sampling", lambda trajectory, demand, seed: None)
    failure = broken(in_hostile_hands(liars={"wrong_prompt": 1})).failure
    assert failure and failure.invariant == "no_lies"


def test_a_lease_that_is_lost_with_its_slot_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = LeaseBook.release

    def loses(self: LeaseBook, peer: Any, lease_ids: Any, *rest: Any, **named: Any) -> Any:
        for lease in list(self.all()):
            if lease.peer == peer and lease.outstanding:
                lease.outstanding.clear()
        return real(self, peer, lease_ids, *rest, **named)

    monkeypatch.setattr(LeaseBook, "drop_unnamed", lambda self, peer, named, now: loses(self, peer, (), "x", now))
    failure = broken(small()).failure
    assert failure and failure.invariant == "leases"


def test_leases_that_never_end_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseBook, "expire", lambda self, now, alone=True: [])
    monkeypatch.setattr(LeaseBook, "lose", lambda self, peer, now: [])
    failure = broken(in_hostile_hands(deaths=200.0, absent_s=200.0)).failure
    assert failure and failure.invariant == "deadlines"


def test_a_grant_beyond_the_allowance_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseBook, "share", lambda self, peer, capacity, tokens_per_s, alone, now: capacity)
    failure = broken(in_hostile_hands(liars={"hoarder": 1})).failure
    assert failure and failure.invariant == "in_flight"


def test_an_acceptance_that_is_not_counted_for_its_node_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Counters.add

    def forgetful(self: Counters, scope: str, name: str, count: int = 1) -> None:
        if not (scope.startswith("12D3") and self.get(scope, name) == 5):
            real(self, scope, name, count)

    monkeypatch.setattr(Counters, "add", forgetful)
    failure = broken(small()).failure
    assert failure and failure.invariant == "told"


def test_an_update_that_is_not_written_down_is_found_after_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates.rows, "insert_update", lambda db, record, group_ids: None)
    failure = broken(in_hostile_hands(crashes=400.0, down_s=1.0)).failure
    assert failure and failure.invariant in ("bounded", "trained_once", "monotonic")


def test_a_run_that_stands_still_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection.Selector, "take", lambda self, groups: [])
    failure = broken(small(duration_s=3600.0)).failure
    assert failure and failure.invariant == "progress"


def test_a_failure_shrinks_to_a_scenario_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_rules, "_sampling", lambda trajectory, demand, seed: None)
    faults = faults_named("hostile", 20).model_copy(update={"liars": {"wrong_prompt": 3, "hoarder": 2, "early": 1}})
    scenario = small(swarm=Swarm(nodes=20, places=2, tokens=20), faults=faults)
    found = shrink(broken(scenario), limit_s=30)
    assert found.failure and found.failure.invariant == "no_lies" and found.failure.led_up
    assert found.scenario.swarm.nodes <= 4 and found.scenario.duration_s < 30
    left = found.scenario.faults
    assert left.liars == {"wrong_prompt": 1} and not (left.loss or left.deaths or left.crashes or left.partitions)
    again = simulate(Scenario.model_validate_json(found.scenario.model_dump_json()))
    assert again.failure and again.failure.detail == found.failure.detail


# For people.


def test_the_report_fits_eighty_columns_and_says_what_limits() -> None:
    slow = Swarm(nodes=4, speed=(10, 10), places=2, tokens=20, spread=0, fetch_s=0.5, load_s=0.1)
    work = SMALL.model_copy(update={"max_staleness": 4})
    shown = lines(simulate(small(swarm=slow, work=work, trainer=TrainerModel(step_s=2.0)), every_step=False))
    assert max(map(len, shown)) <= WIDTH
    text = " ".join(shown)
    assert "trainer waits for" in text and "Sampling limits" in text
    shown = lines(simulate(small(trainer=TrainerModel(step_s=20.0)), every_step=False))
    assert "The trainer limits" in " ".join(shown)


def test_unknown_faults_are_named() -> None:
    with pytest.raises(UsageError, match="choose none, home or hostile"):
        faults_named("awful", 4)


def test_importing_the_simulator_brings_no_torch() -> None:
    program = "import sys, echo_coordinator.commands.simulate; print('torch' in sys.modules, 'hivemind' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert said.stdout.split() == ["False", "False"]
