"""Killed before any change of its disk, a store goes on with what was verified, and calls nothing else whole.

The same when the power goes, but for what had not been flushed.
"""

import json
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from echo_coordinator.run_folder import RunFolder
from echo_coordinator.run_keys import known_keys, load_run_key, rotate_key
from echo_coordinator.trainer.state import WEIGHTS_FILE, Checkpoints, TrainerState, folder_name
from echo_swarm.checkpoint.read_back import file_digest
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.clock import SystemClock
from echo_swarm.identity import load, load_or_create
from tests.swarm import killed_at_a_step as steps

ROOT = Path(__file__).parents[2]
NUMBERS = 550_000
"""Two blocks of a delta, seventeen pieces."""
VERSIONS = 3


each_scenario = pytest.mark.parametrize(
    ("scenario", "versions", "least"),
    [
        ("download", [1], 12),
        ("apply", [0, 1], 18),
        ("prune", [2], 5),
        ("repair", [0, 1, 2], 5),
        ("publish", [0, 1], 12),
    ],
)
"""With the versions that are there in the end, and how many kills there are at least."""


@dataclass
class Killed:
    """A run that was killed."""

    root: Path
    before: str = ""
    verified: Counter[str] = field(default_factory=Counter[str])
    """Artifact → pieces."""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each scenario begins with."""
    folder = tmp_path_factory.mktemp("template")
    values = np.frombuffer(np.random.default_rng(0).bytes(2 * NUMBERS), "<u2").copy()
    store = VersionStore(folder / "published", steps.RUN_ID)
    for version in range(VERSIONS):
        header = json.dumps({"w": {"dtype": "BF16", "shape": [NUMBERS], "data_offsets": [0, 2 * NUMBERS]}}).encode()
        path = folder / f"{version}.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + values.tobytes())
        steps.publisher(store).publish_blocking(version, [steps.weights(folder, version)])
        values[np.random.default_rng(version + 1).random(NUMBERS) < 0.01] += 1
    (folder / "download").mkdir()
    for name in ("prune", "repair"):
        shutil.copytree(folder / "published", folder / name)
    rotten = store_of(folder / "repair").artifact_path(1, steps.KIND)
    assert rotten is not None
    with rotten.open("r+b") as file:
        file.seek(300_000)
        file.write(b"rotten")
    run = RunFolder(folder / "rotate")
    run.root.mkdir()
    run.settings.write_text(
        f'[run]\nid = "{steps.RUN_ID}"\nname = "sums"\n[environment]\nname = "reasoning_gym:chain_sum"\n'
    )
    load_or_create(run.key)
    checkpoints = Checkpoints(folder / "checkpoint" / "trainer" / "checkpoints")
    for version in range(2):
        checkpoints.write(TrainerState(update=version, policy_version=version), steps.fill)
    (checkpoints.folder / folder_name(1) / WEIGHTS_FILE).write_bytes(b"cut off")
    for name in ("apply", "publish"):
        steps.publisher(store_of(folder / name)).publish_blocking(0, [steps.weights(folder, 0)])
    return folder


def store_of(root: Path) -> VersionStore:
    return VersionStore(root, steps.RUN_ID)


def runs(scenario: str, template: Path, folder: Path, *, power: bool = False) -> Iterator[Killed]:
    """Kill at each step; return what was killed. With `power`, cut that, and once more at the end."""
    command = [sys.executable, "-m", "tests.swarm.killed_at_a_step", scenario, str(template), str(folder)]
    command += ["power"] if power else []
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    killed = Killed(folder)
    for line in map(json.loads, done.stdout.splitlines()):
        if "run" not in line:
            killed.verified[line["verified"]] += 1
            continue
        killed.root, killed.before = folder / str(line["run"]), line["before"]
        if line["status"] == 0 and not power:
            return
        assert line["status"] == (-9 if killed.before else 0), (scenario, line)
        yield killed
        killed = Killed(folder)


def check_whole(root: Path, *, rotten: bool = False) -> VersionStore:
    """Return the store as the next process opens it; what it calls whole is. A disk's own fault is seen by `verify`."""
    store = store_of(root)
    path_of = store.verify if rotten else store.artifact_path
    for version in store.versions():
        signed = store.manifest(version)
        assert signed is not None
        for artifact in signed.message.artifacts:
            path = path_of(version, artifact.kind, artifact.precision)
            assert path is None or file_digest(path) == artifact.digest
    return store


def check_kept(store: VersionStore, killed: Killed) -> None:
    """Check that every piece that was verified is there, in a whole file or in a download that goes on."""
    artifacts = {a.digest.hex(): (v, a) for v in store.versions() for a in store.manifest(v).message.artifacts}
    for digest, count in killed.verified.items():
        version, artifact = artifacts[digest]
        if store.whole(artifact.digest) is None:
            partial = store.open_partial(version, artifact)
            assert partial.have.held >= count, killed
            store.close_partial(partial)


def check_end(store: VersionStore, *, versions: list[int]) -> None:
    """Check that a store has these versions whole and nothing else."""
    assert store.versions() == versions
    folders = {store.version_folder(version) for version in versions}
    there = set(store.folder.iterdir())
    assert folders <= there <= folders | {store.folder / "head.bin"}
    for version in versions:
        names = {path.name for path in store.version_folder(version).iterdir()}
        described = {artifact.file_name for artifact in store.manifest(version).message.artifacts}
        assert names <= {"manifest.bin"} | described
        assert store.verify(version, steps.KIND) is not None


@pytest.mark.parametrize("power", [False, True])
def test_killed_before_any_step_a_rotation_leaves_the_old_key_or_the_new_one(
    power: bool, template: Path, tmp_path: Path
) -> None:
    old = load(RunFolder(template / "rotate").key)
    states: list[bool] = []
    for killed in runs("rotate", template, tmp_path, power=power):
        folder = RunFolder(killed.root)
        key = load_run_key(folder, steps.RUN_ID)
        known = known_keys(folder, steps.RUN_ID, key)
        states.append(key.public_key != old.public_key)
        assert len(known.chain.links) == states[-1], "a new key is one that the old one signed"
        assert load_run_key(folder, steps.RUN_ID).public_key == key.public_key
        if not states[-1]:
            rotate_key(killed.root, SystemClock())
        now = load_run_key(folder, steps.RUN_ID)
        assert [path.name for path in sorted(folder.key.parent.iterdir())] == ["run.key", "succession.bin"]
        assert len(known_keys(folder, steps.RUN_ID, now).chain.links) == 1
        assert now.public_key != old.public_key
        shutil.rmtree(killed.root)
    assert states == sorted(states) and states.count(False) >= 6 and states.count(True) >= 2, states


@pytest.mark.parametrize("power", [False, True])
def test_killed_before_any_step_a_trainer_has_the_old_checkpoint_or_the_new_one(
    power: bool, template: Path, tmp_path: Path
) -> None:
    newest: list[int] = []
    for killed in runs("checkpoint", template, tmp_path, power=power):
        checkpoints = Checkpoints(killed.root / "trainer" / "checkpoints")
        found = checkpoints.newest().checkpoint
        assert found is not None
        newest.append(found.state.policy_version)
        assert found.state.consumed_groups == ((3, 4) if newest[-1] else ())
        assert killed.before or newest[-1] == 1, "it had ended"
        steps.checkpoint(killed.root, template)
        assert [path.name for path in checkpoints.folder.iterdir()] == [folder_name(1)]
        again = checkpoints.newest()
        assert again.checkpoint is not None and again.checkpoint.state.policy_version == 1 and not again.warnings
        shutil.rmtree(killed.root)
    assert newest == sorted(newest) and newest.count(0) >= 20 and newest.count(1) >= 4, newest


@each_scenario
def test_killed_before_any_step_it_goes_on_with_what_was_verified(
    scenario: str, versions: list[int], least: int, template: Path, tmp_path: Path
) -> None:
    count = 0
    for killed in runs(scenario, template, tmp_path):
        store = check_whole(killed.root, rotten=scenario == "repair")
        check_kept(store, killed)
        before = store.manifest(1) if scenario == "publish" else None
        steps.SCENARIOS[scenario](killed.root, template)
        after = check_whole(killed.root)
        check_end(after, versions=versions)
        assert before is None or after.manifest(1) == before
        assert after.head() is None or after.head().message.policy_version == versions[-1]
        shutil.rmtree(killed.root)
        count += 1
    assert count >= least, count


@each_scenario
def test_a_power_cut_at_any_step_costs_what_was_not_flushed_and_what_had_ended_is_there(
    scenario: str, versions: list[int], least: int, template: Path, tmp_path: Path
) -> None:
    count = 0
    for killed in runs(scenario, template, tmp_path, power=True):
        store = check_whole(killed.root, rotten=scenario == "repair")
        if not killed.before:
            whole = [version for version in store.versions() if store.verify(version, steps.KIND)]
            assert set(versions) <= set(whole), "it had ended"
        steps.SCENARIOS[scenario](killed.root, template)
        check_end(check_whole(killed.root), versions=versions)
        shutil.rmtree(killed.root)
        count += 1
    assert count >= least, count
