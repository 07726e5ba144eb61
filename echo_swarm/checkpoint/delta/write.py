"""Making the file of a delta, with all cores and a bounded number of blocks in memory. Blocking.

read base, target  ──► worker threads: encode ──► in order: append ──► table of lengths at the start
"""

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from echo_swarm.cgroups import cpu_count
from echo_swarm.checkpoint.delta.block import BlockCodec
from echo_swarm.checkpoint.delta.delta_file import DeltaHeader, pack_table
from echo_swarm.checkpoint.files import read_range
from echo_swarm.errors import LocalFault
from echo_swarm.manifest import Artifact

MIN_BLOCK_BYTES = 1 << 20
"""Of a block, unless the pieces of the target are larger: below it, the calls cost more than the work."""
_PENDING = 3
"""Blocks on their way, for each thread."""
_SAMPLE = 16
"""Blocks looked at, before the rest, to see whether a delta is worth making."""

_WIDTHS = {"bfloat16": 2, "float16": 2, "f16": 2, "bf16": 2, "float32": 4, "f32": 4}


def element_width(precision: str) -> int:
    """Return the bytes of an element in files of a precision; 1 for quantised blocks and what is not known."""
    return _WIDTHS.get(precision, 1)


def block_bytes_for(target: Artifact) -> int:
    """Return the block size of a delta: whole pieces of the target, if their size is a power of two."""
    return max(MIN_BLOCK_BYTES, target.piece_bytes)


class DeltaWriter:
    """Makes one delta.

    Args:
        base_path: the file that readers have.
        base: its description.
        target_path: the file that they shall have, of the same length.
        target: its description.
        threads: None for one a core.

    """

    def __init__(
        self, base_path: Path, base: Artifact, target_path: Path, target: Artifact, *, threads: int | None = None
    ) -> None:
        if base.size_bytes != target.size_bytes:
            raise ValueError("base and target differ in length")
        self._base_path = base_path
        self._target_path = target_path
        self._width = element_width(target.precision)
        self._threads = threads or cpu_count()
        self._local = threading.local()
        self.header = DeltaHeader(
            base_digest=base.digest,
            target_digest=target.digest,
            size_bytes=target.size_bytes,
            block_bytes=block_bytes_for(target),
        )

    def write(self, path: Path, *, max_bytes: int) -> int | None:
        """Write the delta and return its size; None, with nothing left at `path`, when it would exceed `max_bytes`.

        Raises:
            LocalFault: a file cannot be read; OSError: the delta cannot be written. What was written is left there.

        """
        if self._estimate() > max_bytes:
            return None
        lengths: list[int] = []
        with path.open("wb") as file:
            file.write(self.header.pack() + bytes(4 * self.header.block_count))
            size = file.tell()
            for encoded in self._encoded(range(self.header.block_count)):
                size += len(encoded)
                if size > max_bytes:
                    break
                lengths.append(len(encoded))
                file.write(encoded)
            else:
                self._complete(file, lengths)
                return size
        path.unlink()
        return None

    def _complete(self, file: BinaryIO, lengths: list[int]) -> None:
        file.seek(self.header.table_start)
        file.write(pack_table(lengths))
        file.flush()
        os.fsync(file.fileno())

    def _estimate(self) -> int:
        """Return the size that a sample of blocks promises."""
        count = self.header.block_count
        if count <= 2 * _SAMPLE:
            return 0
        chosen = [count * step // _SAMPLE for step in range(_SAMPLE)]
        looked_at = sum(map(self.header.block_length, chosen))
        return sum(map(len, self._encoded(chosen))) * self.header.size_bytes // looked_at

    def _encoded(self, numbers: Iterable[int]) -> Iterator[bytes]:
        """Encode blocks in other threads, in order."""
        pending: deque[Future[bytes]] = deque()
        with ThreadPoolExecutor(self._threads) as pool:
            try:
                for number in numbers:
                    pending.append(pool.submit(self._encode, number))
                    if len(pending) >= _PENDING * self._threads:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                for future in pending:
                    future.cancel()

    def _encode(self, number: int) -> bytes:
        codec: BlockCodec | None = getattr(self._local, "codec", None)
        if codec is None:
            codec = self._local.codec = BlockCodec()
        offset, length = number * self.header.block_bytes, self.header.block_length(number)
        base, target = (read_range(path, offset, length) for path in (self._base_path, self._target_path))
        if base is None or target is None:
            raise LocalFault(f"{self._base_path} or {self._target_path} is gone, or shorter than it was")
        return codec.encode(base, target, self._width)
