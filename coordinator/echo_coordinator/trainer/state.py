"""Checkpoints: one folder per version, complete or not there at all. No torch.

    v00000013/  model.safetensors      float32 weights; in a LoRA run instead adapter.safetensors, over the file base/
                optimizer.safetensors  AdamW's moments and step counts
                published/model.safetensors   only if published in another precision
                state.json             written last; names every file with its size and sha256

A folder is written under another name, flushed to disk, renamed, and read again before anybody hears of it. Learning
rate and the order of minibatches follow from the seed and the update's number (`schedule`, `rows`), so `state.json`
holds no generator states.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from echo_swarm.checkpoint.files import make_folder, remove_folder, sync_folder, sync_tree
from echo_swarm.errors import BackendFailed, StorageFull

STATE_FILE = "state.json"
WEIGHTS_FILE = "model.safetensors"
ADAPTER_FILE = "adapter.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
PUBLISHED_FILE = f"published/{WEIGHTS_FILE}"
_FORMAT = 1
_NAME = re.compile(r"v(\d{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Where training stands, beside weights and optimizer."""

    update: int = 0
    """Updates done."""
    policy_version: int = 0
    seed: int = 0
    """That minibatch orders are drawn from."""
    learning_rate: float | None = None
    """Of the last update; for people."""
    consumed_groups: tuple[int, ...] = ()
    """Ids of the groups that the last update consumed: they commit with its weights."""
    data_position: dict[str, Any] = field(default_factory=dict[str, Any])
    """The coordinator's own, as it came with the last batch."""
    skipped: dict[str, int] = field(default_factory=dict[str, int])
    """Updates that left the weights as they were, by cause."""
    rolled_back_to: int | None = None
    """The version that these weights and moments were taken from again; None when an update made them."""
    base_digest: str = ""
    """sha256 of the model that the adapter applies to, in hexadecimal digits; empty when all weights are trained."""

    @property
    def weights_file(self) -> str:
        """Name of the file with what is trained."""
        return ADAPTER_FILE if self.base_digest else WEIGHTS_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete one on disk."""

    folder: Path
    state: TrainerState

    @property
    def weights_path(self) -> Path:
        """The file to publish."""
        published = self.folder / PUBLISHED_FILE
        return published if published.is_file() else self.folder / self.state.weights_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What is on disk."""

    checkpoint: Checkpoint | None
    """The newest intact one; None in a fresh folder."""
    warnings: tuple[str, ...]
    """One for each newer one that had to be passed over."""


def folder_name(policy_version: int) -> str:
    """Return `v00000013` for 13."""
    return f"v{policy_version:08d}"


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def complete(self) -> list[Checkpoint]:
        """Return those whose files are all there with the right sizes, oldest first. Contents are not read."""
        found: list[Checkpoint] = []
        for path in self._folders():
            state = _read_state(path, contents=False)
            if isinstance(state, TrainerState):
                found.append(Checkpoint(folder=path, state=state))
        return found

    def newest(self) -> Found:
        """Return the newest checkpoint whose files have the right digests, and a warning for each passed over.

        Raises:
            BackendFailed: there are checkpoints and none is intact. Starting at 0 again is for a person to decide.

        """
        warnings: list[str] = []
        for path in reversed(self._folders()):
            state = _read_state(path, contents=True)
            if isinstance(state, TrainerState):
                return Found(checkpoint=Checkpoint(folder=path, state=state), warnings=tuple(warnings))
            warnings.append(f"checkpoint {path.name} is damaged ({state}); falling back to the one before it")
        if warnings:
            raise BackendFailed(
                f"no checkpoint in {self.folder} is intact ({'; '.join(warnings)}). Restore one from a backup, or move "
                "the folder away to begin again from the model"
            )
        return Found(checkpoint=None, warnings=())

    def intact(self, policy_version: int) -> Checkpoint | str:
        """Return a version's checkpoint, or what is wrong with it; reads all of it."""
        folder = self.folder / folder_name(policy_version)
        state = _read_state(folder, contents=True)
        return state if isinstance(state, str) else Checkpoint(folder=folder, state=state)

    def write(self, state: TrainerState, fill: Callable[[Path], None]) -> Checkpoint:
        """Write a checkpoint durably and read it again. `fill` writes the tensor files into the folder it is given.

        Raises:
            StorageFull: no room; nothing is left behind.
            BackendFailed: what was read again is not what was written.

        """
        make_folder(self.folder)
        final = self.folder / folder_name(state.policy_version)
        temporary = self.folder / f".{final.name}.{os.getpid()}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            fill(temporary)
            _write_state(temporary, state)
        except OSError as e:
            shutil.rmtree(temporary, ignore_errors=True)
            free = shutil.disk_usage(self.folder).free
            raise StorageFull(f"cannot write checkpoint {final}: {e} ({free >> 20} MiB free)") from e
        if final.exists():
            # Only a damaged one can be here: the newest intact version is where we started from.
            shutil.rmtree(final)
        temporary.rename(final)
        sync_folder(self.folder)
        again = _read_state(final, contents=True)
        if again != state:
            raise BackendFailed(f"checkpoint {final} could not be read back: {again}")
        return Checkpoint(folder=final, state=state)

    def prune(self, keep: int, *, protect: Collection[int] = ()) -> list[str]:
        """Delete all complete checkpoints but the newest `keep` (at least 1) and those in `protect`; return names."""
        removed: list[str] = []
        for checkpoint in self.complete()[: -max(keep, 1)]:
            if checkpoint.state.policy_version in protect:
                continue
            # Renamed first: half of one would be neither complete nor ever deleted.
            if remove_folder(checkpoint.folder, self.folder / f".{checkpoint.folder.name}.old.tmp"):
                removed.append(checkpoint.folder.name)
        return removed

    def sweep(self) -> None:
        """Delete what interrupted writes left behind. Only the one writer of the folder may call this."""
        for leftover in self.folder.glob(".v*.tmp"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _folders(self) -> list[Path]:
        if not self.folder.is_dir():
            return []
        return sorted(
            (path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)), key=lambda path: int(path.name[1:])
        )


def _write_state(folder: Path, state: TrainerState) -> None:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = {name: _fingerprint(folder / name) for name in names}
    content = {"format": _FORMAT, **asdict(state), "files": files}
    (folder / STATE_FILE).write_text(json.dumps(content, indent=1, sort_keys=True), encoding="utf-8")
    sync_tree(folder)


def _read_state(folder: Path, *, contents: bool) -> TrainerState | str:
    """Return the state, or what is wrong with the folder."""
    try:
        raw: dict[str, Any] = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        files: dict[str, dict[str, Any]] = raw.pop("files")
        if raw.pop("format") != _FORMAT:
            return f"{STATE_FILE} has another format"
        state = TrainerState(**raw)
        state = replace(state, consumed_groups=tuple(state.consumed_groups))
    except OSError as e:
        return f"{STATE_FILE}: {e.strerror or e}"
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        return f"{STATE_FILE} is empty or cut off: {e}"
    for name in (state.weights_file, OPTIMIZER_FILE, *files):
        problem = _problem(folder / name, files.get(name), contents=contents)
        if problem:
            return f"{name} {problem}"
    return state


def _problem(path: Path, expected: dict[str, Any] | None, *, contents: bool) -> str | None:
    if expected is None or not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size != expected["size"]:
        return f"has {size} bytes instead of {expected['size']}"
    if contents and _fingerprint(path) != expected:
        return "has other contents than were written"
    return None


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
