"""The swarm's side of `compare_trl`: coordinator and nodes as real processes on loopback, in one mode, timed.

The clock starts when every node holds version 0 and the paused run is resumed, and stops with the last update's
checkpoint. What comes before is start-up, reported apart.
"""

import json
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

import anyio

from echo_coordinator.config import RunSettings
from echo_coordinator.demo.processes import Peers
from echo_coordinator.demo.recipe import TORCH
from echo_coordinator.demo.run_file import write_demo_run
from echo_coordinator.demo.swarm import Swarm
from echo_swarm.errors import BackendFailed
from echo_swarm.status import RunStatus


def write_run(folder: Path, *, model: Path, seed: int, mode: str, updates: int) -> RunSettings:
    """Make FOLDER/run with the demo's recipe in the given mode; returns its settings.

    Evaluation is off, since accuracy is measured afterwards, and all versions are kept for that.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    changes: dict[str, dict[str, Any]] = {
        "run": {"updates": updates},
        "evaluation": {"every": 0},
        "publish": {"keep_versions": updates + 1},
        "work": {"mode": mode, **({"max_staleness": 0} if mode == "sequential" else {})},
    }
    return write_demo_run(folder / "run", model=model, seed=seed, changes=changes)


def run_swarm(folder: Path, settings: RunSettings, *, nodes: int) -> dict[str, Any]:
    """Train the run in FOLDER and return seconds, samples and weights by version.

    Raises:
        BackendFailed: a process failed, or the run did not finish.

    """
    swarm = Swarm(folder, Peers(folder / "logs"))
    began = time.time()
    try:
        resumed, status = anyio.run(_train, swarm, nodes)
    finally:
        swarm.peers.end(grace_s=20.0)
    if status.state != "finished":
        raise BackendFailed(f"the run in {folder} ended as {status.state} after {status.updates} updates")
    return {
        "startup_s": resumed - began,
        "versions": _versions(swarm, settings.run.id, resumed),
        "accepted": status.accepted,
        "staleness": status.staleness,
        "dropped_groups": status.dropped_groups,
        "trainer_busy_share": status.trainer_busy_share,
        "waiting_s": status.waiting_s,
    }


async def _train(swarm: Swarm, nodes: int) -> tuple[float, RunStatus]:
    coordinator = swarm.start_coordinator()
    invite = await swarm.wait_for_invite(coordinator)
    await swarm.pause()
    swarm.start_nodes(invite, [TORCH] * nodes)
    await swarm.wait_for_nodes(nodes)
    resumed = time.time()
    await swarm.resume()
    await swarm.watch(coordinator, lambda _: None)
    await swarm.wait_for_exits()
    return resumed, swarm.final_status()


def _versions(swarm: Swarm, run_id: str, resumed: float) -> dict[int, dict[str, Any]]:
    """Return, by version: seconds until its checkpoint was durable, completions trained on so far, weights."""
    store = swarm.run.store / run_id
    database = sqlite3.connect(f"{swarm.run.database.resolve().as_uri()}?mode=ro", uri=True)
    try:
        query = "SELECT new_version, committed_at, metrics FROM updates ORDER BY update_no"
        rows: list[tuple[int, float, str]] = database.execute(query).fetchall()
    finally:
        database.close()
    found: dict[int, dict[str, Any]] = {0: {"seconds": 0.0, "samples": 0}}
    samples = 0
    for version, committed_at, metrics in rows:
        samples += int(json.loads(metrics)["members"]["trained"])
        found[version] = {"seconds": committed_at - resumed, "samples": samples}
    for version, entry in found.items():
        entry["weights"] = str(store / f"v{version:08d}" / "model.safetensors")
    return found
