"""What lies on the disks of the chaos benchmark, compared with what the manifests say.

Every whole file has its manifest's digest, nothing has a temporary name, nothing lies about that no manifest names, and
a node's versions take no more than its quota. One manifest for each version, everywhere and for ever.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

from echo_swarm.checkpoint.read_back import file_digest
from echo_swarm.envelope import OVERHEAD_BYTES, unseal
from echo_swarm.errors import PeerFault
from echo_swarm.manifest import MANIFEST_LIMITS, CheckpointManifest

_FOLDER = re.compile(r"v\d{8}")
Faults = list[str]


@dataclass(slots=True)
class Auditor:
    """Remembers what it has seen: digests of versions, heads, files that were hashed."""

    manifests: dict[int, bytes] = field(default_factory=dict[int, bytes])
    """Version → digest of its only manifest."""
    artifacts: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    """Version → digests of its files, in hexadecimal digits."""
    heads: dict[str, int] = field(default_factory=dict[str, int])
    """Store → highest head seen."""
    hashed: int = 0
    most_bytes: int = 0
    """Of all stores, in its versions' folders."""
    unfinished_bytes: int = 0
    """The most that unfinished downloads of kept versions took in one store."""
    _good: set[tuple[Path, int, int, int, bytes]] = field(default_factory=set[tuple[Path, int, int, int, bytes]])

    def head(self, who: str, folder: Path) -> Faults:
        """Look at a store's head: it never goes back, and a version has one manifest."""
        try:
            manifest, digest = _read(folder / "head.bin")
        except FileNotFoundError:
            return []
        except PeerFault as e:
            return [f"{who}: head.bin is damaged: {e}"]
        version = manifest.policy_version
        faults = self._same(who, manifest, digest)
        if version < self.heads.get(who, -1):
            faults.append(f"{who}: its head went back from {self.heads[who]} to {version}")
        self.heads[who] = max(version, self.heads.get(who, -1))
        return faults

    def store(self, who: str, folder: Path, *, quota_bytes: int | None) -> Faults:
        """Look at everything in a store. Files that come and go meanwhile may seem to be faults: look again."""
        faults = [*self.head(who, folder), *_temporary(who, folder)]
        total = unfinished = 0
        for path in sorted(folder.iterdir()):
            if _FOLDER.fullmatch(path.name):
                try:
                    size, partial = self._version(who, path, faults)
                except (FileNotFoundError, PeerFault) as e:
                    faults.append(f"{who}: {path.name} has no usable manifest ({e})")
                    continue
                total += size
                unfinished += partial
        if quota_bytes is not None and total > quota_bytes:
            faults.append(f"{who}: {total} bytes of versions, the quota is {quota_bytes}")
        if not faults:
            self.most_bytes = max(self.most_bytes, total)
            self.unfinished_bytes = max(self.unfinished_bytes, unfinished)
        return faults

    def _version(self, who: str, folder: Path, faults: Faults) -> tuple[int, int]:
        manifest, digest = _read(folder / "manifest.bin")
        faults += self._same(who, manifest, digest)
        if folder.name != f"v{manifest.policy_version:08d}":
            faults.append(f"{who}: {folder.name} holds version {manifest.policy_version}")
        known, unfinished = {"manifest.bin"}, 0
        for artifact in manifest.artifacts:
            path = folder / artifact.file_name
            known.add(path.name)
            if path.exists():
                faults += self._file(who, path, artifact.digest)
            else:
                part = folder / f"{path.name}.part"
                known |= {part.name, f"{path.name}.pieces"}
                unfinished += part.stat().st_size if part.exists() else 0
        there = list(folder.iterdir())
        faults += [f"{who}: {folder.name}/{path.name} belongs to nothing" for path in there if path.name not in known]
        return sum(path.stat().st_size for path in there), unfinished

    def _file(self, who: str, path: Path, digest: bytes) -> Faults:
        status = path.stat()
        seen = (path, status.st_ino, status.st_mtime_ns, status.st_size, digest)
        if seen in self._good:
            return []
        self.hashed += 1
        if file_digest(path) != digest:
            return [f"{who}: {path} has not its manifest's digest"]
        self._good.add(seen)
        return []

    def _same(self, who: str, manifest: CheckpointManifest, digest: bytes) -> Faults:
        version = manifest.policy_version
        self.artifacts.setdefault(version, {artifact.digest.hex() for artifact in manifest.artifacts})
        known = self.manifests.setdefault(version, digest)
        return [] if known == digest else [f"{who}: another manifest of version {version}"]


def leftovers(who: str, *folders: Path) -> Faults:
    """Return the temporary files in some folders."""
    return [fault for folder in folders for fault in _temporary(who, folder)]


def _temporary(who: str, folder: Path) -> Faults:
    return [
        f"{who}: {path.relative_to(folder.parent)} was left behind"
        for path in folder.rglob("*")
        if path.name.startswith("trash-") or path.name.endswith(".tmp")
    ]


def _read(path: Path) -> tuple[CheckpointManifest, bytes]:
    raw = path.read_bytes()
    assert len(raw) <= MANIFEST_LIMITS.max_bytes + OVERHEAD_BYTES
    signed = unseal(raw, CheckpointManifest, MANIFEST_LIMITS)
    return signed.message, signed.digest
