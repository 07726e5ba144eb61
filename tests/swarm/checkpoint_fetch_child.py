"""A process that fetches a version and says how far it is, so that a test can kill it.

    checkpoint_fetch_child.py <seeder's root> <own root> <run id>

Prints `<verified bytes>` after each piece, then waits for a line on stdin (or its end) before it goes on, so that the
test kills it exactly there; prints `done <resumed bytes> <path>` at the end.
"""

import sys
from pathlib import Path

import anyio

from echo_swarm.checkpoint.fetch import Fetcher, FetchSettings
from echo_swarm.checkpoint.serve import BlobServer
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.identity import Identity
from echo_swarm.transport.memory import MemoryNetwork


def tell(done: int, _total: int) -> None:
    print(done, flush=True)
    sys.stdin.readline()


async def main(seeder_root: Path, own_root: Path, run_id: str) -> None:
    network = MemoryNetwork()
    seeder = VersionStore(seeder_root, run_id)
    head = seeder.head()
    assert head is not None
    async with (
        network.host(Identity.generate()) as far,
        network.host(Identity.generate()) as near,
        BlobServer(far, seeder),
    ):
        fetcher = Fetcher(near, VersionStore(own_root, run_id), settings=FetchSettings(window=2))
        report = await fetcher.fetch(head, head.message.artifacts[0], [far.peer_id], progress=tell)
        print("done", report.resumed_bytes, report.path, flush=True)


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
