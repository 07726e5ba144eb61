"""A version as a Hugging Face folder: the model's own files with the weights of that version."""

import secrets
import shutil
from pathlib import Path

from echo_coordinator.config import load_settings
from echo_coordinator.run_folder import RunFolder
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.errors import LocalFault, UsageError
from echo_swarm.manifest import ArtifactKind


def export_version(root: Path, out: Path, *, version: int | None) -> int:
    """Write a version to the new folder `out`; return its number. The run may be running.

    Raises:
        UsageError: the run has no such version any more, or `out` exists.
        LocalFault: the stored version does not have the bytes that were published.

    """
    folder = RunFolder(root)
    folder.require()
    if out.exists():
        raise UsageError(f"{out} exists; choose a new folder")
    store = VersionStore(folder.store, load_settings(folder).run.id)
    kept = store.complete_versions(ArtifactKind.SAFETENSORS)
    if not kept:
        raise UsageError(f"{root} has not published a version yet; start it first")
    chosen = kept[-1] if version is None else version
    if chosen not in kept:
        raise UsageError(f"version {chosen} is not kept any more; there are {', '.join(map(str, kept))}")
    weights = store.verify(chosen, ArtifactKind.SAFETENSORS)
    if weights is None:
        raise LocalFault(f"version {chosen} is damaged on disk; export another one")
    out.parent.mkdir(parents=True, exist_ok=True)
    building = out.parent / f".{out.name}.{secrets.token_hex(4)}"
    building.mkdir()
    try:
        for path in sorted(folder.model.iterdir()):
            if path.suffix != ".safetensors" and path.name != "model.safetensors.index.json":
                shutil.copyfile(path, building / path.name)
        shutil.copyfile(weights, building / "model.safetensors")
        building.rename(out)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return chosen
