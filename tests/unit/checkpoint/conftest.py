"""Builders for manifests and safetensors files."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.envelope import Signed, seal, unseal
from echo_swarm.identity import Identity
from echo_swarm.manifest import (
    MANIFEST_LIMITS,
    Artifact,
    ArtifactKind,
    CheckpointManifest,
    digest_of_pieces,
    sha256,
)

PIECE = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Run:
    identity: Identity = field(default_factory=Identity.generate)
    run_id: str = "0123456789abcdef" * 2

    def data(self, seed: int, pieces: float = 3.5) -> bytes:
        return Random(seed).randbytes(int(PIECE * pieces))

    def artifact(self, data: bytes, kind: ArtifactKind = ArtifactKind.GGUF, **changes: object) -> Artifact:
        pieces = [sha256(data[i : i + PIECE]) for i in range(0, len(data), PIECE)]
        values = {
            "kind": kind,
            "precision": "float32",
            "size_bytes": len(data),
            "digest": sha256(data),
            "piece_bytes": PIECE,
            "piece_digests": digest_of_pieces(pieces),
            "layout_digest": bytes(32),
        }
        return Artifact.model_validate(values | changes)

    def manifest(self, version: int, *artifacts: Artifact, **changes: object) -> CheckpointManifest:
        values = {
            "run_id": self.run_id,
            "policy_version": version,
            "parent_digest": None,
            "issued_at": 1000.0,
            "expires_at": 2000.0,
            "artifacts": artifacts or (self.artifact(self.data(version)),),
        }
        return CheckpointManifest.model_validate(values | changes)

    def sealed(self, version: int, *artifacts: Artifact, signer: Identity | None = None, **changes: object) -> bytes:
        return seal(signer or self.identity, self.manifest(version, *artifacts, **changes))

    def signed(self, version: int, *artifacts: Artifact, **changes: object) -> Signed[CheckpointManifest]:
        return unseal(self.sealed(version, *artifacts, **changes), CheckpointManifest, MANIFEST_LIMITS)

    def fill(self, store: VersionStore, version: int, data: bytes, **changes: object) -> Signed[CheckpointManifest]:
        """Put a whole version into a store."""
        artifact = self.artifact(data, **changes)
        signed = self.signed(version, artifact)
        store.add(signed)
        partial = store.open_partial(version, artifact)
        for index in range(artifact.piece_count):
            partial.write(index, data[index * PIECE : (index + 1) * PIECE])
        assert store.finish_partial(partial)
        store.close_partial(partial)
        return signed


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def store(tmp_path: Path, run: Run) -> VersionStore:
    return VersionStore(tmp_path, run.run_id)


def safetensors_bytes(entries: dict[str, object] | str, data: bytes) -> bytes:
    text = entries if isinstance(entries, str) else json.dumps(entries)
    return struct.pack("<Q", len(text.encode())) + text.encode() + data


@pytest.fixture
def safetensors() -> Callable[[dict[str, object] | str, bytes], bytes]:
    return safetensors_bytes
