"""Signed descriptions of a run and of each model version."""

import hashlib
import math
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, model_validator

from echo_swarm.codec import Limits
from echo_swarm.epoch import EpochEnvelope
from echo_swarm.wire import U32, U63, Digest, Message, Name, ProtocolVersion, PublicKeyBytes, RunId, Seconds, Text, Word

MANIFEST_LIMITS = Limits(max_bytes=4 << 20, max_items=1024, max_depth=6)
MAX_ARTIFACT_BYTES = 1 << 41
BASE_VERSION = 0
"""The version that carries the model to which a run's adapters apply, in every format there is."""
MIN_PIECE_BYTES = 1 << 16
MAX_PIECE_BYTES = 4 << 20
MAX_RUN_PIECES = 16
MAX_RUN_BYTES = 1 << 20
PIECE_DIGEST_BYTES = 32


class ArtifactKind(StrEnum):
    """The formats that are ever loaded. Each has a fixed file name; see also `Artifact.file_name`."""

    SAFETENSORS = "safetensors"
    GGUF = "gguf"
    LORA = "lora"
    LORA_GGUF = "lora-gguf"
    DELTA = "delta"

    @property
    def file_name(self) -> str:
        """The name of such a file inside a version's folder. Never taken from a message."""
        return _FILE_NAMES[self]


ADAPTER_KINDS = (ArtifactKind.LORA, ArtifactKind.LORA_GGUF)
"""Files that make a model only together with the base that `Artifact.base_digest` names."""
DELTA_TARGETS = (ArtifactKind.SAFETENSORS, ArtifactKind.GGUF)
"""Files that may also travel as their difference from the version before."""

_FILE_NAMES = {
    ArtifactKind.SAFETENSORS: "model.safetensors",
    ArtifactKind.GGUF: "model.gguf",
    ArtifactKind.LORA: "adapter.safetensors",
    ArtifactKind.LORA_GGUF: "adapter.gguf",
    ArtifactKind.DELTA: "delta.bin",
}


GGUF_PRECISIONS = ("f32", "f16", "bf16", "q8_0", "q4_0")
"""Those that a coordinator writes. A version may have one file of each."""


def artifact_file_name(kind: ArtifactKind, precision: str) -> str:
    """Return an artifact's name inside a version's folder: one of a fixed set, whatever a message says."""
    if precision in GGUF_PRECISIONS and kind is ArtifactKind.GGUF:
        return f"model-{precision}.gguf"
    if precision in GGUF_PRECISIONS and kind is ArtifactKind.DELTA:
        return f"delta-{precision}.bin"
    return kind.file_name


class Artifact(Message):
    """One file of a version, cut into pieces that are verified one by one."""

    kind: Annotated[ArtifactKind, *Word]
    precision: Name
    size_bytes: Annotated[int, Field(ge=1, le=MAX_ARTIFACT_BYTES)]
    digest: Digest
    """sha256 of the whole file."""
    piece_bytes: Annotated[int, Field(ge=MIN_PIECE_BYTES, le=MAX_PIECE_BYTES)]
    """Length of every piece but the last."""
    piece_digests: Annotated[bytes, Field(max_length=2 << 20)]
    """sha256 of each piece, concatenated."""
    layout_digest: Digest
    """For safetensors and lora: `checkpoint.safetensors_file.layout_digest`; binds names, types, shapes. Else zeros."""
    base_digest: Digest | None = None
    """For deltas and adapters: the artifact this one applies to; for adapters the safetensors one of BASE_VERSION."""
    base_version: U63 | None = None
    """For deltas: the version that has the base."""
    target_digest: Digest | None = None
    """For deltas: the artifact of the same version that this one makes of the base. It has the same precision."""

    @model_validator(mode="after")
    def _pieces_fit(self) -> "Artifact":
        if len(self.piece_digests) != PIECE_DIGEST_BYTES * self.piece_count:
            raise ValueError("number of piece digests does not fit the size")
        return self

    @property
    def file_name(self) -> str:
        """The name inside a version's folder."""
        return artifact_file_name(self.kind, self.precision)

    @property
    def piece_count(self) -> int:
        """Number of pieces, at least 1."""
        return math.ceil(self.size_bytes / self.piece_bytes)

    def piece_digest(self, index: int) -> bytes:
        """Return the sha256 of piece `index`. Raises IndexError."""
        self._check_index(index)
        return self.piece_digests[index * PIECE_DIGEST_BYTES : (index + 1) * PIECE_DIGEST_BYTES]

    def piece_length(self, index: int) -> int:
        """Return the length in bytes of piece `index`. Raises IndexError."""
        self._check_index(index)
        return min(self.piece_bytes, self.size_bytes - index * self.piece_bytes)

    def run_length(self, index: int, count: int) -> int:
        """Return the length in bytes of piece `index` and the `count - 1` after it, as far as there are so many."""
        self._check_index(index)
        return min(self.piece_bytes * count, self.size_bytes - index * self.piece_bytes)

    @property
    def run_pieces(self) -> int:
        """How many pieces that lie side by side may be asked for, read and written at once."""
        return max(1, min(MAX_RUN_PIECES, MAX_RUN_BYTES // self.piece_bytes))

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.piece_count:
            raise IndexError(f"piece {index} of {self.piece_count}")


class CheckpointManifest(Message):
    """One model version. Signed by the run's key; counts only if `trust.TrustedHead` accepts it."""

    run_id: RunId
    policy_version: U63
    parent_digest: Digest | None
    """Payload digest of the manifest before it; None for version 0."""
    issued_at: Seconds
    expires_at: Seconds
    """After this, a node warns that the coordinator has gone quiet; it does not fall back to an older version."""
    artifacts: Annotated[tuple[Artifact, ...], Field(strict=False, min_length=1, max_length=16)]
    epoch: EpochEnvelope | None = None
    """Of the coordinator that published it; None from before there were epochs."""

    def artifact(self, kind: ArtifactKind, precision: str | None = None) -> Artifact | None:
        """Return the artifact of that kind (and precision, if one is given), or the first of several; None if none."""
        return next((a for a in self.artifacts if a.kind == kind and precision in (None, a.precision)), None)


class RunManifest(Message):
    """What a run is. Signed once by the run's key; its id is in the invite."""

    protocol: ProtocolVersion
    run_id: RunId
    name: Name
    created_at: Seconds
    publisher_key: PublicKeyBytes
    mode: Literal["sequential", "async"]
    max_staleness: Annotated[int, Field(ge=0, le=1024)]
    """Versions. 0 exactly when `mode` is sequential."""
    model_config_json: Annotated[str, Field(max_length=65_536)]
    """The model's `config.json`, from which a backend builds the architecture. No code is ever loaded from a model."""
    parameters: U63
    vocabulary_size: Annotated[int, Field(ge=1, le=2**31)]
    """Ids at or above it are refused. Ids below it that no tokenizer uses are accepted: models can sample them."""
    end_token_ids: Annotated[tuple[U32, ...], Field(strict=False, min_length=1, max_length=64)]
    max_prompt_tokens: Annotated[int, Field(ge=1, le=1 << 17)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 17)]
    environment: Name
    description: Text = ""
    mirrors: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=512)], ...], Field(strict=False, max_length=8)
    ] = ()
    """Base URLs of HTTP servers that have the files of versions; see `checkpoint.mirror`."""
    require_followed_seeds: bool = False
    """Only backends of `trajectory.DRAW_BY_SEED` get work; others are refused at the hello."""


def digest_of_pieces(piece_digests: list[bytes]) -> bytes:
    """Return the concatenation stored in `Artifact.piece_digests`."""
    return b"".join(piece_digests)


def sha256(data: bytes | memoryview) -> bytes:
    """Return the digest used for artifacts and pieces."""
    return hashlib.sha256(data).digest()
