"""A coordinator is gone, and a node that is killed meanwhile starts again alone, with a clock that is hours off."""

import json
import signal
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support.commands import NODE, Running, call, running
from tests.e2e.support.models import write_model
from tests.e2e.support.swarm import Swarm, make_swarm

WRONG_CLOCK = "tests.e2e.support.wrong_clock"
SLOW = "scripted:mean_s=2,batch=8"


@pytest.fixture
def swarm(tmp_path: Path) -> Swarm:
    write_model(tmp_path / "model")
    return make_swarm(tmp_path, tmp_path / "model", work={"max_staleness": 12}, audits={"share": 0})


@contextmanager
def joining(swarm: Swarm, invite: str, *, log: str, ahead_s: float = 0.0) -> Generator[Running]:
    options = ["--state-dir", str(swarm.folder / "node"), "--listen", "/ip4/127.0.0.1/tcp/0", "--backend", SLOW]
    module, first = (WRONG_CLOCK, [str(ahead_s)]) if ahead_s else (NODE, [])
    with running(module, *first, "join", *options, invite, log=swarm.folder / f"{log}.log") as node:
        yield node


def told(swarm: Swarm) -> dict[str, Any]:
    """What the node last wrote down about itself."""
    path = next((swarm.folder / "node" / "runs").glob("*/status.json"), None)
    return json.loads(path.read_text()) if path else {}


def is_waiting(status: dict[str, Any]) -> bool:
    return status.get("state", "").startswith("waiting for the coordinator")


def stranded(swarm: Swarm) -> bool:
    """Whether it has work that nobody takes, and says so; both from one file."""
    status = told(swarm)
    return status["pending"] >= 1 and is_waiting(status)


def ready_alone(swarm: Swarm, pid: int) -> dict[str, Any]:
    """What it says once it has a version and has missed the coordinator, which come in either order."""
    status = told(swarm)
    ready = status["pid"] == pid and status["loaded_version"] is not None and is_waiting(status)
    return status if ready else {}


def settled(status: dict[str, Any]) -> int:
    """Trajectories that have left its outbox, the oldest first."""
    return status["accepted"] + sum(status["rejected"].values())


def counted(swarm: Swarm, name: str) -> int:
    rows = swarm.rows(f"SELECT value FROM counters WHERE scope = '{swarm.peer_id('node')}' AND name = '{name}'")
    return int(rows[0][0]) if rows else 0


@pytest.mark.parametrize("ahead_s", [-3 * 3600.0, 3 * 3600.0])
def test_work_outlives_an_outage_and_a_kill_and_a_node_that_starts_alone_hands_it_in(swarm: Swarm, ahead_s: float):
    with swarm.start() as coordinator:
        assert "joining the network" in coordinator.output() and "opening the run" in coordinator.output()
        invite = swarm.invite()
        with joining(swarm, invite, log="node-1") as node:
            node.wait_for("accepted work", lambda: told(swarm).get("accepted", 0) >= 4)
            coordinator.end(signal.SIGKILL)
            node.wait_for("work that nobody takes", lambda: stranded(swarm))
            assert node.end(signal.SIGKILL) == -signal.SIGKILL
    with joining(swarm, invite, log="node-2", ahead_s=ahead_s) as node:
        # Nobody is there: it gets ready, and says what it waits for.
        kept = node.wait_for("a version", lambda: ready_alone(swarm, node.process.pid))
        assert kept["pending"] >= 1, kept
        assert "waiting for the coordinator" in node.output()
        shown = call(NODE, "status", "--state-dir", swarm.folder / "node").out
        assert "waiting for the" in shown and "coordinator" in shown, "it lives, by whatever clock"
        with swarm.start("coordinator-2") as again:
            # Whether its work is still fresh or has become stale, it gets a verdict or is dropped by the node.
            # Not that nothing waits any more: on a busy machine it makes new work as fast as that is taken.
            again.wait_for("the old work", lambda: settled(told(swarm)) >= settled(kept) + kept["pending"])
            again.wait_for("new work", lambda: told(swarm)["accepted"] > kept["accepted"])
            assert node.output().count("warning: this machine's clock is 10") == 1
            assert node.end(signal.SIGTERM) == 0
    assert "Traceback" not in node.output()
    after = told(swarm)
    # What it left without an answer, or dropped before there was one, the coordinator may have counted.
    dropped = sum(count for reason, count in after["rejected"].items() if reason.startswith("node_"))
    assert 0 <= counted(swarm, "accepted") - after["accepted"] <= after["pending"] + dropped
    # Twice even, what the first coordinator refused and the second one was offered again.
    assert counted(swarm, "late") >= after["rejected"].get("late", 0)
