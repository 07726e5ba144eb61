"""A run's folder, the processes that work on it, and what can be read of it."""

import contextlib
import json
import sqlite3
import tomllib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from echo_coordinator.control import ask
from echo_coordinator.demo.recipe import ENVIRONMENT_SETTINGS
from echo_coordinator.demo.run_file import to_toml
from echo_coordinator.run_folder import RunFolder
from echo_swarm.errors import EchoError
from echo_swarm.status import NodeStatus, RunStatus
from tests.e2e.support.commands import COORDINATOR, NODE, Running, call, running

CHAIN_SUM = "reasoning_gym:chain_sum"


@dataclass(frozen=True, slots=True, kw_only=True)
class Swarm:
    """One run and where its processes write."""

    root: Path
    """The run's folder."""
    folder: Path
    """For logs and the nodes' state."""
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    @contextmanager
    def start(self, name: str = "coordinator", *options: str) -> Generator[Running]:
        """Run the coordinator for the length of the block, from when it has published."""
        log = self.folder / f"{name}.log"
        with running(
            COORDINATOR, "start", self.root, "--plain", *options, log=log, environment=self.environment
        ) as coordinator:
            coordinator.wait_for("an invite", self.invite)
            yield coordinator

    @contextmanager
    def join(self, name: str, *, backend: str, log: str = "", python: str = "") -> Generator[Running]:
        """Run a node for the length of the block; the coordinator must be running. `python` runs its backend."""
        options = ["--state-dir", str(self.folder / name), "--listen", "/ip4/127.0.0.1/tcp/0", "--backend", backend]
        options += ["--backend-python", python] if python else []
        file = self.folder / f"{log or name}.log"
        with running(NODE, "join", "--role", "inference", *options, self.invite(), log=file) as node:
            yield node

    def invite(self) -> str:
        """Return the invite, or nothing while it cannot be had."""
        return str(self._ask("invite").get("invite", ""))

    def status(self) -> RunStatus | None:
        """Return the run's status, or None while it cannot be had."""
        reply = self._ask("status")
        return RunStatus.model_validate(reply["status"]) if reply else None

    def updates(self) -> int:
        """Return how many updates are in the ledger."""
        status = self.status()
        return -1 if status is None else status.updates

    def count_updates(self) -> int:
        """Return how many updates are in the ledger of a run that is not running."""
        return int(self.rows("SELECT COUNT(*) FROM updates")[0][0])

    def accepted(self) -> int:
        """Return how many trajectories were accepted."""
        status = self.status()
        return -1 if status is None else status.accepted

    def node(self, name: str) -> NodeStatus | None:
        """Return what the coordinator says of a node, which it must list once at most."""
        status, key = self.status(), self.folder / name / "identity.key"
        if status is None or not key.exists():
            return None
        found = [node for node in status.nodes if node.peer_id == self.peer_id(name)]
        assert len(found) <= 1, found
        return found[0] if found else None

    def peer_id(self, name: str) -> str:
        """Return a node's peer id."""
        from echo_swarm.identity import load

        return load(self.folder / name / "identity.key").peer_id

    def counted_by(self, name: str) -> int:
        """Return how many trajectories of a node were accepted, as the node itself counted."""
        (status,) = (self.folder / name / "runs").glob("*/status.json")
        return int(json.loads(status.read_text())["accepted"])

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return what the database of a run that is not running answers; a coordinator keeps it to itself."""
        with contextlib.closing(sqlite3.connect(self.root / "state.db")) as database:
            return database.execute(query).fetchall()

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of each update."""
        return [json.loads(line) for line in (self.root / "metrics.jsonl").read_text().splitlines()]

    def _ask(self, op: str) -> dict[str, Any]:
        try:
            return anyio.run(lambda: ask(RunFolder(self.root), op))
        except EchoError:
            return {}


def make_swarm(
    folder: Path,
    model: Path,
    *,
    name: str = CHAIN_SUM,
    environment: Mapping[str, str] | None = None,
    **sections: dict[str, Any],
) -> Swarm:
    """Make a run of the environment `name` by `init`; `sections` of run.toml win over small settings.

    `environment` are variables of the coordinator's process.
    """
    root = folder / "run"
    done = call(COORDINATOR, "init", root, "--model", model, "--environment", name, environment=environment)
    assert done.code == 0, done.err
    made = tomllib.loads((root / "run.toml").read_text())
    (listen,) = made["network"]["listen"]
    settings: dict[str, dict[str, Any]] = {
        "run": {"id": made["run"]["id"], "name": "sums"},
        "environment": {"name": name, "max_prompt_tokens": 16},
        "environment.settings": ENVIRONMENT_SETTINGS if name == CHAIN_SUM else {},
        "work": {
            "group_size": 4,
            "groups_per_update": 2,
            "max_tokens": 8,
            "max_staleness": 2,
            "no_signal": "keep",
            "beat_s": 1.0,
            "retain_updates": 1000,
        },
        "optimizer": {"learning_rate": 1e-3, "threads": 1, "device": "cpu"},
        "evaluation": {"every": 0},
        "network": {"listen": [listen.replace("0.0.0.0", "127.0.0.1")]},
    }
    merged = {key: {**settings.get(key, {}), **sections.get(key, {})} for key in [*settings, *sections]}
    (root / "run.toml").write_text(to_toml(merged))
    return Swarm(root=root, folder=folder, environment=environment or {})
