"""What a node is told by the person who starts it, and where it keeps its things.

    <state dir>/
        identity.key          the node's key: back it up
        identity.lock         held while a node with this key runs
        runs/<run id>/
            outbox.sqlite     finished work that waits for its verdicts, and the counters
            run.bin head.bin v…/  the run, the highest version trusted, the versions held (see checkpoint.store)
            peers.json        where peers and the coordinator could be reached lately
            status.json       what `echo-node status` reads
            backend.log       what the sampling process wrote to stderr

Settings come from flags alone; only the entry point looks at the environment, to find the state folder.
"""

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from echo_swarm.addresses import ListenAddress
from echo_swarm.errors import SettingsError
from echo_swarm.manifest import ArtifactKind
from echo_swarm.plain_errors import problems
from echo_swarm.work import Role

PATIENCE_S = 60.0
KEYS = "keys.bin"
"""In a run's folder; see `StatePaths.keys`."""
MIN_MBIT = 0.5
"""A smaller limit would make peers take the node for dead."""


class NodeConfig(BaseModel):
    """Settings of `echo-node join`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    state_dir: Path
    role: Role = Role.INFERENCE
    backend: str = "auto"
    """`auto` lets the device probe choose; else a name, with settings if need be: `torch:device=cpu`."""
    backend_python: Path | None = None
    """Interpreter of another environment that runs the backend; None: the node's own."""
    batch: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Completions run at once; None lets the device probe choose."""
    listen: tuple[ListenAddress, ...] = ()
    """Multiaddresses to listen on; empty: any free port."""
    outbound_only: bool = False
    """Accept no incoming connections and store no keys for others."""
    patience_s: Annotated[float, Field(ge=0, le=86_400)] | None = None
    """How long to try to reach the run when joining; None: PATIENCE_S, or without end if this machine knows the run.
    Once joined, a node waits for its coordinator without end."""
    max_outbox_bytes: Annotated[int, Field(ge=1 << 20)] = 256 << 20
    max_store_bytes: Annotated[int, Field(ge=1 << 20)] | None = None
    """Room for model versions; None: what the disk has."""
    use_mirrors: bool = True
    """Whether to fetch from the HTTP mirrors that the run names."""
    private_mirrors: bool = False
    """Whether these may be at private and loopback addresses, though the run itself is not."""
    private_peers: bool = False
    """Whether peers may be dialled at private addresses that they or others give, though the run itself is public."""
    hold: Annotated[tuple[ArtifactKind, ...], Field(min_length=1)] | None = None
    """Of a seeder: the kinds of files that it stores and serves; None: all."""
    max_upload_mbit: Annotated[float, Field(ge=MIN_MBIT, le=1e6)] | None = None
    """Pieces of versions to other peers, in Mbit/s; None: no limit. What is sampled is small and not limited."""
    max_download_mbit: Annotated[float, Field(ge=MIN_MBIT, le=1e6)] | None = None
    """Pieces of versions from others, in Mbit/s; None: no limit."""

    def patience(self, *, known: bool) -> float:
        """Return `patience_s`, or what it is when nobody said; `known`: whether the run's description is on disk."""
        if self.patience_s is not None:
            return self.patience_s
        return math.inf if known else PATIENCE_S

    @field_validator("backend_python")
    @classmethod
    def _must_run(cls, path: Path | None) -> Path | None:
        if path is not None and not (path.is_file() and os.access(path, os.X_OK)):
            raise ValueError(f"{path} is not a program; name an interpreter, such as .venv-vllm/bin/python")
        # Not resolved: a virtual environment's interpreter is a link, and knows its packages by the link's place.
        return None if path is None else path.absolute()

    @model_validator(mode="after")
    def _mirrors_or_not(self) -> Self:
        if self.private_mirrors and not self.use_mirrors:
            raise ValueError("--no-mirrors and --private-mirrors exclude each other; leave one out")
        return self

    @model_validator(mode="after")
    def _listen_or_not(self) -> Self:
        if self.outbound_only and self.listen:
            raise ValueError(
                "--outbound-only and --listen exclude each other: the one accepts no connections, the other says "
                "where to accept them; leave one out"
            )
        return self


def make_config(**values: object) -> NodeConfig:
    """Check settings that a person gave. Raises SettingsError, naming the first that is wrong."""
    try:
        return NodeConfig.model_validate(values)
    except ValidationError as e:
        field, said = problems(e)[0]
        name = field.partition(".")[0].replace("_", "-").removesuffix("-mbit").removesuffix("-s")
        raise SettingsError(f"--{name}: {said}" if name else said) from e


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePaths:
    """Where one node keeps what belongs to one run."""

    state_dir: Path
    run_id: str

    @property
    def run_dir(self) -> Path:
        """Everything of this run."""
        return run_dirs(self.state_dir) / self.run_id

    @property
    def outbox(self) -> Path:
        """Finished work and counters."""
        return self.run_dir / "outbox.sqlite"

    @property
    def peers(self) -> Path:
        """Addresses of peers that were met, the coordinator's among them."""
        return self.run_dir / "peers.json"

    @property
    def keys(self) -> Path:
        """How the run's key in the invite was succeeded; served from there (`VersionStore.keys`)."""
        return self.run_dir / KEYS

    @property
    def status(self) -> Path:
        """What the node last said about itself."""
        return self.run_dir / "status.json"

    @property
    def backend_log(self) -> Path:
        """The sampling process' stderr."""
        return self.run_dir / "backend.log"


def run_dirs(state_dir: Path) -> Path:
    """Return the folder that holds one folder a run."""
    return state_dir / "runs"


def identity_key(state_dir: Path) -> Path:
    """Return where the node's key lies."""
    return state_dir / "identity.key"


def default_state_dir(environment: Mapping[str, str], *, platform: str = sys.platform) -> Path:
    """Return the user's state folder for this program, outside any checkout or virtual environment.

    `environment` is the caller's `os.environ`: XDG_STATE_HOME on Linux, LOCALAPPDATA on Windows.
    """
    if platform == "win32":
        base = environment.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif platform == "darwin":
        base = str(Path.home() / "Library" / "Application Support")
    else:
        base = environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "echo-swarm"
