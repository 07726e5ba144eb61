"""Scenarios drawn from a seed: small runs of all shapes, in which something goes wrong every few seconds."""

import random

from echo_coordinator.simulate.scenario import LIAR_KINDS, Faults, LiarKind, Scenario, Swarm, TrainerModel
from echo_coordinator.state.audit_settings import AuditSettings
from echo_coordinator.state.standing_settings import StandingSettings
from echo_coordinator.state.work_settings import WorkSettings


def drawn_scenario(seed: int, *, duration_s: float = 240.0) -> Scenario:
    """Return the scenario of a seed; all that differs between two of them follows from it."""
    draws = random.Random(f"scenario {seed}")
    nodes = draws.randint(2, 12)
    return Scenario(
        seed=seed,
        duration_s=duration_s,
        swarm=_swarm(draws, nodes),
        trainer=TrainerModel(
            step_s=draws.choice((1.0, 4.0, 15.0)), publish_s=draws.choice((0.1, 2.0)), reward=draws.choice((0.2, 0.5))
        ),
        work=_work(draws),
        audits=AuditSettings(
            share=draws.choice((0.0, 0.02, 0.3)),
            action=draws.choice(("quarantine", "quarantine", "warn")),
            suspend_s=draws.choice((5.0, 60.0)),
        ),
        standing=StandingSettings(unproven_share=draws.choice((0.0, 0.25, 0.25, 1.0))),
        eval_every=draws.choice((0, 0, 3)),
        eval_prompts=10,
        faults=_faults(draws, nodes),
    )


def _swarm(draws: random.Random, nodes: int) -> Swarm:
    slowest = draws.choice((20.0, 100.0))
    return Swarm(
        nodes=nodes,
        speed=(slowest, slowest * draws.choice((1.0, 3.0, 10.0))),
        places=draws.choice((1, 4, 16)),
        tokens=draws.choice((20.0, 60.0)),
        spread=draws.choice((0.0, 0.5, 1.0)),
        fetch_s=draws.choice((0.1, 3.0)),
        load_s=draws.choice((0.1, 1.0)),
    )


def _work(draws: random.Random) -> WorkSettings:
    staleness = draws.choice((0, 1, 1, 2, 4))
    return WorkSettings(
        mode="async" if staleness else "sequential",
        max_staleness=staleness,
        group_size=draws.choice((2, 4, 8)),
        groups_per_update=draws.choice((1, 3, 8)),
        max_attempts=draws.choice((2, 3, 5)),
        no_signal=draws.choice(("keep", "replace")),
        max_tokens=128,
        lease_s=draws.choice((10.0, 30.0)),
        lease_max_s=draws.choice((60.0, 300.0)),
        lease_target_s=draws.choice((3.0, 10.0)),
        probe_members=draws.choice((1, 4)),
        beat_s=draws.choice((1.0, 3.0)),
        max_in_flight_per_peer=draws.choice((16, 4096)),
        retain_updates=draws.choice((1, 8)),
    )


def _faults(draws: random.Random, nodes: int) -> Faults:
    """Each fault is there in about half of the scenarios."""

    def some(*values: float) -> float:
        return draws.choice((0.0,) * len(values) + values)

    liars: dict[LiarKind, int] = {}
    for _ in range(draws.choice((0, nodes // 4, nodes // 2))):
        kind = draws.choice(LIAR_KINDS)
        liars[kind] = liars.get(kind, 0) + 1
    return Faults(
        delay_s=some(0.02, 0.3),
        loss=some(0.01, 0.1),
        duplicate=some(0.02, 0.2),
        partitions=some(30, 100),
        partition_s=draws.choice((5.0, 30.0)),
        deaths=some(10, 60),
        absent_s=draws.choice((5.0, 60.0)),
        crashes=some(30, 120),
        down_s=draws.choice((0.5, 10.0)),
        pauses=some(20),
        full_disks=some(30, 100),
        trainer_failures=some(0.1, 0.3),
        unscorable=some(0.01, 0.1),
        skew_s=some(5.0, 100.0),
        drift=some(0.01, 0.1),
        disk_s=some(0.005, 0.2),
        liars=liars,
    )
