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


def loaded(swarm: Swarm) -> int | None:
    return told(swarm).get("loaded_version")


def is_waiting(swarm: Swarm) -> bool:
    return told(swarm)["state"].startswith("waiting for the coordinator")


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
            node.wait_for("work that nobody takes", lambda: told(swarm)["pending"] >= 1 and is_waiting(swarm))
            assert node.end(signal.SIGKILL) == -signal.SIGKILL
    with joining(swarm, invite, log="node-2", ahead_s=ahead_s) as node:
        # Nobody is there: it gets ready, and says what it waits for.
        node.wait_for("a version", lambda: told(swarm)["pid"] == node.process.pid and loaded(swarm) is not None)
        kept = told(swarm)
        assert kept["pending"] >= 1 and is_waiting(swarm), kept
        assert "waiting for the coordinator" in node.output()
        shown = call(NODE, "status", "--state-dir", swarm.folder / "node").out
        assert "waiting for the" in shown and "coordinator" in shown, "it lives, by whatever clock"
        with swarm.start("coordinator-2") as again:
            # Whether its work is still fresh or has become stale, it gets a verdict or is dropped by the node.
            again.wait_for("the old work", lambda: told(swarm)["pending"] == 0)
            again.wait_for("new work", lambda: told(swarm)["accepted"] > kept["accepted"])
            assert node.output().count("warning: this machine's clock is 10") == 1
            assert node.end(signal.SIGTERM) == 0
    assert "Traceback" not in node.output()
    after = told(swarm)
    # What it left without an answer, the coordinator may have counted.
    assert 0 <= counted(swarm, "accepted") - after["accepted"] <= after["pending"]
    assert 0 <= counted(swarm, "late") - after["rejected"].get("late", 0) <= after["pending"]
