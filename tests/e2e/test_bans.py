"""Bans by command line, while the coordinator runs and while it does not. Real processes, real hivemind."""

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support.commands import COORDINATOR, DEADLINE_S, NODE, call
from tests.e2e.support.models import write_model
from tests.e2e.support.swarm import Swarm, make_swarm

QUICK = "scripted:mean_s=0.3,batch=4"
EXIT_BANNED = 10


@pytest.fixture
def swarm(tmp_path: Path) -> Swarm:
    write_model(tmp_path / "model")
    return make_swarm(tmp_path / "swarm", tmp_path / "model", audits={"share": 0})


def peers(swarm: Swarm) -> Mapping[str, dict[str, Any]]:
    done = call(COORDINATOR, "peers", swarm.root, "--json")
    assert done.code == 0, done.err
    return {entry["peer_id"]: entry for entry in json.loads(done.out)}


def test_a_ban_ends_the_node_outlives_a_kill_and_is_lifted_by_a_pardon(swarm: Swarm):
    with swarm.start() as coordinator, swarm.join("ann", backend=QUICK) as ann, swarm.join("bob", backend=QUICK) as bob:
        for name in ("ann", "bob"):
            coordinator.wait_for("work", lambda name=name: (n := swarm.node(name)) is not None and n.accepted > 0)
        peer, other = swarm.peer_id("ann"), swarm.peer_id("bob")
        done = call(COORDINATOR, "ban", swarm.root, peer[-8:], "--reason", "copies answers", "--take-back")
        assert done.code == 0 and done.out.startswith(f"banned {peer}; "), done.err
        assert ann.process.wait(DEADLINE_S) == EXIT_BANNED
        assert "has banned this node's key (copies answers)" in ann.output() and "Traceback" not in ann.output()
        seen = call(NODE, "status", "--state-dir", swarm.folder / "ann", "--json")
        assert seen.json()[0]["state"] == "left (banned)"
        assert coordinator.end(signal.SIGKILL) == -signal.SIGKILL
        assert peers(swarm)[peer]["standing"] == "banned"
        assert call(COORDINATOR, "ban", swarm.root, other).code == 0
        with swarm.start("again"):
            assert bob.process.wait(DEADLINE_S) == EXIT_BANNED
            with swarm.join("ann", backend=QUICK, log="ann-2") as ann:
                assert ann.process.wait(DEADLINE_S) == EXIT_BANNED
            listed = peers(swarm)[peer]
            assert (listed["standing"], listed["detail"], listed["in_flight"]) == ("banned", "copies answers", 0)
            assert call(COORDINATOR, "pardon", swarm.root, peer).out.startswith(f"pardoned {peer}: its ban;")
            with swarm.join("ann", backend=QUICK, log="ann-3") as ann:
                ann.wait_for("work again", lambda: peers(swarm)[peer]["accepted"] > listed["accepted"])
