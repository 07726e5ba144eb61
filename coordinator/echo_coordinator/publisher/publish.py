"""Publishing a version.

    weights ─► copy + hash (fsync, rename) ─► re-read ─► sign ─► manifest.bin (fsync) ─► re-read ─► head.bin ─► announce
                                                                 └ from here on the version exists

A crash before `manifest.bin` leaves nothing that anybody has heard of: the call is made again. A crash after it is
healed by making the call again with the same weights: the same envelope comes back. Other weights under a version that
exists are refused, whatever the reason: some peer may already train or sample on the first ones.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread

from echo_coordinator.epochs import Fence
from echo_coordinator.publisher.deltas import make_deltas
from echo_coordinator.publisher.pack import pack, reread
from echo_swarm.checkpoint.files import explained, make_folder
from echo_swarm.checkpoint.read_back import file_digest
from echo_swarm.checkpoint.retention import check_retention
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.clock import Clock
from echo_swarm.envelope import Signed, seal, unseal
from echo_swarm.errors import EchoError, LocalFault, UsageError
from echo_swarm.identity import Identity
from echo_swarm.manifest import MANIFEST_LIMITS, Artifact, ArtifactKind, CheckpointManifest, artifact_file_name
from echo_swarm.records import HeadRecord
from echo_swarm.succession import RunKeys

Published = Signed[CheckpointManifest]
"""A manifest that may be announced: `raw` is its envelope, `digest` names it, `message` has the artifacts."""


class VersionConflict(LocalFault):
    """A version exists with other weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """One file to publish."""

    path: Path
    kind: ArtifactKind
    precision: str
    """Of the stored numbers, such as `float32`, `bfloat16`."""
    base_digest: bytes | None = None
    """For adapters: the artifact it applies to."""


class Publisher:
    """Publishes a run's versions into the coordinator's own store, one after the other.

    Args:
        identity: the run's key.
        store: the coordinator's store; `BlobServer` serves from it.
        clock: for issue and expiry times.
        max_staleness: the run's, in versions.
        keep_versions: retention; at least max_staleness + 1.
        lifetime_s: after this without a newer version nodes warn that the coordinator is quiet.
        deltas: whether a version also gets its difference from the one before.
        fence: this start's epoch; nothing is signed once another coordinator has a higher one.
        keys: the run's keys, of which `identity` is the newest; None for that one alone.

    Raises:
        SettingsError: keep_versions is too small.

    """

    def __init__(
        self,
        *,
        identity: Identity,
        store: VersionStore,
        clock: Clock,
        max_staleness: int,
        keep_versions: int,
        lifetime_s: float = 7 * 86_400.0,
        deltas: bool = True,
        fence: Fence | None = None,
        keys: RunKeys | None = None,
    ) -> None:
        check_retention(keep_versions=keep_versions, max_staleness=max_staleness)
        self._identity = identity
        self._store = store
        self._clock = clock
        self._keep_versions = keep_versions
        self._lifetime_s = lifetime_s
        self._deltas = deltas
        self._fence = fence
        self._keys = keys or RunKeys(store.run_id, identity.public_key)
        self._turn = anyio.Lock()

    @property
    def head(self) -> Published | None:
        """The newest published version."""
        return self._store.head()

    def kept(self) -> list[Published]:
        """Return the versions that can be fetched, ascending."""
        found = (self._store.manifest(version) for version in self._store.versions())
        return [signed for signed in found if signed is not None]

    def weights_path(self, version: int) -> Path | None:
        """Return the adapter, or else the model, that was published as a version; None when it is not kept."""
        store = self._store
        return store.artifact_path(version, ArtifactKind.LORA) or store.artifact_path(version, ArtifactKind.SAFETENSORS)

    def exists(self, version: int) -> bool:
        """Return whether a version was published under the run's key of then."""
        existing = self._store.manifest(version)
        return existing is not None and self._keys.accepts(existing.signer, existing.digest)

    async def publish(self, version: int, weights: Sequence[WeightsFile], *, in_use: Collection[int] = ()) -> Published:
        """Publish a version and delete those beyond retention that are not `in_use`.

        Returns:
            What may now be announced. Made again with the same weights, or some of them, the very same envelope.

        Raises:
            VersionConflict: the version exists with other weights.
            UsageError: it is older than the head, or no weights were given.
            TakenOver: another coordinator with this run's key has begun later.
            StorageFull, LocalFault: the disk; the old version keeps serving.
            MalformedMessage: the weights are no valid file of their kind.

        """
        async with self._turn:
            published = await anyio.to_thread.run_sync(self.publish_blocking, version, weights)
            await anyio.to_thread.run_sync(self._store.retain, self._keep_versions, in_use)
            return published

    def publish_blocking(self, version: int, weights: Sequence[WeightsFile]) -> Published:
        """Do the work of `publish`, without retention, in this thread."""
        existing = self._store.manifest(version)
        if existing is not None and self.exists(version):
            self._check_same(existing, weights)
            self._store.save_head(existing)
            return existing
        head = self._heal_head()
        # Numbers may be skipped (a lost checkpoint is issued again under a new number), never repeated or lowered.
        lowest = 0 if head is None else head.message.policy_version + 1
        if version < lowest:
            raise UsageError(f"version {version} cannot be published: the next one is {lowest}")
        try:
            artifacts = self._pack(version, weights, head)
            signed = self._seal(version, None if head is None else head.digest, artifacts)
        except EchoError:
            self._store.discard_unpublished(version)
            raise
        self._store.add(signed)
        self._store.mark_verified(artifacts)  # `_pack` has read them back.
        self._check_durable(signed)
        self._store.save_head(signed)
        return signed

    def _heal_head(self) -> Published | None:
        """Return the newest version, also when a crash came between its manifest and head.bin."""
        versions = self._store.versions()
        newest = self._store.manifest(versions[-1]) if versions else None
        if newest is not None:
            self._store.save_head(newest)
        return self._store.head()

    def _check_same(self, existing: Published, weights: Sequence[WeightsFile]) -> None:
        published = {(a.kind, a.precision, a.digest, a.base_digest) for a in existing.message.artifacts}
        given = {(w.kind, w.precision, file_digest(w.path), w.base_digest) for w in weights}
        if not given or not given <= published:
            raise VersionConflict(
                f"version {existing.message.policy_version} is published with other weights; publish a new version"
            )
        for artifact in existing.message.artifacts:
            if artifact.kind is ArtifactKind.DELTA:
                continue  # A version is complete without.
            version = existing.message.policy_version
            if self._store.verify(version, artifact.kind, artifact.precision) is None:
                raise LocalFault(f"the files of version {version} are damaged")

    def _pack(self, version: int, weights: Sequence[WeightsFile], head: Published | None) -> tuple[Artifact, ...]:
        names = [artifact_file_name(file.kind, file.precision) for file in weights]
        if not names or len(set(names)) != len(names):
            raise UsageError("a version needs weights, and at most one file of each kind and precision")
        folder = self._store.version_folder(version)
        self._store.check_room(sum(_size(file.path) for file in weights), f"version {version}")
        with explained(folder):
            make_folder(folder)
        artifacts: list[Artifact] = []
        for file in weights:
            artifact = pack(file.path, folder, kind=file.kind, precision=file.precision, base_digest=file.base_digest)
            artifacts.append(artifact)
        if self._deltas and head is not None:
            artifacts += make_deltas(self._store, head, artifacts, folder)
        for artifact in artifacts:
            reread(folder / artifact.file_name, artifact)
        return tuple(artifacts)

    def _seal(self, version: int, parent_digest: bytes | None, artifacts: tuple[Artifact, ...]) -> Published:
        if self._fence is not None:
            self._fence.require()
        issued_at = self._clock.wall_s()
        manifest = CheckpointManifest(
            run_id=self._store.run_id,
            policy_version=version,
            parent_digest=parent_digest,
            issued_at=issued_at,
            expires_at=issued_at + self._lifetime_s,
            artifacts=artifacts,
            epoch=None if self._fence is None else self._fence.raw,
        )
        return unseal(seal(self._identity, manifest), CheckpointManifest, MANIFEST_LIMITS)

    def _check_durable(self, signed: Published) -> None:
        """Read the manifest back as a restart would."""
        path = self._store.version_folder(signed.message.policy_version) / "manifest.bin"
        if path.read_bytes() != signed.raw:
            raise LocalFault(f"{path} reads back other bytes than were written; check the disk")


def head_record(published: Published, *, issued_at: float, epoch: bytes | None = None) -> HeadRecord:
    """Return what is to be sealed with the run's key and announced under `head_topic`."""
    return HeadRecord(
        run_id=published.message.run_id,
        policy_version=published.message.policy_version,
        manifest_digest=published.digest,
        issued_at=issued_at,
        epoch=epoch,
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as e:
        raise LocalFault(f"cannot read the weights {path}: {e.strerror}") from e
