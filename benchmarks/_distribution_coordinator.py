"""The coordinator of the distribution benchmark: all of it is real but the trainer, whose versions are given to it.

    publish FILE (standard input) ─► "trainer" ─► checkpoint ─► Publishing, Publisher ─► store ─► BlobServer ─► nodes

`python -m benchmarks._distribution_coordinator FOLDER ADDRESS`. An update takes two completions of four tokens, from
scripted nodes, so that nobody has anything else to do while a version is on its way.
"""

import secrets
import shutil
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from benchmarks._distribution_lines import Lines, leave
from benchmarks._made_up_session import MadeUpSession
from benchmarks._swap_copy import serve_copies
from echo_coordinator.commands.network import open_network
from echo_coordinator.commands.start import LOOP
from echo_coordinator.config import (
    EnvironmentSection,
    EvaluationSection,
    NetworkSection,
    PublishSection,
    RunSection,
    RunSettings,
)
from echo_coordinator.coordinator import Children, Coordinator, run_coordinator
from echo_coordinator.run_folder import RunFolder
from echo_coordinator.state.probe_settings import ProbeSettings
from echo_coordinator.state.work_settings import WorkSettings
from echo_coordinator.trainer.settings import TrainerConfig
from echo_coordinator.trainer.state import OPTIMIZER_FILE, WEIGHTS_FILE, Checkpoint, Checkpoints, TrainerState
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.collector import calm_collector
from echo_swarm.identity import Identity
from echo_swarm.manifest import CheckpointManifest
from tests.swarm.support.stand_ins import StandInScorers, weights, write_model

LOOK_S = 0.05
PROMPT_TOKENS = 16


class GivenVersions:
    """A trainer whose every version is a file that the benchmark names."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self.give, self._given = anyio.create_memory_object_stream[Path](16)

    @asynccontextmanager
    async def open(self, config: TrainerConfig) -> AsyncGenerator[MadeUpSession]:
        """Begin with version 0, once its file is given (an `OpenTrainer`)."""
        checkpoints = Checkpoints(config.checkpoint_folder)
        following = partial(self.next_version, checkpoints)
        yield MadeUpSession(following, await following(TrainerState()))

    async def next_version(self, checkpoints: Checkpoints, state: TrainerState) -> Checkpoint:
        """Wait for a file and make it a checkpoint."""
        self._lines.say("waiting", version=state.policy_version)
        path = await self._given.receive()

        def fill(folder: Path) -> None:
            shutil.copyfile(path, folder / WEIGHTS_FILE)
            (folder / OPTIMIZER_FILE).write_bytes(weights(0, 8))

        checkpoint = await to_thread.run_sync(checkpoints.write, state, fill)
        await to_thread.run_sync(checkpoints.prune, 2)
        return checkpoint


def _settings(address: str) -> RunSettings:
    return RunSettings(
        run=RunSection(id=secrets.token_hex(16), name="distribution"),
        environment=EnvironmentSection(name="made_up", max_prompt_tokens=PROMPT_TOKENS),
        work=WorkSettings(group_size=2, groups_per_update=1, max_tokens=4, no_signal="keep"),
        evaluation=EvaluationSection(every=0),
        probes=ProbeSettings(prompts=0),
        publish=PublishSection(precision="bfloat16"),
        network=NetworkSection(listen=(f"/ip4/{address}/tcp/0",)),
    )


async def _run(root: Path, address: str, lines: Lines) -> None:
    folder, settings, identity = RunFolder(root), _settings(address), Identity.generate()
    await to_thread.run_sync(write_model, folder.model)
    folder.logs.mkdir()
    given = GivenVersions(lines)
    children = Children(open_trainer=given.open, open_scorers=StandInScorers().open)
    async with (
        open_network(settings, identity) as (host, directory),
        run_coordinator(folder, settings, identity, host, directory, children) as coordinator,
        anyio.create_task_group() as tasks,
    ):
        await serve_copies(host)
        calm_collector()
        lines.say("ready", invite=str(coordinator.invite), address=f"{host.addresses[0]}/p2p/{host.peer_id}")
        tasks.start_soon(_watch, coordinator, lines)
        while (order := await to_thread.run_sync(lines.read, abandon_on_cancel=True)) is not None:
            if order["do"] == "publish":
                await given.give.send(Path(order["path"]))
            else:
                lines.say("served", bytes=coordinator.reporter.status().bytes_served_coordinator)
        leave()


async def _watch(coordinator: Coordinator, lines: Lines) -> None:
    """Say how many nodes there are, and what is published."""
    live, published = -1, None
    while True:
        if (now := coordinator.state.core.roster.live()) != live:
            live = now
            lines.say("nodes", live=live)
        if (version := coordinator.state.core.versions.published) != published:
            published = version
            lines.say("published", **_about(await to_thread.run_sync(_head, coordinator)))
        await anyio.sleep(LOOK_S)


def _head(coordinator: Coordinator) -> CheckpointManifest:
    head = VersionStore(coordinator.folder.store, coordinator.settings.run.id).head()
    assert head is not None
    return head.message


def _about(manifest: CheckpointManifest) -> dict[str, Any]:
    """Return a version's number and files, and when it was signed: after its last file lay whole on the disk."""
    files = {artifact.kind.value: artifact.size_bytes for artifact in manifest.artifacts}
    return {"version": manifest.policy_version, "signed_at": manifest.issued_at, "files": files}


if __name__ == "__main__":
    anyio.run(_run, Path(sys.argv[1]), sys.argv[2], Lines(), backend_options=LOOP)
