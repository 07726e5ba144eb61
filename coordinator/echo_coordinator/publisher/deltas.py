"""The files of a new version, once more as their difference from the version before, where that is smaller."""

import logging
from pathlib import Path

from echo_coordinator.publisher.pack import pack
from echo_swarm.checkpoint.delta.write import DeltaWriter
from echo_swarm.checkpoint.files import explained, remove_file
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.envelope import Signed
from echo_swarm.errors import LocalFault, StorageFull
from echo_swarm.manifest import DELTA_TARGETS, Artifact, ArtifactKind, CheckpointManifest

log = logging.getLogger(__name__)

MAX_SHARE = 0.75
"""Of the whole file's size. A larger delta would hardly be smaller for the network and cost all the same to apply."""


def make_deltas(
    store: VersionStore, before: Signed[CheckpointManifest], targets: list[Artifact], folder: Path
) -> list[Artifact]:
    """Write the deltas that are worth it beside `targets`, which lie in `folder`, and return their descriptions.

    A version is complete without them: what goes wrong here is logged, and nodes fetch whole files.
    """
    made: list[Artifact] = []
    for target in targets:
        if target.kind not in DELTA_TARGETS:
            continue
        try:
            delta = _make(store, before, target, folder)
        except (LocalFault, StorageFull) as e:
            log.warning("no delta from version %d: %s", before.message.policy_version, e)
            continue
        made.extend([delta] if delta else [])
    return made


def _make(store: VersionStore, before: Signed[CheckpointManifest], target: Artifact, folder: Path) -> Artifact | None:
    version = before.message.policy_version
    base = before.message.artifact(target.kind, target.precision)
    if base is None or base.size_bytes != target.size_bytes or base.digest == target.digest:
        return None
    base_path = store.verify(version, base.kind, base.precision, afresh=True)
    if base_path is None:
        return None
    max_bytes = int(MAX_SHARE * target.size_bytes)
    store.check_room(2 * max_bytes, "a delta")
    source = folder / f"{target.file_name}.delta.tmp"
    try:
        with explained(source):
            size = DeltaWriter(base_path, base, folder / target.file_name, target).write(source, max_bytes=max_bytes)
        if size is None:
            return None
        delta = pack(source, folder, kind=ArtifactKind.DELTA, precision=target.precision, base_digest=base.digest)
    finally:
        remove_file(source)
    return delta.model_copy(update={"base_version": version, "target_digest": target.digest})
