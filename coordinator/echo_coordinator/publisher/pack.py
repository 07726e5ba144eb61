"""Copying a weights file into a store while hashing it: the whole and each piece. Blocking.

source ──► block of one piece ──► whole digest, write      (this thread)
                  └─────────────► piece digest             (worker threads; hashing lets go of the interpreter)
"""

import hashlib
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from echo_swarm.checkpoint.files import explained, publish_file, remove_file
from echo_swarm.checkpoint.safetensors_file import layout_digest, read_header
from echo_swarm.errors import LocalFault
from echo_swarm.manifest import (
    MAX_ARTIFACT_BYTES,
    Artifact,
    ArtifactKind,
    artifact_file_name,
    digest_of_pieces,
    sha256,
)

_WORKERS = 2
_MAX_PENDING = 8
"""Pieces waiting to be hashed; bounds memory."""
_SIZES = ((1 << 26, 1 << 16), (1 << 28, 1 << 18), (1 << 31, 1 << 20), (1 << 34, 2 << 20), (MAX_ARTIFACT_BYTES, 4 << 20))
"""(artifact up to, bytes a piece): small pieces spread faster, large ones keep the manifest small."""


def piece_bytes_for(size_bytes: int) -> int:
    """Return the piece size for an artifact: 64 KiB up to 64 MiB, 256 KiB up to 256 MiB, 1 MiB up to 2 GiB, ..."""
    return next(piece for limit, piece in _SIZES if size_bytes <= limit)


def pack(source: Path, folder: Path, *, kind: ArtifactKind, precision: str, base_digest: bytes | None) -> Artifact:
    """Copy `source` to its fixed name inside `folder`, durably, and return its description.

    Raises:
        MalformedMessage: a safetensors file that is none.
        StorageFull: no room; the copy is removed.
        LocalFault: it cannot be read, is empty, or was changed while it was copied.

    """
    path = folder / artifact_file_name(kind, precision)
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        size_bytes = source.stat().st_size
    except OSError as e:
        raise LocalFault(f"cannot read the weights {source}: {e.strerror}") from e
    if not 0 < size_bytes <= MAX_ARTIFACT_BYTES:
        raise LocalFault(f"the weights {source} have {size_bytes} bytes, expected 1 to {MAX_ARTIFACT_BYTES}")
    zeros = bytes(32)
    layout = layout_digest(read_header(source)) if kind in _WITH_LAYOUT else zeros
    piece_bytes = piece_bytes_for(size_bytes)
    with explained(temporary):
        try:
            whole, pieces = _copy(source, temporary, piece_bytes)
        except OSError:
            remove_file(temporary)
            raise
    if temporary.stat().st_size != size_bytes:
        remove_file(temporary)
        raise LocalFault(f"the weights {source} changed while they were copied")
    publish_file(temporary, path)
    return Artifact(
        kind=kind,
        precision=precision,
        size_bytes=size_bytes,
        digest=whole,
        piece_bytes=piece_bytes,
        piece_digests=digest_of_pieces(pieces),
        layout_digest=layout,
        base_digest=base_digest,
    )


_WITH_LAYOUT = {ArtifactKind.SAFETENSORS, ArtifactKind.LORA}


def reread(path: Path, artifact: Artifact) -> None:
    """Read a packed file back and compare everything the manifest will say. Raises LocalFault."""
    whole, pieces = _hash(path, artifact.piece_bytes)
    if whole != artifact.digest or digest_of_pieces(pieces) != artifact.piece_digests:
        raise LocalFault(f"{path} reads back other bytes than were written; check the disk")


def _copy(source: Path, target: Path, piece_bytes: int) -> tuple[bytes, list[bytes]]:
    with source.open("rb", buffering=0) as reader, target.open("wb", buffering=0) as writer:
        blocks = iter(lambda: reader.read(piece_bytes), b"")

        def written() -> Iterable[bytes]:
            for block in blocks:
                rest = memoryview(block)
                while rest:
                    rest = rest[writer.write(rest) :]
                yield block

        digests = _digests(written())
        os.fsync(writer.fileno())
    return digests


def _hash(path: Path, piece_bytes: int) -> tuple[bytes, list[bytes]]:
    with path.open("rb", buffering=0) as reader:
        return _digests(iter(lambda: reader.read(piece_bytes), b""))


def _digests(blocks: Iterable[bytes]) -> tuple[bytes, list[bytes]]:
    """Return the digest of the whole and of each block."""
    whole = hashlib.sha256()
    pieces: list[bytes] = []
    pending: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(_WORKERS) as pool:
        for block in blocks:
            pending.append(pool.submit(sha256, block))
            whole.update(block)
            if len(pending) >= _MAX_PENDING:
                pieces.append(pending.popleft().result())
    pieces += [future.result() for future in pending]
    return whole.digest(), pieces
