"""Where a run lives on disk. Copy the folder, and the run continues on the other machine.

RUN/run.toml         settings, for people to edit
RUN/keys/run.key     the run's key (mode 0600): signs manifests, and is the coordinator's identity
RUN/keys/succession.bin  how earlier keys were succeeded (next.key: of a rotation under way); see `run_keys`
RUN/state.db         leases, replay buffer, ledger of what was trained, counters
RUN/run.manifest     signed RunManifest
RUN/epoch.json       which start of a coordinator this is; see `epochs`
RUN/peers.json       where peers could be reached lately: ways back into the network from another machine
RUN/store/           published versions
RUN/checkpoints/     trainer checkpoints (weights, optimizer, schedule, what was consumed); base/ in a LoRA run
RUN/batches/         the batch being trained
RUN/gguf/            files for llama.cpp under way to the store
RUN/logs/            one file a child process
RUN/metrics.jsonl    one line an update
RUN/last_status.json the status every few seconds, for when it is not running any more
RUN/last_end.json    how the coordinator ended, absent while it runs
RUN/control.json     how to reach the running coordinator (absent when it is not running)
"""

import contextlib
import fcntl
import json
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo_swarm.checkpoint.files import explained, write_atomically
from echo_swarm.errors import LocalFault, UsageError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside a run's folder."""

    root: Path

    @property
    def settings(self) -> Path:
        """run.toml."""
        return self.root / "run.toml"

    @property
    def key(self) -> Path:
        """The run's private key."""
        return self.root / "keys" / "run.key"

    @property
    def next_key(self) -> Path:
        """The private key that is to be the run's."""
        return self.root / "keys" / "next.key"

    @property
    def successions(self) -> Path:
        """How the run's earlier keys were succeeded."""
        return self.root / "keys" / "succession.bin"

    @property
    def database(self) -> Path:
        """SQLite file."""
        return self.root / "state.db"

    @property
    def model(self) -> Path:
        """The model that the run began with."""
        return self.root / "model"

    @property
    def last_status(self) -> Path:
        """RunStatus as last written down, at the latest when the coordinator ended."""
        return self.root / "last_status.json"

    @property
    def last_end(self) -> Path:
        """How the coordinator ended; see `ending`."""
        return self.root / "last_end.json"

    @property
    def run_manifest(self) -> Path:
        """Envelope of the RunManifest."""
        return self.root / "run.manifest"

    @property
    def epoch(self) -> Path:
        """What is known of epochs."""
        return self.root / "epoch.json"

    @property
    def peers(self) -> Path:
        """Addresses of peers that were met."""
        return self.root / "peers.json"

    @property
    def store(self) -> Path:
        """Published versions."""
        return self.root / "store"

    @property
    def checkpoints(self) -> Path:
        """Trainer checkpoints."""
        return self.root / "checkpoints"

    @property
    def base(self) -> Path:
        """The model that the adapters of a LoRA run apply to; written by the trainer."""
        return self.checkpoints / "base" / "model.safetensors"

    @property
    def batches(self) -> Path:
        """Batch files handed to the trainer."""
        return self.root / "batches"

    @property
    def logs(self) -> Path:
        """Logs of child processes."""
        return self.root / "logs"

    @property
    def metrics(self) -> Path:
        """One JSON object an update."""
        return self.root / "metrics.jsonl"

    @property
    def control(self) -> Path:
        """Address of the running coordinator's control socket."""
        return self.root / "control.json"

    def require(self) -> None:
        """Raise UsageError unless this is a run made by `echo-coordinator init`."""
        if not self.settings.is_file():
            raise UsageError(f"{self.root} is no run (no run.toml); make one with: echo-coordinator init {self.root}")

    @contextmanager
    def locked(self) -> Generator[None]:
        """Hold the folder for one coordinator. Raises UsageError when another one runs on it, LocalFault."""
        path = self.root / "lock"
        try:
            file = path.open("w")
        except OSError as e:
            raise LocalFault(f"cannot write {path}: {e.strerror}") from e
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                raise UsageError(
                    f"a coordinator already runs on {self.root}; stop it with: echo-coordinator stop {self.root}"
                ) from e
            yield

    def wait_free(self, timeout_s: float) -> bool:
        """Return whether no coordinator holds the folder, as soon as that is so, after `timeout_s` at the latest."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                with self.locked():
                    return True
            except UsageError:
                if time.monotonic() > until:
                    return False
                time.sleep(0.05)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace `path` with a JSON object, as a whole."""
    write_atomically(path, json.dumps(value, indent=2).encode() + b"\n")


def append_line(path: Path, value: dict[str, Any]) -> None:
    """Append one JSON object as a line. Raises StorageFull, LocalFault."""
    with explained(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value) + "\n")


def remove_quietly(path: Path) -> None:
    """Delete a file that may not be there."""
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
