"""A version as a folder that transformers or PEFT loads: the model's own files with its weights, or an adapter."""

import json
import secrets
import shutil
import stat
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from echo_coordinator.config import load_settings
from echo_coordinator.run_folder import RunFolder
from echo_swarm.checkpoint.adapter_file import read_adapter
from echo_swarm.checkpoint.files import explained
from echo_swarm.checkpoint.read_back import file_digest
from echo_swarm.checkpoint.shelf import read_manifests
from echo_swarm.errors import LocalFault, UsageError
from echo_swarm.manifest import BASE_VERSION, Artifact, ArtifactKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    version: int
    base: str = ""
    """Of an adapter: the model that it is for, a hub id or a folder."""


def export_version(root: Path, out: Path, *, version: int | None, merged: bool = False) -> Exported:
    """Write a version to the new folder `out`. The run may be running.

    Of a LoRA run that is the adapter as PEFT's files, or with `merged` a whole model with the adapter worked in.

    Only looks at the run's store: a running coordinator writes into it meanwhile.

    Raises:
        UsageError: the run has no such version any more, or `out` exists.
        LocalFault: the stored version does not have the bytes that were published, or was deleted meanwhile.

    """
    folder = RunFolder(root)
    folder.require()
    if out.exists():
        raise UsageError(f"{out} exists; choose a new folder")
    settings = load_settings(folder)
    store = folder.store / settings.run.id
    kind = ArtifactKind.SAFETENSORS if settings.lora is None else ArtifactKind.LORA
    if merged and settings.lora is None:
        raise UsageError(f"{root} trains all weights, so there is nothing to merge; leave --merged out")
    kept = _kept(store, kind)
    if not kept:
        raise UsageError(f"{root} has not published a version yet; start it first")
    chosen = max(kept) if version is None else version
    if chosen not in kept:
        raise UsageError(f"version {chosen} is not kept any more; there are {', '.join(map(str, kept))}")
    base = settings.run.base_model or str(folder.model.absolute())
    with _building(out) as building, explained(out):
        weights = _intact(*kept[chosen], building / ".weights")
        if settings.lora is None:
            _copy_model(folder, building)
            weights.rename(building / "model.safetensors")
        elif merged:
            _copy_model(folder, building)
            whole = _intact(*_kept(store, ArtifactKind.SAFETENSORS)[BASE_VERSION], building / ".base")
            _merge(whole, weights, building / "model.safetensors")
            whole.unlink()
            weights.unlink()
        else:
            # The published file names no base: it must have the same bytes wherever the run lies.
            config = {**read_adapter(weights).config, "base_model_name_or_path": base}
            text = json.dumps(config, indent=2)
            (building / "adapter_config.json").write_text(text + "\n", encoding="utf-8")
            weights.rename(building / "adapter_model.safetensors")
    return Exported(version=chosen, base="" if settings.lora is None or merged else base)


def _kept(store: Path, kind: ArtifactKind) -> dict[int, tuple[Path, Artifact]]:
    """Return by version where its file of a kind lies, and what it has to be."""
    found = dict[int, tuple[Path, Artifact]]()
    for version, manifest in read_manifests(store).items():
        for artifact in manifest.artifacts:
            path = store / f"v{version:08d}" / artifact.file_name
            if artifact.kind is kind and path.is_file():
                found[version] = path, artifact
    return found


def _intact(path: Path, artifact: Artifact, copy: Path) -> Path:
    """Copy a published file and return the copy, once it has the bytes that were published."""
    try:
        shutil.copyfile(path, copy)
    except FileNotFoundError as e:
        raise LocalFault(f"{path.parent.name} was deleted meanwhile, to make room for newer ones; try again") from e
    if file_digest(copy) != artifact.digest:
        raise LocalFault(f"{path} is damaged on disk; export another version")
    return copy


@contextmanager
def _building(out: Path) -> Generator[Path]:
    """Give a folder that becomes `out` when the block succeeds, and nothing otherwise."""
    out.parent.mkdir(parents=True, exist_ok=True)
    building = out.parent / f".{out.name}.{secrets.token_hex(4)}"
    building.mkdir()
    try:
        yield building
        # Some libraries make files that nobody else may read. The folder itself has what the person's umask allows.
        mode = stat.S_IMODE(building.stat().st_mode) & 0o666
        for path in building.iterdir():
            path.chmod(mode)
        building.rename(out)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _copy_model(folder: RunFolder, target: Path) -> None:
    for path in sorted(folder.model.iterdir()):
        if path.suffix != ".safetensors" and path.name != "model.safetensors.index.json":
            shutil.copyfile(path, target / path.name)


def _merge(base: Path, adapter: Path, target: Path) -> None:
    from echo_coordinator.trainer.adapter import merge

    merge(base, adapter, target)
