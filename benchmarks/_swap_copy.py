"""A bare copy over the stream that versions travel on: bytes in, bytes to a file, nothing looked at.

`serve_copies` answers on the coordinator's host. The other end is a process of its own, with a host of its own, as a
node has: `python -m benchmarks._swap_copy ADDRESS FOLDER` reads paths, one a line, and prints the seconds of each.
"""

import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import PIPE

import anyio
from anyio import to_thread
from anyio.abc import ByteStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream

from benchmarks._report import ROOT
from echo_swarm.identity import Identity, PeerId
from echo_swarm.transport.base import Host, ReceivesInto
from echo_swarm.transport.hivemind import open_hivemind_host

PROTOCOL = "/echo-swarm/benchmark/copy/1"
BLOCK_BYTES = 1 << 20
LIMIT_S = 120.0
MAX_PATH_BYTES = 4096


async def serve_copies(host: Host) -> None:
    """Send whoever asks any file: only on a benchmark's loopback."""

    async def send(stream: ByteStream, _peer: PeerId) -> None:
        path = (await BufferedByteReceiveStream(stream).receive_until(b"\n", MAX_PATH_BYTES)).decode()
        async with await anyio.open_file(path, "rb") as file:
            while block := await file.read(BLOCK_BYTES):
                await stream.send(block)

    await host.serve(PROTOCOL, send)


class Copier:
    """The process at the other end."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._stdin, self._stdout = process.stdin, BufferedByteReceiveStream(process.stdout)

    async def line(self) -> str:
        with anyio.fail_after(LIMIT_S):
            return (await self._stdout.receive_until(b"\n", 65_536)).decode().strip()

    async def copy(self, path: Path) -> float:
        """Return the seconds that a file took."""
        await self._stdin.send(f"{path}\n".encode())
        return float(await self.line())


@asynccontextmanager
async def open_copier(address: str, folder: Path) -> AsyncGenerator[Copier]:
    """Run the other end for the length of the block."""
    command = [sys.executable, "-m", "benchmarks._swap_copy", address, str(folder)]
    async with await anyio.open_process(command, stdin=PIPE, stdout=PIPE, stderr=None, cwd=ROOT) as process:
        copier = Copier(process)
        assert await copier.line() == "ready"
        yield copier
        assert process.stdin is not None
        await process.stdin.aclose()
        with anyio.move_on_after(10):
            await process.wait()


async def _main(address: str, folder: Path) -> None:
    async with open_hivemind_host(Identity.generate(), listen=(), bootstrap=[address]) as host:
        peer = await host.connect(address, timeout_s=30)
        print("ready", flush=True)
        while line := await to_thread.run_sync(sys.stdin.readline):
            print(await _copy(host, peer, Path(line.strip()), folder / "copy"), flush=True)


async def _copy(host: Host, peer: PeerId, source: Path, target: Path) -> float:
    size = (await anyio.Path(source).stat()).st_size
    began = time.perf_counter()
    stream = await host.open_stream(peer, PROTOCOL, timeout_s=30)
    assert isinstance(stream, ReceivesInto)
    await stream.send(f"{source}\n".encode())
    async with await anyio.open_file(target, "wb", buffering=0) as file:
        block, filled = memoryview(bytearray(BLOCK_BYTES)), 0
        while size:
            filled += await stream.receive_into(lambda: block[filled:])  # noqa: B023
            if filled == min(size, BLOCK_BYTES):
                await file.write(block[:filled])
                size, filled = size - filled, 0
    seconds = time.perf_counter() - began
    await stream.aclose()
    return seconds


if __name__ == "__main__":
    anyio.run(_main, sys.argv[1], Path(sys.argv[2]))
