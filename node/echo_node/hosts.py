"""The one place that knows which libp2p host and which directory a node runs on."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from echo_swarm.directory.base import Directory
from echo_swarm.identity import Identity
from echo_swarm.invite import Invite
from echo_swarm.transport.base import Host


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A node's way to others."""

    host: Host
    directory: Directory


@asynccontextmanager
async def open_network(
    identity: Identity, invite: Invite, *, listen: Sequence[str] = (), outbound_only: bool = False
) -> AsyncGenerator[Network]:
    """Run host and directory for the length of the block. Imports hivemind, which takes some seconds.

    Args:
        identity: of this node.
        invite: names the bootstrap addresses.
        listen: multiaddresses to listen on; empty for any free port.
        outbound_only: listen nowhere and keep nothing for others.

    Raises:
        BootstrapFailed: no address of the invite answered.
        DaemonFailed: the helper process did not start or died.
        LocalFault: no host is installed.

    """
    from echo_swarm.directory.dht import open_dht_directory
    from echo_swarm.transport.hivemind import LISTEN_EVERYWHERE, open_hivemind_host

    where = () if outbound_only else (tuple(listen) or LISTEN_EVERYWHERE)
    async with (
        open_hivemind_host(identity, listen=where, bootstrap=invite.boot) as host,
        open_dht_directory(host, identity, client_mode=outbound_only, bootstrap=invite.boot) as directory,
    ):
        yield Network(host=host, directory=directory)
