"""A process with many peers in the directory, each with a helper process of its own, for a test that kills all of them.

    directory_crowd_child.py <peers> <bootstrap address>

Prints `ready` once all are in the network, and stays.
"""

import sys
from contextlib import AsyncExitStack

import anyio

from echo_swarm.directory.dht import open_dht_directory
from echo_swarm.identity import Identity
from echo_swarm.transport.hivemind import open_hivemind_host


async def main(count: int, bootstrap: str) -> None:
    async with AsyncExitStack() as stack:
        for _ in range(count):
            identity = Identity.generate()
            host = await stack.enter_async_context(open_hivemind_host(identity, listen=("/ip4/127.0.0.1/tcp/0",)))
            await stack.enter_async_context(
                open_dht_directory(host, identity, client_mode=False, bootstrap=(bootstrap,))
            )
        print("ready", flush=True)
        await anyio.sleep_forever()


anyio.run(main, int(sys.argv[1]), sys.argv[2])
