"""A run's key is replaced, by command line. Real processes, real hivemind."""

import json
import signal
from pathlib import Path

from echo_swarm.identity import load
from echo_swarm.invite import parse
from tests.e2e.support.commands import COORDINATOR, NODE, call, running
from tests.e2e.support.models import write_model
from tests.e2e.support.swarm import make_swarm

QUICK = "scripted:mean_s=0.3,batch=4"
EXIT_USAGE = 2


def local_status(folder: Path) -> str:
    return call(NODE, "status", "--state-dir", folder / "swarm" / "ann").out


def test_a_run_gets_another_key_and_its_nodes_follow_with_the_invites_that_they_have(tmp_path: Path):
    write_model(tmp_path / "model")
    swarm = make_swarm(tmp_path / "swarm", tmp_path / "model", audits={"share": 0})
    old = load(swarm.root / "keys" / "run.key")
    with swarm.start() as first:
        invite = swarm.invite()
        refused = call(COORDINATOR, "rotate-key", swarm.root)
        assert refused.code == EXIT_USAGE and "echo-coordinator stop" in refused.error
        with swarm.join("ann", backend=QUICK) as ann:
            ann.wait_for("work", lambda: swarm.accepted() > 0)
            assert first.end(signal.SIGTERM) == 0
            done = call(COORDINATOR, "rotate-key", swarm.root)
            new = load(swarm.root / "keys" / "run.key")
            assert done.code == 0 and new.peer_id in done.out and old.peer_id in done.out and "Back up" in done.out
            with swarm.start("second") as second:
                before = swarm.accepted()
                ann.wait_for("work after the rotation", lambda: swarm.accepted() > before)
                assert "the run's key was replaced on" in ann.output() and "Traceback" not in ann.output()
                # What it shows is written every few seconds.
                ann.wait_for("its own status", lambda: "the run's key was replaced once on" in local_status(tmp_path))
                assert "this node has followed" in local_status(tmp_path)
                assert parse(swarm.invite()).key == new.public_key
                status = swarm.status()
                assert status is not None and status.key_changes == 1
                assert "the run's key was replaced once on" in call(COORDINATOR, "status", swarm.root).out
                assert "of these peers have been here since" in call(COORDINATOR, "peers", swarm.root).out

                seen = call(NODE, "status", "--json", invite)
                assert seen.code == 0, seen.err
                assert json.loads(seen.out)["run_id"] == parse(invite).run
                doctor = call(NODE, "doctor", "--quick", "--state-dir", tmp_path / "nobody", invite)
                assert "its key was replaced on" in doctor.out and new.peer_id in doctor.out

                late = [
                    "join",
                    "--state-dir",
                    tmp_path / "late",
                    "--listen",
                    "/ip4/127.0.0.1/tcp/0",
                    "--backend",
                    QUICK,
                ]
                with running(NODE, *late, invite, log=tmp_path / "late.log") as newcomer:
                    newcomer.wait_for("the newcomer", lambda: swarm.status() and _is_live(swarm, tmp_path / "late"))
                    assert "the run's key was replaced on" in newcomer.output()
                assert second.process.poll() is None


def _is_live(swarm, state_dir: Path) -> bool:
    key = state_dir / "identity.key"
    status = swarm.status()
    return key.exists() and any(node.peer_id == load(key).peer_id and node.accepted for node in status.nodes)
