"""A copy of a live run's folder, by command line. Real processes, real hivemind."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

from tests.e2e.support.commands import COORDINATOR, DEADLINE_S, call
from tests.e2e.support.models import write_model
from tests.e2e.support.swarm import make_swarm

QUICK = "scripted:mean_s=0.3,batch=4"
EXIT_TAKEN_OVER = 11


def test_a_copy_of_a_live_runs_folder_is_refused_and_replaces_it_when_told_to(tmp_path: Path):
    write_model(tmp_path / "model")
    swarm = make_swarm(tmp_path / "swarm", tmp_path / "model", audits={"share": 0})
    with swarm.start() as first:
        copy = replace(swarm, root=shutil.copytree(swarm.root, tmp_path / "copy"))
        assert copy.status() is None and swarm.status() is not None
        settings = copy.root / "run.toml"
        settings.write_text(re.sub(r"/tcp/\d+", "/tcp/0", settings.read_text()))
        refused = call(COORDINATOR, "start", copy.root, "--plain")
        assert refused.code == EXIT_TAKEN_OVER
        assert "is live at /ip4/127.0.0.1/" in refused.error and "--take-over" in refused.error
        with swarm.join("ann", backend=QUICK) as ann:
            first.wait_for("work", lambda: swarm.accepted() > 0)
            first.wait_for("addresses of peers", (swarm.root / "peers.json").exists)
            shutil.copy(swarm.root / "peers.json", copy.root)
            with copy.start("second", "--take-over") as second:
                assert first.process.wait(DEADLINE_S) == EXIT_TAKEN_OVER
                assert "has taken over, since" in first.output() and "Traceback" not in first.output()
                second.wait_for("the node", lambda: copy.accepted() > 0)
                assert "connected to the coordinator again" in ann.output()
            again = call(COORDINATOR, "start", swarm.root, "--plain")
            assert again.code == EXIT_TAKEN_OVER and "restored from a backup" in again.error
            seen = call(COORDINATOR, "status", swarm.root)
            assert "exit code 11" in seen.out + seen.err
