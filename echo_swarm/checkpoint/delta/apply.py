"""Making the missing pieces of an artifact from an older one and a chain of deltas, with all cores.

A block of the base is read, led through all deltas and cut into pieces; `PartialArtifact.write` compares each with the
digest that the run's key signed before it is written. So a wrong base or a delta applied twice cannot pass, a kill
loses at most the blocks in hand, and what a damaged block would have made is simply still missing.
"""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.to_thread

from echo_swarm.cgroups import cpu_count
from echo_swarm.checkpoint.delta.block import BlockCodec
from echo_swarm.checkpoint.delta.delta_file import DeltaFile
from echo_swarm.checkpoint.files import read_range
from echo_swarm.checkpoint.partial import PartialArtifact
from echo_swarm.checkpoint.read_back import Told, untold
from echo_swarm.errors import EchoError, LocalFault, MalformedMessage


class DeltaChain:
    """Deltas that lead, one after the other, from a base to an artifact.

    Args:
        base: path of the whole base.
        deltas: in the order in which they apply, each from where the one before leads to.
        partial: the artifact on its way.
        threads: None for one a core.

    Raises:
        MalformedMessage: they do not fit together.

    """

    def __init__(
        self, base: Path, deltas: list[DeltaFile], partial: PartialArtifact, *, threads: int | None = None
    ) -> None:
        self._base = base
        self._deltas = deltas
        self._partial = partial
        self._threads = threads or cpu_count()
        self._local = threading.local()
        self._header = deltas[0].header
        sizes = {(delta.header.size_bytes, delta.header.block_bytes) for delta in deltas}
        pairs = itertools.pairwise(deltas)
        joined = all(one.header.target_digest == other.header.base_digest for one, other in pairs)
        artifact = partial.artifact
        whole_pieces = self._header.block_bytes % artifact.piece_bytes == 0
        leads_there = deltas[-1].header.target_digest == artifact.digest
        if len(sizes) != 1 or not joined or not leads_there or not whole_pieces:
            raise MalformedMessage("delta: the links of the chain do not fit together")
        if self._header.size_bytes != artifact.size_bytes:
            raise MalformedMessage(f"delta: it makes {self._header.size_bytes} bytes of {artifact.size_bytes}")

    async def run(self, told: Told = untold) -> int:
        """Write what is missing and return how many bytes that were; `told` hears of each block.

        Raises:
            MalformedMessage: a block makes no piece of the artifact; what was written before stays.
            StorageFull, LocalFault: this disk.

        """
        numbers = iter(self._wanted_blocks())
        written: list[int] = []
        limiter = anyio.CapacityLimiter(self._threads)

        faults: list[EchoError] = []

        async def work() -> None:
            try:
                for number in numbers:
                    written.append(await anyio.to_thread.run_sync(self._block, number, limiter=limiter))
                    told(sum(written))
            except EchoError as e:
                faults.append(e)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for _ in range(self._threads):
                tasks.start_soon(work)
        if faults:
            raise faults[0]
        return sum(written)

    def _wanted_blocks(self) -> Iterator[int]:
        for number in range(self._header.block_count):
            if any(index not in self._partial.have for index in self._pieces(number)):
                yield number

    def _pieces(self, number: int) -> range:
        each = self._header.block_bytes // self._partial.artifact.piece_bytes
        return range(number * each, min((number + 1) * each, self._partial.artifact.piece_count))

    def _block(self, number: int) -> int:
        codec: BlockCodec | None = getattr(self._local, "codec", None)
        if codec is None:
            codec = self._local.codec = BlockCodec()
        offset, length = number * self._header.block_bytes, self._header.block_length(number)
        data: bytes | memoryview | None = read_range(self._base, offset, length)
        if data is None:
            raise LocalFault(f"{self._base} is gone, or shorter than it was")
        for delta in self._deltas:
            data = delta.apply(number, data, codec)
        written, size = 0, self._partial.artifact.piece_bytes
        for place, index in enumerate(self._pieces(number)):
            piece = bytes(data[place * size : (place + 1) * size])
            written += len(piece) if self._partial.write(index, piece) else 0
        return written
