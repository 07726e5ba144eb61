"""One case of the version swap benchmark: a real coordinator and a real node, which follows version after version.

    SwapTrainer ─► run_coordinator, hivemind host (this process) ─► stream ─► echo-node join (a process) ─► backend
                        │ leases, pushes: without pause, also while a version is fetched
                        └─ copies over the same stream, flushing and hashing, under the same load: `Limits`

What a swap took, and where the time went, is what the node itself says (`echo_node.swaps`).
"""

import hashlib
import json
import os
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import msgpack
import psutil
from anyio import to_thread

from benchmarks._swap_copy import Copier, open_copier, serve_copies
from benchmarks._swap_trainer import MadeUpPrompts, SwapTrainer, Versions
from echo_coordinator.commands.network import open_network
from echo_coordinator.config import (
    EnvironmentSection,
    EvaluationSection,
    NetworkSection,
    PublishSection,
    RunSection,
    RunSettings,
)
from echo_coordinator.coordinator import Children, Coordinator, run_coordinator
from echo_coordinator.demo.processes import Peer, Peers
from echo_coordinator.run_folder import RunFolder
from echo_coordinator.state.counters import TOTAL
from echo_coordinator.state.probe_settings import ProbeSettings
from echo_coordinator.state.work_settings import WorkSettings
from echo_coordinator.trainer.settings import LoraSettings
from echo_node.backends.renewing import resident_bytes
from echo_node.status import LocalStatus, read_statuses
from echo_node.swaps import Swap
from echo_swarm.children import last_line
from echo_swarm.clock import SystemClock
from echo_swarm.errors import BackendFailed
from echo_swarm.identity import Identity
from echo_swarm.manifest import ArtifactKind

STEP_S = 300.0
"""A step of a case that takes longer hangs; a first start of vLLM with its self-test takes a minute."""
LOOK_S = 0.1
STALENESS = 256
"""So many batches may be sampled ahead: the node never lacks work."""
PROMPT_TOKENS = 48
GRACE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is swapped, and by what."""

    backend: str
    lora: bool
    gguf: str = ""
    """Precision of the GGUF files; empty: safetensors."""
    python: str = ""
    """Another interpreter for the backend."""

    @property
    def name(self) -> str:
        """Such as `llama_cpp q8_0, lora`."""
        return f"{self.backend}{f' {self.gguf}' if self.gguf else ''}, {'lora' if self.lora else 'full'}"

    @property
    def kind(self) -> ArtifactKind:
        """Of the file that changes."""
        if self.gguf:
            return ArtifactKind.LORA_GGUF if self.lora else ArtifactKind.GGUF
        return ArtifactKind.LORA if self.lora else ArtifactKind.SAFETENSORS


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What all cases have in common."""

    model: Path
    precision: str
    swaps: int
    limits: int
    """Swaps after which the bare copy and the bare hash are measured."""
    batch: int
    """Completions that the node runs at once."""
    tokens: int
    """Of the longest completion."""
    settle: int
    """Completions after a swap before the child's memory is looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The same bytes without a node, seconds."""

    copy_s: float
    """Over the stream, into a file."""
    flush_s: float
    """Of that file to the disk."""
    hash_s: float
    """sha256 of it."""


@dataclass(kw_only=True)
class Measured:
    """One case."""

    swaps: list[Swap] = field(default_factory=list[Swap])
    """The first is the join: not a swap."""
    limits: list[Limits] = field(default_factory=list[Limits])
    resident_bytes: list[int] = field(default_factory=list[int])
    """Of the backend's child, after each swap."""
    seconds: float = 0.0
    tokens: int = 0
    issued: int = 0
    """Completions that the coordinator leased to the node, until it was told to hand out no more."""
    returned: int = 0
    """Of these, accepted."""
    mistagged: int = 0
    """Whose artifact is none of the version that they name."""
    versions: int = 0
    """That completions came from."""
    files: list[Path] = field(default_factory=list[Path])
    """Versions in the node's store, the newest last."""
    base: Path | None = None


class Running:
    """A case that runs."""

    def __init__(self, case: Case, scale: Scale, folder: Path, trainer: SwapTrainer, coordinator: Coordinator) -> None:
        self.case = case
        self.scale = scale
        self.folder = folder
        self.trainer = trainer
        self.coordinator = coordinator
        self.peers = Peers(folder / "logs")
        self.state = folder / "node"
        self.node: Peer | None = None

    def join(self) -> None:
        """Start the node."""
        arguments = ["join", "--role", "inference", "--state-dir", str(self.state), "--listen", "/ip4/127.0.0.1/tcp/0"]
        arguments += ["--backend", f"{self.case.backend}:batch={self.scale.batch}"]
        arguments += ["--backend-python", self.case.python] if self.case.python else []
        self.node = self.peers.start("node", "echo_node.cli", [*arguments, str(self.coordinator.invite)])

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Return once `condition` holds. Raises BackendFailed when the node has ended or it takes too long."""
        assert self.node is not None
        with anyio.move_on_after(STEP_S):
            while not condition():
                if self.node.exit_code is not None:
                    raise BackendFailed(self.node.complaint() or "the node left")
                await anyio.sleep(LOOK_S)
            return
        raise BackendFailed(f"never happened: {what} ({last_line(self.node.log_path)}; log: {self.node.log_path})")

    @property
    def status(self) -> LocalStatus | None:
        """What the node last said about itself."""
        found = read_statuses(self.state, SystemClock())
        return found[0].status if found else None

    @property
    def accepted(self) -> int:
        """Completions that the coordinator took."""
        return self.coordinator.state.core.counters.get(TOTAL, "accepted")

    def has_loaded(self, version: int) -> bool:
        """Whether the node samples with a version."""
        return self.status is not None and self.status.loaded_version == version

    def backend_bytes(self) -> int:
        """Resident memory of the backend's child."""
        assert self.node is not None
        below = psutil.Process(self.node.process.pid).children(recursive=True)
        (child,) = (process for process in below if "echo_node.backends.serve" in process.cmdline())
        return resident_bytes(child.pid)

    def version_file(self, version: int) -> Path | None:
        """Return the file of a version in the node's store."""
        found = self.state.glob(f"runs/*/v*{version}/{self.case.kind.file_name.partition('.')[0]}*")
        return next((path for path in found if path.suffix in (".safetensors", ".gguf")), None)


async def measure(case: Case, scale: Scale, folder: Path, say: Callable[[str], None]) -> Measured:
    """Run one case in an empty folder."""
    lora = LoraSettings() if case.lora else None
    versions = await to_thread.run_sync(lambda: Versions(scale.model, precision=scale.precision, lora=lora))
    measured = Measured()
    async with _running(case, scale, folder, SwapTrainer(versions)) as (running, copier):
        running.join()
        for version in range(scale.swaps + 1):
            await _swap(running, version, measured)
            if 1 <= version <= scale.limits:
                measured.limits.append(await _limits(running, version, copier))
            say(f"version {version}: {measured.resident_bytes[-1] >> 20} MiB")
        await _finish(running, measured)
    return measured


async def _swap(running: Running, version: int, measured: Measured) -> None:
    if version:
        running.trainer.next_version()
    await running.until(lambda: running.has_loaded(version), f"version {version} is loaded")
    settled = running.accepted + running.scale.settle
    await running.until(lambda: running.accepted >= settled, f"completions of version {version}")
    measured.resident_bytes.append(running.backend_bytes())


async def _limits(running: Running, version: int, copier: Copier) -> Limits:
    """Copy, flush and hash what the node has just fetched, while it goes on sampling."""
    source = running.version_file(version)
    assert source is not None, f"version {version} is not in the node's store"
    copy_s = await copier.copy(source)
    flush_s, hash_s = await to_thread.run_sync(_flush_and_hash, running.folder / "copy")
    return Limits(copy_s=copy_s, flush_s=flush_s, hash_s=hash_s)


def _flush_and_hash(path: Path) -> tuple[float, float]:
    began = time.perf_counter()
    with path.open("r+b", buffering=0) as file:
        os.fsync(file.fileno())
    flushed = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        hashlib.file_digest(file, "sha256")
    return flushed - began, time.perf_counter() - flushed


async def _finish(running: Running, measured: Measured) -> None:
    """Let what is leased come back, ask the node to leave, and read what it says."""
    state = running.coordinator.state
    await state.set_paused(True)
    await running.until(lambda: not state.core.leases.total_in_flight(), "everything that was leased comes back")
    assert running.node is not None
    await to_thread.run_sync(lambda: running.peers.end(grace_s=GRACE_S))
    if complaint := running.node.complaint():
        raise BackendFailed(complaint)
    status = running.status
    assert status is not None
    measured.swaps = list(status.swaps)
    measured.tokens = status.tokens
    measured.seconds = status.written_at - status.started_at
    files = [running.version_file(version) for version in range(1, running.scale.swaps + 1)]
    measured.files = [path for path in files if path is not None]
    measured.base = _base(running) if running.case.lora else None


def _base(running: Running) -> Path:
    found = [*running.state.glob("runs/*/v*0/model*")]
    return next(path for path in found if path.suffix in (".safetensors", ".gguf"))


def count(database: Path, measured: Measured) -> None:
    """Read from a coordinator that has ended what was leased, what came back, and under which name."""
    with closing(sqlite3.connect(database)) as opened:
        for attempts, verdicts in opened.execute("SELECT attempts, verdicts FROM leases"):
            measured.issued += len(msgpack.unpackb(attempts, strict_map_key=False))
            judged = msgpack.unpackb(verdicts, strict_map_key=False)
            measured.returned += sum(reason == "accepted" for _, reason, _ in judged.values())
        artifacts = {
            version: {digests[i : i + 32] for i in range(0, len(digests), 32)}
            for version, digests in opened.execute("SELECT version, artifact_digests FROM versions")
        }
        rows = opened.execute("SELECT oldest_version, newest_version, artifact_digest FROM trajectories").fetchall()
    seen = Counter(oldest for oldest, _, _ in rows)
    measured.versions = len(seen)
    measured.mistagged = sum(
        oldest != newest or digest not in artifacts.get(oldest, ()) for oldest, newest, digest in rows
    )


@asynccontextmanager
async def _running(
    case: Case, scale: Scale, folder: Path, trainer: SwapTrainer
) -> AsyncGenerator[tuple[Running, Copier]]:
    run = RunFolder(folder / "run")
    settings = _settings(case, scale)
    run.model.mkdir(parents=True)
    run.logs.mkdir()
    for name in ("config.json", "model.safetensors"):
        (run.model / name).symlink_to(scale.model.resolve() / name)
    identity = Identity.generate()
    vocabulary = json.loads((run.model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    scorers = MadeUpPrompts(tokens=PROMPT_TOKENS, vocabulary=vocabulary)
    children = Children(open_trainer=trainer.open, open_scorers=scorers.open)
    async with (
        open_network(settings, identity) as (host, directory),
        run_coordinator(run, settings, identity, host, directory, children) as coordinator,
    ):
        await serve_copies(host)
        with anyio.fail_after(STEP_S):
            while coordinator.state.core.versions.published is None:
                await coordinator.state.wait_changed(1.0)
        running = Running(case, scale, folder, trainer, coordinator)
        try:
            async with open_copier(f"{host.addresses[0]}", folder) as copier:
                yield running, copier
        finally:
            running.peers.end(grace_s=1.0)


def _settings(case: Case, scale: Scale) -> RunSettings:
    return RunSettings(
        run=RunSection(id=secrets.token_hex(16), name="version-swap"),
        environment=EnvironmentSection(name="made_up", max_prompt_tokens=PROMPT_TOKENS),
        work=WorkSettings(
            group_size=4,
            groups_per_update=2,
            max_staleness=STALENESS,
            max_tokens=scale.tokens,
            no_signal="keep",
            beat_s=1.0,
            retain_updates=10_000,
        ),
        lora=LoraSettings() if case.lora else None,
        evaluation=EvaluationSection(every=0),
        probes=ProbeSettings(prompts=0),
        publish=PublishSection.model_validate(
            {"precision": scale.precision, "gguf": (case.gguf,) if case.gguf else ()}
        ),
        network=NetworkSection(listen=("/ip4/127.0.0.1/tcp/0",)),
    )
