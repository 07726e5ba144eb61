"""A peer's versions of one run on disk.

    <root>/<run id>/run.bin                 envelope of the RunManifest
                    head.bin                envelope of the highest trusted manifest
                    epoch.bin               envelope of the highest epoch heard of
                    keys.bin                successions of the run's key
                    v00000012/manifest.bin  envelope of that version's manifest
                              model.safetensors            whole and verified, or absent
                              model.safetensors.part       on its way, see `partial`
                              model.safetensors.pieces
                    trash-…                 on its way out

No name comes from a message: the run id is 32 hex digits, the version a number, the file name one of a fixed set
(`Artifact.file_name`). One process owns a store. Blocking, safe in several threads; async callers go through a thread.
"""

import logging
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from echo_swarm.checkpoint.files import allocated_bytes, free_bytes, publish_file, read_range, remove_file, size_of
from echo_swarm.checkpoint.partial import PartialArtifact, journal_of
from echo_swarm.checkpoint.pieces import LocalPiece, PieceMap
from echo_swarm.checkpoint.read_back import Told, file_digest, untold
from echo_swarm.checkpoint.retention import HeldVersion, versions_to_delete, versions_to_evict
from echo_swarm.checkpoint.shelf import ManifestShelf
from echo_swarm.errors import LocalFault, StorageFull
from echo_swarm.manifest import ADAPTER_KINDS, Artifact, ArtifactKind, sha256

log = logging.getLogger(__name__)

SLACK_BYTES = 1 << 20
"""Left free beside an artifact, for manifests, journals and the file system's own needs."""


class VersionStore(ManifestShelf):
    """See the module.

    Args:
        root: folder for all runs of this peer.
        run_id: 32 hex digits.
        quota_bytes: most that this run's versions may take; None for no limit of our own.
        free: how much room a folder's file system has.
        spare_newest: see `versions_to_evict`.

    """

    def __init__(
        self,
        root: Path,
        run_id: str,
        *,
        quota_bytes: int | None = None,
        free: Callable[[Path], int] = free_bytes,
        spare_newest: bool = True,
    ) -> None:
        super().__init__(root, run_id)
        self._quota_bytes = quota_bytes
        self._free = free
        self._spare = spare_newest
        self._checked: dict[bytes, PieceMap] = {}
        """Artifact digest → pieces of the whole file that were hashed by this process."""
        self._open: dict[bytes, PartialArtifact] = {}
        """Artifact digest → its download."""
        self._downloading: dict[bytes, int] = {}
        """Artifact digest → its version; the same, and those that are being opened."""
        self._in_use: frozenset[int] = frozenset()
        self._drop_leftovers()

    def _drop_leftovers(self) -> None:
        """Remove files that cannot be what their manifests say, such as empty ones, and what whole ones came from."""
        for version, artifact in self._artifacts():
            path = self.version_folder(version) / artifact.file_name
            size = size_of(path)
            if size == artifact.size_bytes:
                # A kill came between the final name and the end of the download's own files.
                remove_file(path.with_name(f"{path.name}.part"))
                remove_file(path.with_name(f"{path.name}.pieces"))
            elif size is not None:
                log.warning("%s has %d bytes, expected %d; fetched again", path, size, artifact.size_bytes)
                remove_file(path)

    # Whole artifacts.

    def artifact_path(self, version: int, kind: ArtifactKind, precision: str | None = None) -> Path | None:
        """Return the path of a whole artifact. Its content was verified when it got its name; see also `verify`."""
        artifact = self._artifact(version, kind, precision)
        return None if artifact is None else self._whole_path(version, artifact)

    def whole(self, digest: bytes) -> Path | None:
        """Return the path of a whole artifact, whichever version has it."""
        paths = (self._whole_path(version, artifact) for version, artifact in self._artifacts(digest))
        return next(filter(None, paths), None)

    def complete_versions(self, kind: ArtifactKind) -> list[int]:
        """Return the versions that have a whole artifact of that kind, ascending."""
        return [version for version in self.versions() if self.artifact_path(version, kind) is not None]

    def complete_digests(self, *, limit: int = 16) -> list[bytes]:
        """Return the digests of whole artifacts for PeerRecord: the bases of adapters, then newest version first."""
        whole = [(version, a.digest) for version, a in self._artifacts() if self._whole_path(version, a) is not None]
        bases = self._base_versions()
        return [digest for _, digest in sorted(whole, key=lambda item: item[0] not in bases)][:limit]

    def verify(
        self, version: int, kind: ArtifactKind, precision: str | None = None, told: Told = untold, afresh: bool = False
    ) -> Path | None:
        """Return the path of a whole artifact after hashing it; None when it is not good.

        It is hashed once in this process, or again if that is to be `afresh`. A damaged file is turned back into a
        download that keeps its good pieces.
        """
        artifact = self._artifact(version, kind, precision)
        path = None if artifact is None else self._whole_path(version, artifact)
        if artifact is None or path is None:
            return None
        if (self._checked_map(artifact).complete and not afresh) or file_digest(path, told) == artifact.digest:
            self.mark_verified([artifact])
            return path
        self._demote(version, artifact)
        return None

    def mark_verified(self, artifacts: Iterable[Artifact]) -> None:
        """Take whole files as hashed in this process: the caller has just read them back."""
        with self._lock:
            self._checked |= {artifact.digest: PieceMap.full(artifact.piece_count) for artifact in artifacts}

    def verify_digest(self, digest: bytes, told: Told = untold) -> Path | None:
        """Do the same for an artifact, whichever version has it."""
        held = [(v, a) for v, a in self._artifacts(digest) if self._whole_path(v, a) is not None]
        return next(filter(None, (self.verify(v, a.kind, a.precision, told) for v, a in held)), None)

    # Downloads.

    def open_partial(self, version: int, artifact: Artifact, told: Told = untold) -> PartialArtifact:
        """Open the download of an artifact of a version that was added, after checking that there is room for it.

        Raises:
            StorageFull: the disk or the quota has no room; nothing was written.
            FileBusy: another program holds its files.

        """
        with self._lock:
            if artifact.digest in self._downloading:
                raise LocalFault(f"version {version} is being downloaded already")
            self._make_room(version, artifact)
            self._downloading[artifact.digest] = version
        try:
            # Without the lock: what an earlier process left is hashed here, and serving goes on meanwhile.
            partial = PartialArtifact(self.version_folder(version), artifact, told)
        except BaseException:
            self._downloading.pop(artifact.digest, None)
            raise
        with self._lock:
            self._open[artifact.digest] = partial
        return partial

    def finish_partial(self, partial: PartialArtifact, told: Told = untold) -> Path | None:
        """Give a complete download its final name; see `PartialArtifact.finish`."""
        path = partial.finish(told)
        if path is not None:
            self.mark_verified([partial.artifact])
        return path

    def close_partial(self, partial: PartialArtifact) -> None:
        """Close a download, finished or not; what is verified stays for a resume."""
        partial.close()
        with self._lock:
            self._open.pop(partial.artifact.digest, None)
            self._downloading.pop(partial.artifact.digest, None)

    def close(self) -> None:
        """Close all downloads; what is verified stays for a resume."""
        with self._lock:
            partials = list(self._open.values())
        for partial in partials:
            self.close_partial(partial)

    # Pieces.

    def have(self, digest: bytes) -> PieceMap | None:
        """Return which pieces of an artifact can be served; None when nothing is known of it."""
        if (growing := self.growing(digest)) is not None:
            return growing.copy()
        for version, artifact in self._artifacts(digest):
            if self._whole_path(version, artifact) is not None:
                return PieceMap.full(artifact.piece_count)
        return None

    def growing(self, digest: bytes) -> PieceMap | None:
        """Return the live map of a download under way; None when there is none. Never blocks."""
        return partial.have if (partial := self._open.get(digest)) else None

    def read_piece(self, digest: bytes, index: int, count: int = 1) -> bytes | None:
        """Return a verified piece, and those of the `count - 1` after it that are there too; None without the first.

        Pieces of whole files are hashed at their first reading in this process: a disk fault must not make us a liar.
        """
        with self._lock:
            partial = self._open.get(digest)
        if partial is not None and (data := partial.read(index, count)) is not None:
            return data
        for version, artifact in self._artifacts(digest):
            if index < artifact.piece_count:
                data = self._read_whole(version, artifact, index, count)
                if data is not None:
                    return data
        return None

    def local_pieces(self, artifact: Artifact, have: PieceMap) -> list[LocalPiece]:
        """Return where other versions here, whole or unfinished, should have pieces that `artifact` still lacks.

        Unverified: an unfinished file may have a hole there. `PartialArtifact.write` verifies what is read.
        """
        wanted: dict[bytes, list[int]] = {}
        for index in have.missing():
            wanted.setdefault(artifact.piece_digest(index), []).append(index)
        found: list[LocalPiece] = []
        for version, other in self._artifacts():
            path = self._readable_path(version, other)
            if other.digest == artifact.digest or path is None:
                continue
            for index in range(other.piece_count):
                if indexes := wanted.get(other.piece_digest(index)):
                    offset, length = index * other.piece_bytes, other.piece_length(index)
                    found.append(LocalPiece(path=path, offset=offset, length=length, wanted=tuple(indexes)))
        return found

    # Room.

    def set_in_use(self, versions: Collection[int]) -> None:
        """Say which versions are loaded or leased: they are never deleted."""
        self._in_use = frozenset(versions)

    def retain(self, keep_versions: int, in_use: Collection[int]) -> list[int]:
        """Delete what `versions_to_delete` says and return it. What the system holds on to is tried again next time."""
        self.set_in_use(in_use)
        with self._lock:
            doomed = versions_to_delete(self._held(), keep_versions=keep_versions)
            return [version for version in doomed if self._delete(version)]

    def used_bytes(self) -> int:
        """Return what this run's versions take, unfinished files counted at their final length."""
        with self._lock:
            return sum(item.size_bytes for item in self._held())

    def _make_room(self, version: int, artifact: Artifact) -> None:
        part = self.version_folder(version) / f"{artifact.file_name}.part"
        if self._quota_bytes is not None:
            wanted = artifact.size_bytes - (size_of(part) or 0)
            excess = self.used_bytes() + wanted - self._quota_bytes
            for old in versions_to_evict(self._held(), excess_bytes=excess, keep=version, spare_newest=self._spare):
                self._delete(old)
            if (used := self.used_bytes()) + wanted > self._quota_bytes:
                left = f"the quota of {_mb(self._quota_bytes)} has {_mb(max(0, self._quota_bytes - used))} left"
                raise StorageFull(f"version {version} needs {_mb(wanted)}, {left}; raise the quota")
        self.check_room(artifact.size_bytes - allocated_bytes(part), f"version {version}")

    def check_room(self, size_bytes: int, what: str) -> None:
        """Refuse to begin what will not fit on the disk. Raises StorageFull with both figures."""
        needed = size_bytes + SLACK_BYTES
        if (free := self._free(self.folder)) < needed:
            raise StorageFull(f"{what} needs {_mb(needed)}, {_mb(free)} are free in {self.folder}; free some space")

    def _held(self) -> list[HeldVersion]:
        in_use = self._in_use | set(self._downloading.values()) | self._base_versions()
        return [
            HeldVersion(
                version=version,
                complete=any(
                    self._whole_path(version, a) for a in signed.message.artifacts if a.kind is not ArtifactKind.DELTA
                ),
                size_bytes=sum(size_of(path) or 0 for path in self.version_folder(version).glob("*")),
                in_use=version in in_use,
            )
            for version, signed in sorted(self._manifests.items())
        ]

    def _base_versions(self) -> set[int]:
        """Return the versions with a model that an adapter here applies to: without it the adapter is worth nothing."""
        artifacts = self._artifacts()
        bases = {artifact.base_digest for _, artifact in artifacts if artifact.kind in ADAPTER_KINDS}
        return {version for version, artifact in artifacts if artifact.digest in bases}

    def _delete(self, version: int) -> bool:
        artifacts = self._manifests[version].message.artifacts
        if not self._forget(version):
            return False
        for artifact in artifacts:
            self._checked.pop(artifact.digest, None)
        return True

    # Reading.

    def _artifacts(self, digest: bytes | None = None) -> list[tuple[int, Artifact]]:
        """Return all known artifacts, or all with a digest, newest version first."""
        with self._lock:
            newest_first = sorted(self._manifests.items(), reverse=True)
        return [(v, a) for v, signed in newest_first for a in signed.message.artifacts if digest in (None, a.digest)]

    def _artifact(self, version: int, kind: ArtifactKind, precision: str | None) -> Artifact | None:
        signed = self._manifests.get(version)
        return signed.message.artifact(kind, precision) if signed else None

    def _whole_path(self, version: int, artifact: Artifact) -> Path | None:
        path = self.version_folder(version) / artifact.file_name
        return path if size_of(path) == artifact.size_bytes else None

    def _checked_map(self, artifact: Artifact) -> PieceMap:
        with self._lock:
            return self._checked.setdefault(artifact.digest, PieceMap(artifact.piece_count))

    def _read_whole(self, version: int, artifact: Artifact, index: int, count: int) -> bytes | None:
        path, piece_bytes = self._whole_path(version, artifact), artifact.piece_bytes
        count = min(count, artifact.run_pieces)
        data = None if path is None else read_range(path, index * piece_bytes, artifact.run_length(index, count))
        if data is None:
            return None
        checked = self._checked_map(artifact)
        for at in range(0, len(data), piece_bytes):
            piece = index + at // piece_bytes
            if piece in checked:
                continue
            if sha256(memoryview(data)[at : at + piece_bytes]) != artifact.piece_digest(piece):
                self._demote(version, artifact)
                return None
            with self._lock:
                checked.add(piece)
        return data

    def _readable_path(self, version: int, artifact: Artifact) -> Path | None:
        path = self.version_folder(version) / artifact.file_name
        return next((p for p in (path, path.with_name(f"{path.name}.part")) if size_of(p) == artifact.size_bytes), None)

    def _demote(self, version: int, artifact: Artifact) -> None:
        """Turn a damaged file back into a download; opening that keeps the pieces that are still good."""
        path = self.version_folder(version) / artifact.file_name
        log.warning("%s is damaged; what is wrong in it is fetched again", path)
        with self._lock:
            self._checked.pop(artifact.digest, None)
            journal = path.with_name(f"{path.name}.pieces")
            try:
                journal.write_bytes(journal_of(artifact, PieceMap.full(artifact.piece_count)))
                publish_file(path, path.with_name(f"{path.name}.part"))
            except (OSError, LocalFault):
                remove_file(path)  # No room for a journal: all of it is fetched again.


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.2f} MB"
