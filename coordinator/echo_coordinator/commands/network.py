"""The coordinator's host and DHT node. Imports hivemind, which takes some seconds, when they are opened."""

import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import anyio

from echo_coordinator.config import RunSettings
from echo_swarm.directory.base import Directory
from echo_swarm.errors import UsageError
from echo_swarm.identity import Identity
from echo_swarm.transport.base import Host

PORT_TRIES = 25
PORT_PAUSE_S = 0.2
"""Five seconds, for the p2pd of a coordinator that has just been killed to let go of its port."""
ANSWER_S = 2.0
"""This machine answers itself at once."""


async def _require_free_ports(listen: Sequence[str]) -> None:
    """Raise UsageError when somebody listens there already; p2pd would share the port without a word."""
    for address in listen:
        ip_port = re.fullmatch(r"/ip[46]/([^/]+)/tcp/([1-9]\d*)", address)
        if ip_port is None:
            continue
        host, port = ip_port.groups()
        for _ in range(PORT_TRIES):
            if not await answers(host, int(port)):
                break
            await anyio.sleep(PORT_PAUSE_S)
        else:
            raise UsageError(
                f"port {port} of {host} is in use; end what listens there, or change network.listen in run.toml "
                "(the invite changes with it)"
            )


async def answers(host: str, port: int) -> bool:
    """Return whether somebody listens there. Asked by dialling: trying to bind does not tell where ports are shared."""
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        with anyio.fail_after(ANSWER_S):
            stream = await anyio.connect_tcp(here, port)
    except (OSError, TimeoutError):
        return False
    await stream.aclose()
    return True


@asynccontextmanager
async def open_network(
    settings: RunSettings, identity: Identity, known: Sequence[str] = ()
) -> AsyncGenerator[tuple[Host, Directory]]:
    """Open the host and the DHT node of the coordinator; `known` are addresses of peers that an earlier start met."""
    from echo_swarm.directory.dht import open_dht_directory
    from echo_swarm.transport.hivemind import open_hivemind_host

    network = settings.network
    await _require_free_ports(network.listen)
    async with (
        open_hivemind_host(
            identity, listen=network.listen, announce=network.announce, bootstrap=network.bootstrap, many_peers=True
        ) as host,
        open_dht_directory(host, identity, client_mode=False, bootstrap=network.bootstrap, known=known) as directory,
    ):
        yield host, directory
