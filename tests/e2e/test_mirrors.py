"""A run with mirrors: its folder written by the command, served by a range-capable server and by one that is not."""

import re
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from echo_swarm.invite import parse
from tests.e2e.support.commands import COORDINATOR, call
from tests.e2e.support.models import write_model
from tests.e2e.support.swarm import make_swarm
from tests.e2e.test_seeder_process import told
from tests.support.hostile_http import serving_files


@contextmanager
def python_http_server(folder: Path) -> Generator[str]:
    """Serve a folder as `python -m http.server` does: whole files, whatever range is asked for."""
    arguments = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(folder)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            said = re.search(r"port (\d+)", server.stdout.readline())
            assert said
            yield f"http://127.0.0.1:{said[1]}"
        finally:
            server.terminate()


def test_a_node_gets_the_model_from_a_mirror_when_the_coordinator_has_lost_it(tmp_path: Path):
    write_model(tmp_path / "model", hidden_size=128, intermediate_size=512, num_hidden_layers=4, head_dim=64)
    served = tmp_path / "www"
    served.mkdir()
    with serving_files() as good, python_http_server(served) as whole:
        swarm = make_swarm(tmp_path, tmp_path / "model", publish={"mirrors": [whole, good.url]})
        with swarm.start() as coordinator:
            invite = parse(swarm.invite())
            published = swarm.root / "store" / invite.run / "v00000000"
            coordinator.wait_for("version 0", (published / "model.safetensors").exists)
            done = call(COORDINATOR, "mirror", swarm.root, served, "--check", whole)
            assert done.code == 4 and "the whole file instead of a range" in done.error
            done = call(COORDINATOR, "mirror", swarm.root, served)
            assert done.code == 0, done.err
            assert "0 files added" in done.out and "1 there already" in done.out and "versions 0 are in" in done.out
            (path,) = (served / invite.run).iterdir()
            weights = path.read_bytes()
            good.content[f"/{invite.run}/{path.name}"] = weights
            (published / "model.safetensors").unlink()
            with swarm.join("node", backend="scripted:mean_s=0.3,batch=4") as node:
                node.wait_for("the version", lambda: told(swarm, "node").get("held_version") == 0)
                status = told(swarm, "node")
                assert status["bytes_fetched_mirrors"] == len(weights)
                assert status["bytes_fetched_coordinator"] == status["bytes_fetched_peers"] == 0
                said = node.output()
    assert f"versions may also come from {whole}, {good.url}" in said
    assert f"mirror {whole} was of no use" in said and "whole file instead of a range" in said
