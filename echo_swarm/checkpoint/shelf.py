"""The manifests that a peer keeps: the run's, the trusted head's, and one for each version it holds or fetches.

Blocking and safe to call from several threads. The layout is drawn in `store`.
"""

import contextlib
import logging
import os
import re
import threading
from pathlib import Path

from echo_swarm.checkpoint.files import explained, make_folder, read_file, remove_file, remove_folder, write_atomically
from echo_swarm.envelope import OVERHEAD_BYTES, Signed, unseal
from echo_swarm.epoch import EPOCH_LIMITS, MAX_EPOCH_BYTES, NO_EPOCH, Epoch, Rank
from echo_swarm.errors import LocalFault, PeerFault, UsageError
from echo_swarm.manifest import MANIFEST_LIMITS, CheckpointManifest
from echo_swarm.succession import CHAIN_LIMITS, KeyChain, RunKeys, read_chain

log = logging.getLogger(__name__)

_ENVELOPE_BYTES = MANIFEST_LIMITS.max_bytes + OVERHEAD_BYTES
_FOLDER = re.compile(r"v(\d{8,19})")
_RUN_ID = re.compile(r"[0-9a-f]{32}")


class ManifestShelf:
    """The manifests of one run on disk, read once and kept in memory."""

    def __init__(self, root: Path, run_id: str) -> None:
        """Read what is there; remove what a crash left; skip with a warning what is damaged.

        Raises:
            UsageError: `run_id` is not 32 hex digits.

        """
        if not _RUN_ID.fullmatch(run_id):
            raise UsageError(f"{run_id[:64]!r} is no run id (32 hex digits)")
        self.folder = root / run_id
        self.run_id = run_id
        self._lock = threading.RLock()
        self._manifests: dict[int, Signed[CheckpointManifest]] = {}
        make_folder(self.folder)
        self._scan()
        self._head = self._read_manifest(self.folder / "head.bin")
        self.owes_epoch = False
        """Whether an epoch was taken that could not be written; take it again to try again."""
        raw = self.epoch()
        # A crash may have come between writing it and dropping what falls to it.
        if raw is not None and (epoch := _epoch(raw)) is not None:
            self._drop_fallen(epoch)

    def save_run(self, raw: bytes) -> None:
        """Keep the (checked) envelope of the RunManifest."""
        if self.run() != raw:
            write_atomically(self.folder / "run.bin", raw)

    def run(self) -> bytes | None:
        """Return the kept envelope of the RunManifest."""
        return read_file(self.folder / "run.bin", _ENVELOPE_BYTES)

    def save_head(self, signed: Signed[CheckpointManifest]) -> None:
        """Persist the trusted head, before anything acts on it. Never lowers what is there."""
        with self._lock:
            if self._head is None or signed.message.policy_version >= self._head.message.policy_version:
                write_atomically(self.folder / "head.bin", signed.raw)
                self._head = signed

    def epoch(self) -> bytes | None:
        """Return the kept envelope of the highest epoch that this peer has heard of."""
        return read_file(self.folder / "epoch.bin", MAX_EPOCH_BYTES)

    def take_epoch(self, signed: Signed[Epoch]) -> list[int]:
        """Persist a (checked) epoch, and drop the versions that fall to it. Returns those. Never lowers what is there.

        Files of theirs that are being read stay readable to the end. What falls is dropped even where the epoch cannot
        be written (`owes_epoch`): a full disk must not keep a coordinator alive that was replaced. Again is fine.
        """
        with self._lock:
            self.owes_epoch = True
            with contextlib.suppress(LocalFault):
                self._write_epoch(signed)
            fallen = self._drop_fallen(signed.message)
            if self.owes_epoch:  # What fell has made room, perhaps.
                try:
                    self._write_epoch(signed)
                except LocalFault as e:
                    log.warning("epoch %d counts, and is not on disk yet: %s", signed.message.number, e)
            return fallen

    def _write_epoch(self, signed: Signed[Epoch]) -> None:
        raw = self.epoch()
        known = None if raw is None else _epoch(raw)
        if known is None or known.rank < signed.message.rank:
            write_atomically(self.folder / "epoch.bin", signed.raw)
        self.owes_epoch = False

    def keys(self) -> KeyChain | None:
        """Return the kept chain of successions, not yet checked; None when there is none, or it is damaged."""
        raw = read_file(self.folder / "keys.bin", CHAIN_LIMITS.max_bytes)
        try:
            return None if raw is None else read_chain(raw)
        except PeerFault as e:
            log.warning("the successions of the run's key on disk are damaged (%s); others tell them again", e)
            return None

    def save_keys(self, chain: KeyChain) -> None:
        """Persist a (checked) chain, before anything follows it."""
        write_atomically(self.folder / "keys.bin", chain.raw)

    def keep_under(self, keys: RunKeys) -> list[int]:
        """Drop what the run's keys do not stand for: versions, the head, an epoch under another key. Returns versions.

        Made again after a crash it goes on where it was.
        """
        with self._lock:
            raw = self.epoch()
            if raw is not None and not _is_signed_by(raw, keys.key):
                remove_file(self.folder / "epoch.bin")
            doomed = [v for v, signed in self._manifests.items() if not keys.accepts(signed.signer, signed.digest)]
            gone = [version for version in doomed if self._forget(version)]
            if self._head is not None and not keys.accepts(self._head.signer, self._head.digest):
                remove_file(self.folder / "head.bin")
                self._head = None
            return sorted(gone)

    def head(self) -> Signed[CheckpointManifest] | None:
        """Return the persisted head; None when there is none (or it is damaged, see `known_manifests`)."""
        return self._head

    def piece_length(self, digest: bytes, index: int) -> int | None:
        """Return how long a piece of an artifact is; None when no manifest here lists it."""
        with self._lock:
            manifests = [signed.message for signed in self._manifests.values()]
        artifacts = (a for manifest in manifests for a in manifest.artifacts if a.digest == digest)
        return next((a.piece_length(index) for a in artifacts if index < a.piece_count), None)

    def known_manifests(self) -> list[bytes]:
        """Return every envelope on disk, for `TrustedHead(persisted=...)`: a damaged head.bin alone loses no trust."""
        with self._lock:
            known = list(self._manifests.values())
        return [signed.raw for signed in ([self._head] if self._head else []) + known]

    def add(self, signed: Signed[CheckpointManifest]) -> Path:
        """Make a version's folder with its (trusted) manifest and return it. Again is fine.

        Raises:
            LocalFault: another manifest of the same version lies there.

        """
        version = signed.message.policy_version
        folder = self.version_folder(version)
        with self._lock:
            known = self._manifests.get(version)
            if known is not None and known.digest != signed.digest:
                raise LocalFault(f"{folder} holds another manifest of version {version}; move the folder away")
            if known is None:
                with explained(folder):
                    make_folder(folder)
                write_atomically(folder / "manifest.bin", signed.raw)
                self._manifests[version] = signed
        return folder

    def manifest(self, version: int) -> Signed[CheckpointManifest] | None:
        """Return the kept manifest of a version."""
        return self._manifests.get(version)

    def newest(self) -> Signed[CheckpointManifest] | None:
        """Return the manifest of the newest version, also when a crash came between that and head.bin."""
        with self._lock:
            return self._manifests[max(self._manifests)] if self._manifests else None

    def versions(self) -> list[int]:
        """Return the versions whose manifest is kept, ascending."""
        with self._lock:
            return sorted(self._manifests)

    def version_folder(self, version: int) -> Path:
        """Return where a version lies, there or not."""
        return self.folder / f"v{version:08d}"

    def discard_unpublished(self, version: int) -> None:
        """Remove what a failed publication left of a version that has no manifest."""
        folder = self.version_folder(version)
        with self._lock:
            if version not in self._manifests:
                remove_folder(folder, self._trash(folder))

    def _forget(self, version: int) -> bool:
        """Delete a version's folder. Returns False when the system holds on to it; try again later."""
        folder = self.version_folder(version)
        if not remove_folder(folder, self._trash(folder)):
            log.warning("version %d cannot be deleted right now; tried again later", version)
            return False
        self._manifests.pop(version, None)
        return True

    def _drop_fallen(self, epoch: Epoch) -> list[int]:
        fallen = [version for version, signed in self._manifests.items() if _falls(epoch, signed)]
        for version in fallen:
            self._forget(version)
        if self._head is not None and _falls(epoch, self._head):
            remove_file(self.folder / "head.bin")
            self._head = None
        return sorted(fallen)

    def _trash(self, folder: Path) -> Path:
        return self.folder / f"trash-{folder.name}-{os.getpid()}-{os.urandom(4).hex()}"

    def _scan(self) -> None:
        for path in sorted(self.folder.iterdir()):
            match = _FOLDER.fullmatch(path.name)
            if path.name.startswith("trash-"):
                remove_folder(path, path)
            elif path.name.endswith(".tmp"):
                remove_file(path)
            elif match and path.is_dir():
                self._scan_version(int(match[1]), path)

    def _scan_version(self, version: int, folder: Path) -> None:
        for leftover in folder.glob("*.tmp"):
            remove_file(leftover)
        signed = self._read_manifest(folder / "manifest.bin")
        if signed is None or signed.message.policy_version != version:
            log.warning("%s has no usable manifest; removed, it is fetched again when needed", folder)
            remove_folder(folder, self._trash(folder))
            return
        self._manifests[version] = signed

    def _read_manifest(self, path: Path) -> Signed[CheckpointManifest] | None:
        signed = _read_manifest(path)
        return signed if signed is not None and signed.message.run_id == self.run_id else None


def read_manifests(folder: Path) -> dict[int, CheckpointManifest]:
    """Return the manifests of the versions in a run's store that another process owns; nothing is changed there."""
    found = dict[int, CheckpointManifest]()
    for path in sorted(folder.glob("v*/manifest.bin")):
        signed = _read_manifest(path)
        if signed is None or signed.message.run_id != folder.name:
            continue
        if path.parent.name == f"v{signed.message.policy_version:08d}":
            found[signed.message.policy_version] = signed.message
    return found


def _read_manifest(path: Path) -> Signed[CheckpointManifest] | None:
    raw = read_file(path, _ENVELOPE_BYTES)
    if raw is None:
        return None
    try:
        return unseal(raw, CheckpointManifest, MANIFEST_LIMITS)
    except PeerFault as e:
        log.warning("%s is damaged: %s", path, e)
        return None


def _epoch(raw: bytes) -> Epoch | None:
    try:
        return unseal(raw, Epoch, EPOCH_LIMITS).message
    except PeerFault as e:
        log.warning("the epoch on disk is damaged (%s); whoever is asked next tells it again", e)
        return None


def _is_signed_by(epoch: bytes, key: bytes) -> bool:
    try:
        return unseal(epoch, Epoch, EPOCH_LIMITS).signer == key
    except PeerFault:
        return False


def _falls(epoch: Epoch, signed: Signed[CheckpointManifest]) -> bool:
    rank: Rank = NO_EPOCH
    if signed.message.epoch is not None and (own := _epoch(signed.message.epoch)) is not None:
        rank = own.rank
    return epoch.refuses(rank, signed.message.policy_version, signed.digest)
