"""Whether a mirror works: each file of the run is looked at there, as a node does before it fetches."""

from pathlib import Path

import anyio

from echo_coordinator.config import load_settings
from echo_coordinator.run_folder import RunFolder
from echo_swarm.checkpoint.mirror import MirrorClient, Mirrors
from echo_swarm.checkpoint.mirror_http import MirrorFault
from echo_swarm.checkpoint.reach import Reach
from echo_swarm.checkpoint.shelf import read_manifests
from echo_swarm.errors import Unavailable, UsageError
from echo_swarm.identity import PeerId
from echo_swarm.manifest import Artifact, sha256

TIMEOUT_S = 20.0


def check_mirror(root: Path, url: str) -> int:
    """Return how many files are there whole, as far as their length and first piece tell.

    Raises:
        UsageError: that is no mirror's URL.
        Unavailable: what the server did to the first file that a node would not take.

    """
    run = RunFolder(root)
    run.require()
    run_id = load_settings(run).run.id
    mirrors = Mirrors(run_id, Reach.LOOPBACK)
    if mirrors.set([url]):
        raise UsageError(f"{url!r} is no base URL such as https://files.example.org/echo")
    artifacts = {
        artifact.digest: (version, artifact)
        for version, manifest in read_manifests(run.store / run_id).items()
        for artifact in manifest.artifacts
    }
    for version, artifact in artifacts.values():
        fault = anyio.run(_fault, mirrors, PeerId(url), artifact)
        if fault is not None:
            what = f"{artifact.file_name} of version {version}"
            raise Unavailable(f"nodes will not take {what} from {url}: it {fault}")
    return len(artifacts)


async def _fault(mirrors: Mirrors, source: PeerId, artifact: Artifact) -> str | None:
    good = False

    async def take(index: int, data: bytes) -> None:
        nonlocal good
        good = sha256(data) == artifact.piece_digest(index)

    try:
        async with MirrorClient(mirrors, source, artifact) as client:
            await client.have(artifact.digest, timeout_s=TIMEOUT_S)
            await client.pieces(artifact.digest, [0], take, timeout_s=TIMEOUT_S)
    except MirrorFault as e:
        return str(e)
    return None if good else "sends wrong bytes"
