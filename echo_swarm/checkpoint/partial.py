"""One artifact on its way to this disk: pieces come in any order, only verified ones are written.

Beside the final name lie `<name>.part`, as long as the artifact and sparse, and `<name>.pieces`, a journal: the
artifact's digest, then the index of each piece after it was written (u32le). Nothing is synced piece by piece. Instead
a restart reads the pieces that the journal names and hashes them again, so that it does not matter what a kill or a
power cut left behind: what fits counts, the rest is fetched again. The final name appears only after a sync and after
the whole file was read back and had the manifest's digest: its beginning, by `read_ahead`, while the rest comes.
"""

import os
import struct
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from echo_swarm.checkpoint.files import explained, publish_file, read_file, remove_file
from echo_swarm.checkpoint.pieces import PieceMap
from echo_swarm.checkpoint.read_back import ReadBack, Told, untold
from echo_swarm.checkpoint.safetensors_file import check_layout
from echo_swarm.errors import LocalFault, MalformedMessage, StorageFull
from echo_swarm.manifest import Artifact, ArtifactKind, sha256

FLUSH_EVERY_S = 1.0
_INDEX = struct.Struct("<I")


class WrongPiece(MalformedMessage):
    """The bytes given for a piece are not those that the manifest lists."""


class PartialArtifact:
    """Blocking; used from worker threads, several at a time."""

    def __init__(self, folder: Path, artifact: Artifact, told: Told = untold) -> None:
        """Open or create the files, and check again what an earlier process wrote.

        Raises:
            StorageFull: no room even for an empty file.

        """
        self.artifact = artifact
        self.path = folder / artifact.file_name
        self.part_path = folder / f"{artifact.file_name}.part"
        self.journal_path = folder / f"{artifact.file_name}.pieces"
        self.have = PieceMap(artifact.piece_count)
        self._lock = threading.Lock()
        self._closed = False
        self._fault: LocalFault | None = None
        self._flushed_bytes = 0
        self._flushed_at_s = time.monotonic()
        with explained(self.part_path):
            self._file: BinaryIO = self.part_path.open("r+b" if self.part_path.exists() else "w+b", buffering=0)
            try:
                self._file.truncate(artifact.size_bytes)
                self._recheck(told)
                self._journal = self._fresh_journal()
                self._read_back = ReadBack(self.part_path, flushes=True)
            except OSError:
                self._file.close()
                raise

    @property
    def done_bytes(self) -> int:
        """Verified bytes on disk."""
        last = self.artifact.piece_count - 1
        shortage = self.artifact.piece_bytes - self.artifact.piece_length(last) if last in self.have else 0
        return self.have.held * self.artifact.piece_bytes - shortage

    @property
    def missing_bytes(self) -> int:
        """What is still to come."""
        return self.artifact.size_bytes - self.done_bytes

    def write(self, index: int, data: bytes) -> int:
        """Verify a piece, or several that lie side by side, and write what was missing. Returns its bytes.

        Args:
            index: of the first piece.
            data: one or more whole pieces.

        Raises:
            WrongPiece: a length or digest is not the manifest's; nothing was written.
            StorageFull: the disk became full; the unfinished files were removed, so that the rest of the machine lives.
            LocalFault: closed meanwhile (superseded or cancelled).

        """
        pieces = self._verified(index, memoryview(data))
        try:
            with self._lock:
                self._check_open()
                missing = {piece: content for piece, content in pieces.items() if piece not in self.have}
                self._write(missing)
        except StorageFull:
            self.discard()
            raise
        return sum(map(len, missing.values()))

    def _verified(self, index: int, data: memoryview) -> dict[int, memoryview]:
        pieces: dict[int, memoryview] = {}
        while data or not pieces:
            length = self.artifact.piece_length(index) if index < self.artifact.piece_count else 0
            if not 0 < length <= len(data):
                raise WrongPiece(f"piece {index} has {len(data)} bytes, expected {length}")
            pieces[index], data = data[:length], data[length:]
            if sha256(pieces[index]) != self.artifact.piece_digest(index):
                raise WrongPiece(f"piece {index} has another digest than the manifest lists")
            index += 1
        return pieces

    def read(self, index: int, count: int = 1) -> bytes | None:
        """Return a verified piece, and those of the `count - 1` after it that are there too; None without the first."""
        with self._lock:
            if self._closed:
                return None
            most = min(count, self.artifact.run_pieces)
            there = next((n for n in range(most) if index + n not in self.have), most)
            return self._read(index, there) if there else None

    @property
    def lags(self) -> bool:
        """Whether there is more to read back from the first byte on without a gap, or some to flush since a while."""
        return self._gapless_bytes > self._read_back.bytes or self._is_unflushed

    @property
    def _is_unflushed(self) -> bool:
        return self.done_bytes > self._flushed_bytes and time.monotonic() - self._flushed_at_s >= FLUSH_EVERY_S

    def read_ahead(self) -> None:
        """Flush what came; read back and hash what is there from the first byte without a gap. Not twice at a time.

        Pieces come in any order, so that most of a file may have no gap before it only at the end: what is left to
        flush then is what came in the last FLUSH_EVERY_S.

        Raises:
            StorageFull, LocalFault: the disk cannot do it.

        """
        try:
            with explained(self.part_path):
                if self._is_unflushed:
                    self._flushed_bytes = self.done_bytes
                    self._read_back.flush()
                    self._flushed_at_s = time.monotonic()
                self._follow(untold)
        except LocalFault as e:
            # The system tells of a write that failed once, and calls the bytes written from then on.
            self._fault = self._fault or e
            self.discard()
            raise

    def finish(self, told: Told = untold) -> Path | None:
        """Sync, read the whole file back, compare, and give it its final name.

        Returns:
            The path; or None when the disk returned other bytes than were written: those pieces are missing again.

        Raises:
            MalformedMessage: all pieces fit, but the whole does not: the manifest contradicts itself. Files removed.
            StorageFull, FileBusy: see `files`; FileBusy keeps everything for another try.

        """
        with self._lock:
            self._check_open()
            if not self.have.complete:
                return None
        # Without the lock: nothing is written any more, and others go on reading pieces meanwhile.
        with explained(self.part_path):
            self._read_back.flush()
            self._follow(told)
            whole_fits = self._read_back.digest() == self.artifact.digest
        with self._lock, explained(self.part_path):
            self._check_open()
            if not whole_fits and self._lost_pieces():
                return None
        if not whole_fits:
            # Every piece is right now: the bytes that were read before may have been misread.
            with explained(self.part_path):
                self._follow(told)
            whole_fits = self._read_back.digest() == self.artifact.digest
        try:
            self._check_content(whole_fits)
        except MalformedMessage:
            self.discard()
            raise
        self.close()
        publish_file(self.part_path, self.path)
        remove_file(self.journal_path)
        return self.path

    def close(self) -> None:
        """Close the files and keep them for a later resume. Again is fine."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._file.close()
                self._journal.close()
                self._read_back.close()

    def discard(self) -> None:
        """Close the files and remove them."""
        self.close()
        self.have = PieceMap(self.artifact.piece_count)
        remove_file(self.part_path)
        remove_file(self.journal_path)

    def _check_content(self, whole_fits: bool) -> None:
        if not whole_fits:
            raise MalformedMessage(f"{self.path.name}: every piece fits, the whole does not; the manifest is wrong")
        if self.artifact.kind in (ArtifactKind.SAFETENSORS, ArtifactKind.LORA):
            check_layout(self.part_path, self.artifact.layout_digest)

    def _follow(self, told: Told) -> None:
        self._read_back.follow(self._gapless_bytes, told)

    @property
    def _gapless_bytes(self) -> int:
        return min(self.have.beginning * self.artifact.piece_bytes, self.artifact.size_bytes)

    def _lost_pieces(self) -> bool:
        """Return whether some pieces are no longer what was written; they are missing again."""
        self._recheck()
        self._read_back.close()
        self._read_back = ReadBack(self.part_path, flushes=True)
        if self.have.complete:
            return False
        self._journal.close()
        self._journal = self._fresh_journal()
        return True

    def _write(self, pieces: Mapping[int, memoryview]) -> None:
        try:
            with explained(self.part_path):
                for index, data in pieces.items():
                    self._file.seek(index * self.artifact.piece_bytes)
                    _write_all(self._file, data)
                _write_all(self._journal, memoryview(b"".join(map(_INDEX.pack, pieces))))
        except StorageFull as e:
            self._fault = e
            raise
        for index in pieces:
            self.have.add(index)

    def _check_open(self) -> None:
        if self._fault is not None:
            # Whichever of several writers is heard first, a person learns the cause.
            raise type(self._fault)(str(self._fault))
        if self._closed:
            raise LocalFault(f"the download of {self.path.name} was closed meanwhile")

    def _read(self, index: int, count: int = 1) -> bytes:
        self._file.seek(index * self.artifact.piece_bytes)
        return _read_up_to(self._file, self.artifact.run_length(index, count))

    def _recheck(self, told: Told = untold) -> None:
        """Hash the pieces that are believed to be there (all in memory or, at first, those of the journal)."""
        believed = list(self.have) or read_journal(self.journal_path, self.artifact)
        self.have = PieceMap(self.artifact.piece_count)
        for index in believed:
            if sha256(self._read(index)) == self.artifact.piece_digest(index):
                self.have.add(index)
                told(self.done_bytes)

    def _fresh_journal(self) -> BinaryIO:
        temporary = self.journal_path.with_name(self.journal_path.name + ".tmp")
        temporary.write_bytes(journal_of(self.artifact, self.have))
        os.replace(temporary, self.journal_path)
        return self.journal_path.open("ab", buffering=0)


def journal_of(artifact: Artifact, have: PieceMap) -> bytes:
    """Return the journal that claims the pieces of `have`."""
    return artifact.digest + b"".join(_INDEX.pack(index) for index in have)


def read_journal(path: Path, artifact: Artifact) -> list[int]:
    """Return the pieces that a journal claims: none when it is about another artifact; a torn end is ignored."""
    data = read_file(path, len(artifact.digest) + 64 * artifact.piece_count + 1024) or b""
    if not data.startswith(artifact.digest):
        return []
    body = data[len(artifact.digest) :]
    indexes = {value for (value,) in _INDEX.iter_unpack(body[: len(body) // _INDEX.size * _INDEX.size])}
    return sorted(index for index in indexes if index < artifact.piece_count)


def _write_all(file: BinaryIO, rest: memoryview) -> None:
    while rest:
        rest = rest[file.write(rest) :]


def _read_up_to(file: BinaryIO, count: int) -> bytes:
    """Read `count` bytes, fewer only at the end of the file."""
    parts: list[bytes] = []
    while count > 0 and (part := file.read(count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
