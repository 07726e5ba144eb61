"""A process that serves and fetches one file of so many bytes, and prints how far its memory grew by the way, in bytes.

    checkpoint_memory_child.py <folder> <bytes of the file> <bytes of a piece>

The file is sparse, so that making it takes no memory and little time; every piece travels, is hashed and written.
"""

import hashlib
import resource
import sys
from pathlib import Path

import anyio

from echo_swarm.checkpoint.fetch import Fetcher
from echo_swarm.checkpoint.serve import BlobServer
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.envelope import seal, unseal
from echo_swarm.identity import Identity
from echo_swarm.manifest import MANIFEST_LIMITS, Artifact, ArtifactKind, CheckpointManifest, digest_of_pieces, sha256
from echo_swarm.transport.memory import MemoryNetwork

RUN_ID = "0123456789abcdef" * 2


def describe(size: int, piece: int) -> Artifact:
    """The description of `size` zeros."""
    whole, block = hashlib.sha256(), bytes(piece)
    for _ in range(size // piece):
        whole.update(block)
    return Artifact(
        kind=ArtifactKind.GGUF,
        precision="f16",
        size_bytes=size,
        digest=whole.digest(),
        piece_bytes=piece,
        piece_digests=digest_of_pieces([sha256(block)] * (size // piece)),
        layout_digest=bytes(32),
    )


async def main(folder: Path, size: int, piece: int) -> None:
    artifact = describe(size, piece)
    manifest = CheckpointManifest(
        run_id=RUN_ID, policy_version=0, parent_digest=None, issued_at=1.0, expires_at=2.0, artifacts=(artifact,)
    )
    signed = unseal(seal(Identity.generate(), manifest), CheckpointManifest, MANIFEST_LIMITS)
    seeder, own = VersionStore(folder / "seeder", RUN_ID), VersionStore(folder / "own", RUN_ID)
    seeder.add(signed)
    with (seeder.version_folder(0) / artifact.file_name).open("wb") as file:
        file.truncate(size)
    assert seeder.verify(0, artifact.kind, artifact.precision)
    network = MemoryNetwork()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with (
        network.host(Identity.generate()) as far,
        network.host(Identity.generate()) as near,
        BlobServer(far, seeder),
    ):
        report = await Fetcher(near, own).fetch(signed, artifact, [far.peer_id])
    assert report.path is not None and report.bytes_by_source == {far.peer_id: size}
    print(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
