"""Processes that are killed: what is left of them, what is lost, and who goes on. Real hivemind on loopback."""

import json
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import plug_in
from tests.e2e.support.commands import DEADLINE_S, Running
from tests.e2e.support.models import write_model
from tests.e2e.support.swarm import Swarm, make_swarm

UPDATES = 6
GROUPS = 2
GONE_S = 10.0
"""Longest time for the family of a killed process to go too."""
QUICK = "scripted:mean_s=0.3,batch=4"
TORCH = "torch:threads=1,batch=4"
STEADY = "scripted:mean_s=0.5,batch=8"
SLOW = "scripted:mean_s=20,sigma=0,batch=4"
"""Always in the middle of a completion."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def swarm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Swarm:
    # Room for versions to go by while a real model samples on a busy machine. Audits would end the node that makes its
    # completions up.
    return make_swarm(tmp_path_factory.mktemp("swarm"), model, work={"max_staleness": 12}, audits={"share": 0})


@pytest.fixture(scope="module")
def peers(swarm: Swarm) -> Generator[dict[str, Running]]:
    """A coordinator with two nodes at work; tests put what they restart into the map."""
    with swarm.start() as coordinator, swarm.join("ann", backend=TORCH) as ann, swarm.join("bob", backend=QUICK) as bob:
        for name in ("ann", "bob"):
            coordinator.wait_for(f"work by {name}", lambda name=name: contributed(swarm, name))
        yield {"coordinator": coordinator, "ann": ann, "bob": bob}


def contributed(swarm: Swarm, name: str, *, more_than: int = 0) -> bool:
    """Whether the coordinator has accepted more than so many of a node that is live."""
    node = swarm.node(name)
    return node is not None and node.live and node.accepted > more_than


def accepted_of(swarm: Swarm, name: str) -> int:
    node = swarm.node(name)
    return 0 if node is None else node.accepted


def check_ledger(swarm: Swarm) -> None:
    """Check that no update is missing from the ledger and that none shares its groups with another."""
    lines = swarm.rows("SELECT update_no, new_version FROM updates ORDER BY update_no")
    assert lines == [(number, number) for number in range(1, len(lines) + 1)]
    used = swarm.rows("SELECT update_no, COUNT(*) FROM groups WHERE state = 'consumed' GROUP BY update_no")
    assert used == [(number, GROUPS) for number in range(1, len(lines) + 1)]


def test_a_torch_node_gives_to_probes_what_the_trainer_gives(swarm: Swarm, peers: dict[str, Running]):
    """Real trainer, real backends, real streams; the scripted node says that it has no model."""

    def measured() -> bool:
        ann, bob = swarm.node("ann"), swarm.node("bob")
        return ann is not None and ann.probe == "matches" and bob is not None and bob.probe == "not_measured"

    peers["coordinator"].wait_for("both nodes are probed", measured)
    status = swarm.status()
    assert status is not None
    torch = next(entry for entry in status.classes if entry.backend == "torch")
    assert (torch.precision, torch.measured, torch.set_aside) == ("float32", 1, 0)
    assert torch.gap_max is not None and torch.gap_max <= 1e-4
    assert torch.trained_gap is None or torch.trained_gap <= 1e-4


def test_a_killed_trainer_is_replaced_and_nothing_is_trained_twice(swarm: Swarm, peers: dict[str, Running]):
    coordinator = peers["coordinator"]
    coordinator.wait_for("updates", lambda: swarm.updates() >= 3)
    for _ in range(2):
        (trainer,) = coordinator.named("echo_coordinator.trainer")
        before = swarm.updates()
        trainer.kill()
        coordinator.wait_for("updates after the trainer's end", lambda before=before: swarm.updates() >= before + 3)
    status = swarm.status()
    assert status is not None
    versions = [update.policy_version for update in status.recent_updates]
    assert len(versions) >= 9 and versions == list(range(versions[0], versions[0] + len(versions)))


def test_a_killed_node_leaves_nothing_behind_and_may_come_back_at_once(swarm: Swarm, peers: dict[str, Running]):
    coordinator, ann, bob = peers["coordinator"], peers["ann"], peers["bob"]
    family_of_bob = {process.pid for process in bob.look()}
    assert ann.named("p2pd") and ann.named("echo_node.backends")
    assert ann.end(signal.SIGKILL) == -signal.SIGKILL
    had = accepted_of(swarm, "ann")
    with swarm.join("ann", backend=QUICK, log="ann-2") as again:
        assert ann.left_behind(timeout_s=GONE_S) == []
        coordinator.wait_for("work by the restarted node", lambda: contributed(swarm, "ann", more_than=had))
        assert {process.pid for process in bob.look()} == family_of_bob
        assert bob.process.poll() is None
        had = accepted_of(swarm, "bob")
        coordinator.wait_for("work by the other node", lambda: contributed(swarm, "bob", more_than=had))
        assert again.end(signal.SIGTERM) == 0
        assert again.left_behind(timeout_s=GONE_S) == []


def test_a_node_that_is_told_to_end_in_the_middle_of_its_work_gives_it_back(swarm: Swarm, peers: dict[str, Running]):
    coordinator = peers["coordinator"]
    with swarm.join("cat", backend=SLOW) as cat:
        coordinator.wait_for("leases", lambda: (node := swarm.node("cat")) is not None and node.in_flight > 0)
        assert cat.end(signal.SIGTERM) == 0
        assert cat.left_behind(timeout_s=GONE_S) == []
        assert "stopped" in cat.output() and "Traceback" not in cat.output()
    node = swarm.node("cat")
    assert node is not None and node.in_flight == 0


def test_a_killed_coordinator_leaves_nothing_behind_loses_nothing_and_is_found_again(
    swarm: Swarm, peers: dict[str, Running]
):
    coordinator, bob = peers["coordinator"], peers["bob"]
    invite, before = swarm.invite(), swarm.status()
    assert before is not None
    assert coordinator.named("p2pd") and coordinator.named("trainer") and coordinator.named("scoring")
    assert coordinator.end(signal.SIGKILL) == -signal.SIGKILL
    assert coordinator.left_behind(timeout_s=GONE_S) == []
    with swarm.start("coordinator-2") as again:
        assert swarm.invite() == invite
        status = swarm.status()
        assert status is not None
        assert status.updates >= before.updates and status.accepted >= before.accepted
        assert status.policy_version is not None and status.policy_version >= (before.policy_version or 0)
        again.wait_for("updates", lambda: swarm.updates() >= status.updates + 3)
        assert contributed(swarm, "bob", more_than=0)
        assert bob.process.poll() is None
        # Ctrl+C in a terminal goes to every process of the group.
        assert again.end_group(signal.SIGINT) == 0
        assert again.left_behind(timeout_s=GONE_S) == []
        assert "continue with: echo-coordinator start" in again.output()
    check_ledger(swarm)
    assert bob.end(signal.SIGTERM) == 0
    assert bob.left_behind(timeout_s=GONE_S) == []
    (counted,) = swarm.rows(f"SELECT value FROM counters WHERE scope = '{swarm.peer_id('bob')}' AND name = 'accepted'")
    assert counted == (swarm.counted_by("bob"),)


def test_a_sequential_run_that_is_killed_halfway_ends_with_the_same_weights(model: Path, tmp_path: Path):
    straight, killed = (sequential(tmp_path / name, model) for name in ("straight", "killed"))
    with straight.start() as one, straight.join("node", backend=STEADY) as node:
        with killed.start() as first, killed.join("node", backend=STEADY) as survivor:
            first.wait_for("half of the updates", lambda: killed.updates() >= 2)
            first.end(signal.SIGKILL)
            assert killed.count_updates() < UPDATES
            with killed.start("coordinator-2") as second:
                assert [second.process.wait(DEADLINE_S), survivor.process.wait(DEADLINE_S)] == [0, 0]
        assert [one.process.wait(DEADLINE_S), node.process.wait(DEADLINE_S)] == [0, 0]
    assert trained(killed) == trained(straight)
    assert {**schedule(straight), **schedule(killed)} == schedule(straight)
    assert len(set(schedule(straight).values())) == UPDATES
    assert saved(killed) == saved(straight)
    assert saved(straight)["model.safetensors"] != (model / "model.safetensors").read_bytes()


def sequential(folder: Path, model: Path) -> Swarm:
    return make_swarm(
        folder,
        model,
        environment=plug_in.install(folder / "plug-in"),
        name=plug_in.NAME,
        run={"updates": UPDATES},
        work={"mode": "sequential", "max_staleness": 0, "seed": 5},
        audits={"share": 0},
        optimizer={"warmup_updates": UPDATES},
    )


def trained(swarm: Swarm) -> list[tuple[int, int, int]]:
    """What each update consumed, in order: (update, group, prompt)."""
    return swarm.rows(
        "SELECT update_no, group_id, prompt_index FROM groups WHERE state = 'consumed' ORDER BY update_no, group_id"
    )


def schedule(swarm: Swarm) -> dict[int, float]:
    """The learning rate by update. One that a crash cut off before its line was written is left out."""
    return {line["update"]: line["learning_rate"] for line in swarm.metrics()}


def saved(swarm: Swarm) -> dict[str, Any]:
    """The last checkpoint: weights, optimizer, and where everything stands."""
    folder = swarm.root / "checkpoints" / f"v{UPDATES:08d}"
    files: dict[str, Any] = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    return {**files, "state": json.loads((folder / "state.json").read_text())}
