"""Trains a run of two updates over and over, and is killed one change of the disk later each time.

    python -m tests.swarm.killed_in_an_update FOLDER FIRST STRIDE

Each happens in FOLDER/STEP in a process of its own, which sends itself SIGKILL before that step: coordinator (database,
ledger, checkpoints, store, metrics) and node (outbox, store) at once. A second process then goes on in the same folder
to the end. Prints one JSON line on each step; the last process is not killed. Of trainer and scorers there are
stand-ins; the trainer's weights are a function of what it was given to train on, in its order.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import sqlite3
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import anyio
from anyio import to_thread

from echo_coordinator.state.committer import Committer
from echo_coordinator.trainer.batch import TrainingBatch
from echo_node.node import Outcome
from echo_swarm.identity import Identity
from tests.swarm.killed_at_a_step import is_step
from tests.swarm.support.stand_ins import StandInTrainer
from tests.swarm.support.whole_run import WholeRun, make_run

UPDATES, MEMBERS = 2, 4
LIMIT_S = 120.0
RUN_ID = "0123456789abcdef" * 2


class FaithfulTrainer(StandInTrainer):
    """Its weights say what it trained on: groups and prompts in their order, and how many completions of each."""

    def salt_of(self, batch: TrainingBatch) -> int:
        told = [(g.group_id, g.members[0].prompt_ids.hex(), len(g.members)) for g in batch.groups]
        hashed = hashlib.sha256(json.dumps([batch.update, batch.policy_version, told]).encode())
        return int.from_bytes(hashed.digest()[:7])


def run_of(folder: Path) -> WholeRun:
    """Return the run of a folder, made the first time."""
    folder.mkdir(exist_ok=True)
    made = make_run(
        folder,
        updates=UPDATES,
        group_size=MEMBERS,
        mode="sequential",
        max_staleness=0,
        no_signal="keep",
        lease_s=2.0,
        max_attempts=20,
    )
    settings = made.settings.model_copy(update={"run": made.settings.run.model_copy(update={"id": RUN_ID})})
    return replace(made, settings=settings, identity=Identity.from_seed(bytes(32)), trainer=FaithfulTrainer())


async def to_the_end(run: WholeRun) -> dict[str, Any]:
    """Run coordinator and node until the run has had its updates; return what both then say."""
    with anyio.fail_after(LIMIT_S):
        async with run.coordinator() as coordinator, run.node() as node:
            await coordinator.ended.wait()
            await node.ended.wait()
            state = coordinator.state
            assert node.outcome is Outcome.FINISHED, node.error
            peer = node.node.status().peer_id
            return {
                "ledger": [await state.updates.consumed(number) for number in range(1, state.updates.count + 1)],
                "published": state.core.versions.published,
                "accepted": node.verdicts["accepted"],
                "counted": state.core.counters.get(peer, "accepted"),
                "trained_groups": state.core.counters.get("work", "trained_groups"),
                "artifacts": {v: sorted(d.hex() for d in found) for v, found in state.core.artifacts.items()},
            }


class Steps:
    """Kills this process before the n-th change of its disk; 0: never."""

    def __init__(self, last: int, tell: int) -> None:
        self.count = 0
        self._last = last
        self._tell = tell
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Begin. Commits of the database are steps, too."""
        assert Committer.__init__.__kwdefaults__
        Committer.__init__.__kwdefaults__["commit"] = self._commit
        threading.setprofile(self)
        sys.setprofile(self)

    async def _commit(self, connection: sqlite3.Connection) -> None:
        def commit() -> None:
            self._step("commit")
            connection.execute("COMMIT")

        await to_thread.run_sync(commit)

    def __call__(self, frame: FrameType, event: str, called: object) -> None:
        if event != "c_call":
            return
        if is_step(called) or (frame.f_code.co_name == "_transaction" and _is_execute(called)):
            self._step(getattr(called, "__name__", ""))

    def _step(self, name: str) -> None:
        with self._lock:
            self.count += 1
            if self.count == self._last:
                os.write(self._tell, name.encode())
                os.kill(os.getpid(), signal.SIGKILL)


def _is_execute(called: object) -> bool:
    return getattr(called, "__name__", "") == "execute" and isinstance(
        getattr(called, "__self__", None), sqlite3.Connection
    )


def in_a_process(work: Callable[[int], dict[str, Any]]) -> tuple[int, str]:
    """Fork, work; return how it ended and what it told."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        os.write(writer, json.dumps(work(writer)).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as pipe:
        told = pipe.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), told


def left_over(root: Path) -> list[str]:
    """Return what lies about that belongs to nothing, and completions that are not there as often as they should."""
    found = [
        str(path.relative_to(root)) for path in root.rglob("*") if path.name.startswith("trash-") or ".tmp" in path.name
    ]
    with contextlib.closing(sqlite3.connect(root / "run" / "state.db")) as db:
        counts = db.execute(
            "SELECT g.group_id, count(t.member) FROM groups g LEFT JOIN trajectories t ON t.group_id = g.group_id "
            "WHERE g.state = 'consumed' GROUP BY g.group_id"
        ).fetchall()
    return [*found, *(f"group {group} has {count} completions" for group, count in counts if count != MEMBERS)]


def faults_in(line: dict[str, Any], undisturbed: dict[str, Any]) -> list[str]:
    """Return how the end of a run that was killed differs from that of one that was not, given what was printed."""
    where = f"killed before step {line['step']} ({line.get('before', '')})"
    if line["status"]:
        return [f"{where}: the next start ended with {line['status']}: {line['end']}"]
    end, wanted = json.loads(line["end"]), json.loads(undisturbed["end"])
    same = ("ledger", "published", "trained_groups", "artifacts")
    found = [f"{where}: {name} is {end[name]}, not {wanted[name]}" for name in same if end[name] != wanted[name]]
    if end["accepted"] != end["counted"]:
        found.append(f"{where}: the node counts {end['accepted']} accepted, the coordinator {end['counted']}")
    return [*found, *(f"{where}: {left}" for left in line["left"])]


def main() -> None:
    """Fork for each step, so that everything is imported once."""
    folder, step, stride = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    while True:
        root = folder / str(step)

        def first(tell: int, root: Path = root, last: int = step) -> dict[str, Any]:
            run, steps = run_of(root), Steps(last, tell)
            steps.watch()
            return {**anyio.run(to_the_end, run), "steps": steps.count}

        status, told = in_a_process(first)
        if status != -signal.SIGKILL:
            print(json.dumps({"step": 0, "status": status, "end": told, "left": left_over(root)}), flush=True)
            return
        before = told
        status, told = in_a_process(lambda _, root=root: anyio.run(to_the_end, run_of(root)))
        line = {"step": step, "before": before, "status": status, "end": told, "left": left_over(root)}
        print(json.dumps(line), flush=True)
        shutil.rmtree(root)
        step += stride


if __name__ == "__main__":
    main()
