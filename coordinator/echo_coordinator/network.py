"""The coordinator's host and DHT node. Imports hivemind, which takes some seconds, when they are opened."""

import errno
import re
import socket
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


async def _require_free_ports(listen: Sequence[str]) -> None:
    """Raise UsageError when somebody listens there already; p2pd would share the port without a word."""
    for address in listen:
        ip_port = re.fullmatch(r"/ip[46]/([^/]+)/tcp/([1-9]\d*)", address)
        if ip_port is None:
            continue
        host, port = ip_port.groups()
        for _ in range(PORT_TRIES):
            if _is_free(host, int(port)):
                break
            await anyio.sleep(PORT_PAUSE_S)
        else:
            raise UsageError(
                f"port {port} of {host} is in use; end what listens there, or change network.listen in run.toml "
                "(the invite changes with it)"
            )


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # Connections that have ended may linger on the port; that hinders nobody.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as e:
            return e.errno != errno.EADDRINUSE
    return True


@asynccontextmanager
async def open_network(settings: RunSettings, identity: Identity) -> AsyncGenerator[tuple[Host, Directory]]:
    """Open the host and the DHT node of the coordinator."""
    from echo_swarm.directory.dht import open_dht_directory
    from echo_swarm.transport.hivemind import open_hivemind_host

    network = settings.network
    await _require_free_ports(network.listen)
    async with (
        open_hivemind_host(
            identity, listen=network.listen, announce=network.announce, bootstrap=network.bootstrap, many_peers=True
        ) as host,
        open_dht_directory(host, identity, client_mode=False, bootstrap=network.bootstrap) as directory,
    ):
        yield host, directory
