"""The coordinator of the chaos benchmark: all of it is real but the trainer, whose versions lie in a folder.

    GIVEN/v00000007.safetensors ─► "trainer" ─► checkpoint ─► ledger ─► Publisher ─► store ─► BlobServer ─► nodes

`python -m benchmarks._chaos_coordinator FOLDER GIVEN PORT`. Started again on the same folder, it goes on as the real
one does. An update takes two completions of four tokens, from scripted nodes.
"""

import secrets
import shutil
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
from anyio import to_thread

from benchmarks._chaos_phases import Phases
from benchmarks._distribution_lines import Lines, leave
from benchmarks._made_up_session import MadeUpSession
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
from echo_coordinator.publisher import publish
from echo_coordinator.run_folder import RunFolder
from echo_coordinator.state.probe_settings import ProbeSettings
from echo_coordinator.state.work_settings import WorkSettings
from echo_coordinator.trainer.settings import TrainerConfig
from echo_coordinator.trainer.state import OPTIMIZER_FILE, WEIGHTS_FILE, Checkpoint, Checkpoints, TrainerState
from echo_swarm.collector import calm_collector
from echo_swarm.identity import load_or_create
from tests.swarm.support.stand_ins import StandInScorers, weights, write_model

LOOK_S = 0.05
PROMPT_TOKENS = 16
MAX_STALENESS = 3
"""Nodes keep one version more, the coordinator two, as the settings' defaults are."""


class GivenVersions:
    """A trainer whose every version is a file that appears in a folder."""

    def __init__(self, folder: Path, phases: Phases) -> None:
        self._folder = folder
        self._phases = phases

    @asynccontextmanager
    async def open(self, config: TrainerConfig) -> AsyncGenerator[MadeUpSession]:
        """Start where the newest checkpoint is (an `OpenTrainer`)."""
        checkpoints = Checkpoints(config.checkpoint_folder)
        await to_thread.run_sync(checkpoints.sweep)
        found = await to_thread.run_sync(checkpoints.newest)
        following = partial(self.next_version, checkpoints)
        yield MadeUpSession(following, found.checkpoint or await following(TrainerState()))

    async def next_version(self, checkpoints: Checkpoints, state: TrainerState) -> Checkpoint:
        """Wait for a version's file and make it a checkpoint."""
        path = self._folder / f"v{state.policy_version:08d}.safetensors"
        self._phases.say("waiting", version=state.policy_version)
        while not path.exists():  # noqa: ASYNC110 - a file has no event
            await anyio.sleep(LOOK_S)

        def fill(folder: Path) -> None:
            shutil.copyfile(path, folder / WEIGHTS_FILE)
            (folder / OPTIMIZER_FILE).write_bytes(weights(0, 8))

        with self._phases.within("writing a checkpoint"):
            checkpoint = await to_thread.run_sync(checkpoints.write, state, fill)
            await to_thread.run_sync(checkpoints.prune, 2)
        return checkpoint


def _settings(root: Path, port: int) -> RunSettings:
    run_id = root / "run-id"
    if not run_id.exists():
        run_id.write_text(secrets.token_hex(16), encoding="ascii")
    return RunSettings(
        run=RunSection(id=run_id.read_text(encoding="ascii"), name="chaos"),
        environment=EnvironmentSection(name="made_up", max_prompt_tokens=PROMPT_TOKENS),
        work=WorkSettings(
            group_size=2, groups_per_update=1, max_tokens=4, no_signal="keep", max_staleness=MAX_STALENESS
        ),
        evaluation=EvaluationSection(every=0),
        probes=ProbeSettings(prompts=0),
        publish=PublishSection(precision="bfloat16"),
        network=NetworkSection(listen=(f"/ip4/127.0.0.1/tcp/{port}",)),
    )


async def _run(root: Path, given: Path, port: int, lines: Lines) -> None:
    folder, settings, phases = RunFolder(root), _settings(root, port), Phases(lines)
    identity, _ = load_or_create(folder.key)
    folder.logs.mkdir(exist_ok=True)
    if not folder.model.exists():
        write_model(folder.model)
    publish.make_deltas = phases.around("making a delta", publish.make_deltas)
    publish.Publisher.publish_blocking = phases.around("publishing", publish.Publisher.publish_blocking)
    children = Children(open_trainer=GivenVersions(given, phases).open, open_scorers=StandInScorers().open)
    with folder.locked():
        async with (
            open_network(settings, identity) as (host, directory),
            run_coordinator(folder, settings, identity, host, directory, children) as coordinator,
            anyio.create_task_group() as tasks,
        ):
            calm_collector()
            phases.say("joined", invite=str(coordinator.invite))
            tasks.start_soon(_watch, coordinator, phases)
            while await to_thread.run_sync(lines.read, abandon_on_cancel=True) is not None:
                pass
            leave()


async def _watch(coordinator: Coordinator, phases: Phases) -> None:
    """Say what the ledger calls published."""
    published = None
    while True:
        version = coordinator.state.core.versions.published
        if version is not None and version != published:
            published = version
            phases.say("published", version=version)
        await anyio.sleep(LOOK_S)


if __name__ == "__main__":
    _lines = Lines()
    anyio.run(_run, Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), _lines, backend_options=LOOP)
