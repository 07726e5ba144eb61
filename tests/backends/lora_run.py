"""A whole LoRA run, as processes on loopback, with one node; and what PEFT says of every trajectory that it gave.

make_run ─► train_with: coordinator start, node join ─► both end by themselves ─► check_* read what is on disk
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from echo_coordinator.run_folder import RunFolder
from echo_coordinator.trainer.adapter import add_adapter, load_adapter
from echo_coordinator.trainer.model import load_model
from echo_coordinator.trainer.settings import LoraSettings
from echo_node.status import LocalStatus
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.codec import unpack_f32, unpack_u32
from echo_swarm.manifest import Artifact, ArtifactKind
from echo_swarm.status import RunStatus
from tests.e2e.support import plug_in
from tests.e2e.support.models import write_model
from tests.e2e.support.swarm import Swarm, make_swarm

UPDATES = 5
MEMBERS = 8
"""Completions an update trains on."""
NODE = "node"
DEADLINE_S = 900.0
"""For a whole run, also beside other work; only a failing test waits that long."""
LORA = LoraSettings(rank=4, alpha=16, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj"))
MODEL = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "num_hidden_layers": 3, "initializer_range": 0.1}
"""Heads as vLLM's kernels have them, and a base that is larger than all adapters of a run together."""


def make_run(folder: Path) -> Swarm:
    """Make a run that pays for sampling, with a learning rate at which versions differ from each other at a glance."""
    write_model(folder / "model", **MODEL)
    return make_swarm(
        folder,
        folder / "model",
        name=plug_in.NAME,
        environment=plug_in.install(folder / "environment"),
        run={"updates": UPDATES},
        # Every version is sampled, and nothing can become too old: what is refused is refused for what it is.
        work={"mode": "sequential", "max_staleness": 0, "max_tokens": 16},
        optimizer={"learning_rate": 0.01},
        lora=LORA.model_dump(),
        probes={"required": True},
        publish={"gguf": ["f32"], "keep_versions": UPDATES + 2, "keep_checkpoints": UPDATES + 2},
    )


def train_with(swarm: Swarm, backend: str, *, python: str = "") -> RunStatus:
    """Run to the end; return the coordinator's last word."""
    with swarm.start() as coordinator, swarm.join(NODE, backend=backend, python=python) as node:
        assert node.process.wait(DEADLINE_S) == 0, node.output()
        assert coordinator.process.wait(DEADLINE_S) == 0, coordinator.output()
        assert node.left_behind(timeout_s=10) == coordinator.left_behind(timeout_s=10) == []
    return RunStatus.model_validate_json(RunFolder(swarm.root).last_status.read_bytes())


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One accepted trajectory."""

    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: torch.Tensor
    oldest: int
    newest: int
    artifact_digest: bytes
    backend: str
    precision: str


def trajectories(swarm: Swarm) -> list[Given]:
    """Return all that were accepted, whether or not they were trained."""
    rows = swarm.rows(
        "SELECT prompt_ids, token_ids, logprobs, oldest_version, newest_version, artifact_digest, backend, precision "
        "FROM trajectories JOIN groups USING (group_id)"
    )
    return [
        Given(
            prompt=tuple(unpack_u32(prompt)),
            ids=tuple(unpack_u32(ids)),
            logprobs=torch.tensor(unpack_f32(logprobs).tolist()),
            oldest=oldest,
            newest=newest,
            artifact_digest=digest,
            backend=backend,
            precision=precision,
        )
        for prompt, ids, logprobs, oldest, newest, digest, backend, precision in rows
    ]


class Versions:
    """What PEFT computes with the adapter of each version, as the trainer left it."""

    def __init__(self, root: Path) -> None:
        folder = RunFolder(root)
        self._checkpoints = folder.checkpoints
        self._model: Any = load_model(folder.model, device=torch.device("cpu"), seed=0, gradient_checkpointing=False)
        add_adapter(self._model, LORA, 0)

    def take(self, version: int) -> None:
        """Compute with that version from now on."""
        load_adapter(self._model, LORA, self._checkpoints / f"v{version:08d}" / "adapter.safetensors")

    def largest_difference(self, given: Given) -> float:
        """Return the largest absolute difference of log-probabilities over a trajectory."""
        # So small a model gains nothing by threads, and on a busy machine they wait for each other.
        torch.set_num_threads(1)
        ids = torch.tensor([[*given.prompt, *given.ids]])
        with torch.no_grad():
            logits = self._model(input_ids=ids).logits[0, len(given.prompt) - 1 : -1]
        expected = torch.log_softmax(logits.double(), -1).gather(1, ids[0, len(given.prompt) :, None]).squeeze(1)
        return float((expected - given.logprobs).abs().max())


def published(swarm: Swarm, kind: ArtifactKind) -> Iterator[Artifact | None]:
    """Yield the artifact of that kind of each version."""
    (root,) = RunFolder(swarm.root).store.rglob("v00000000")
    store = VersionStore(RunFolder(swarm.root).store, root.parent.name)
    for version in range(UPDATES + 1):
        manifest = store.manifest(version)
        assert manifest is not None
        yield manifest.message.artifact(kind)


def check_trajectories(swarm: Swarm, status: RunStatus, *, kind: ArtifactKind, largest: float) -> None:
    """Check that each names the version and the file that sampled it, by what PEFT computes with that version."""
    adapters = list(published(swarm, kind))
    found = trajectories(swarm)
    assert status.accepted == len(found) == UPDATES * MEMBERS and status.rejected == {}
    assert Counter(given.newest for given in found) == dict.fromkeys(range(UPDATES), MEMBERS)
    versions, digests = Versions(swarm.root), [adapter.digest for adapter in adapters if adapter is not None]
    gaps = [[0.0] * len(digests) for _ in digests]
    for computed in range(len(digests)):
        versions.take(computed)
        for given in found:
            gaps[given.newest][computed] = max(gaps[given.newest][computed], versions.largest_difference(given))
    for version in range(UPDATES):
        assert {(g.oldest, g.artifact_digest) for g in found if g.newest == version} == {(version, digests[version])}
    worst = max(gaps[version][version] for version in range(UPDATES))
    # An update without a signal leaves the adapter as it was.
    pairs = [(v, other) for v in range(UPDATES) for other in range(len(digests)) if digests[v] != digests[other]]
    nearest = min(gaps[version][other] for version, other in pairs)
    print(f"{len(found)} trajectories: largest difference to PEFT {worst:.1e}, to another version's {nearest:.1e}")
    assert len(set(digests)) > UPDATES // 2
    assert worst <= largest and nearest > 30 * largest


def check_traffic(swarm: Swarm, base: ArtifactKind, kind: ArtifactKind) -> None:
    """Check that the node fetched the base once and beside it one adapter a version at most."""
    (status_file,) = (swarm.folder / NODE / "runs").glob("*/status.json")
    node = LocalStatus.model_validate_json(status_file.read_bytes())
    assert node.rejected == {} and node.pending == 0
    whole, *later = published(swarm, base)
    assert whole is not None and not any(later)
    adapters = sum(adapter.size_bytes for adapter in published(swarm, kind) if adapter is not None)
    assert adapters < whole.size_bytes <= node.bytes_fetched_coordinator <= whole.size_bytes + adapters
    assert node.bytes_fetched_peers == 0
    assert len(list((swarm.folder / NODE).rglob(whole.file_name))) == 1


def check_mismatch(swarm: Swarm, status: RunStatus, *, backend: str, precision: str, largest: float) -> None:
    """Check what the coordinator itself says of the difference: by a probe, and of each update's own samples."""
    (shown,) = status.classes
    (node,) = status.nodes
    assert (shown.backend, shown.precision, shown.probes, shown.set_aside) == (backend, precision, 1, 0)
    assert (node.precision, node.probe, {given.precision for given in trajectories(swarm)}) == (
        precision,
        "matches",
        {precision},
    )
    assert shown.gap_max is not None and shown.gap_max <= largest
    assert shown.trained_gap is None or shown.trained_gap <= largest
    assert [line["update"] for line in swarm.metrics()] == list(range(1, UPDATES + 1))
