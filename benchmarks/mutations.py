"""Wrong messages by the hundred thousand at a real coordinator's work service: none is taken, all are answered.

    python -m benchmarks.mutations [--messages 100000] [--streams 20000] [--seed 1]

Messages are valid ones with one thing wrong (see `_mutations_make`): first over the in-memory network, then over
hivemind's streams on loopback, with real signatures, leases and a real database. Every one has to be refused with a
documented reason, or be valid after all; after each hundred a good completion is pushed twice, accepted and counted
once. Ends with 1 if anything was wrong, with the messages.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from benchmarks._mutations_session import OpenHost, open_session, resident_bytes
from benchmarks._report import write_report
from echo_coordinator.commands.start import LOOP
from echo_swarm.identity import Identity
from echo_swarm.transport.base import Host
from echo_swarm.transport.hivemind import open_hivemind_host
from echo_swarm.transport.memory import MemoryNetwork

BATCH = 100
PEERS = 4
WARM_BATCHES = 20
"""Before memory is looked at first: caches, the first pages of the database."""
SHOWN = 20


@asynccontextmanager
async def _hivemind(identity: Identity) -> AsyncGenerator[Host]:
    async with open_hivemind_host(identity, listen=("/ip4/127.0.0.1/tcp/0",)) as host:
        yield host


async def run(name: str, open_host: OpenHost, *, messages: int, seed: int) -> dict[str, Any]:
    """Send so many over one network. Returns figures."""
    with tempfile.TemporaryDirectory() as folder:
        async with open_session(Path(folder), open_host, peers=PEERS, seed=seed) as session:
            tally, began, before = session.tally, time.monotonic(), 0
            while tally.sent < messages:
                await session.batch(min(BATCH, messages - tally.sent))
                if tally.good == WARM_BATCHES or not before:
                    gc.collect()
                    before = resident_bytes()
                if tally.good % 100 == 0:
                    print(f"{name}: {tally.sent:,} of {messages:,}, {len(tally.faults)} faults", file=sys.stderr)
            seconds = time.monotonic() - began
            gc.collect()
            return {
                "messages": tally.sent,
                "seconds": round(seconds, 1),
                "messages_per_s": round(tally.sent / seconds),
                "refused": tally.sent - tally.valid_by_chance - len(tally.faults),
                "valid_after_all": tally.valid_by_chance,
                "good_completions_accepted": tally.good,
                "memory_growth_mb": round((resident_bytes() - before) / 1e6, 1),
                "faults": tally.faults[:SHOWN],
                "outcomes": dict(sorted(tally.outcomes.items())),
            }


def main() -> int:
    """Run both parts and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000, help="over the in-memory network")
    parser.add_argument("--streams", type=int, default=20_000, help="over hivemind's streams")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    network = MemoryNetwork()
    figures = {
        "in_memory": anyio.run(lambda: run("in memory", network.host, messages=given.messages, seed=given.seed)),
        "streams": anyio.run(
            lambda: run("streams", _hivemind, messages=given.streams, seed=given.seed + 1), backend_options=LOOP
        ),
    }
    write_report("mutations", figures, packages=("hivemind",))
    return int(any(part["faults"] for part in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
