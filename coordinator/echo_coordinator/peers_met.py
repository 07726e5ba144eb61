"""Remembers where peers could be reached, so that a copy of the run's folder finds the network from another machine."""

import logging

import anyio
import anyio.to_thread

from echo_coordinator.run_folder import RunFolder
from echo_coordinator.state.run_state import RunState
from echo_swarm.checkpoint.known_peers import remember
from echo_swarm.checkpoint.reach import nearest
from echo_swarm.errors import LocalFault
from echo_swarm.transport.base import Host
from echo_swarm.work import Role

log = logging.getLogger(__name__)

EVERY_S = 10.0


async def keep_peers(folder: RunFolder, state: RunState, host: Host) -> None:
    """Write RUN/peers.json now and then, until cancelled, and once more then."""
    try:
        while True:
            await anyio.sleep(EVERY_S)
            await anyio.to_thread.run_sync(_write, folder, _met(state), host.addresses)
    finally:
        _write(folder, _met(state), host.addresses)


def _met(state: RunState) -> list[tuple[str, ...]]:
    """Return the addresses of those who take part, each ending in its own peer id: seeders first, who stay."""
    nodes = [node for node in state.core.roster.nodes() if not node.left and node.addresses]
    nodes.sort(key=lambda node: (node.role is not Role.SEEDER, -node.last_seen))
    return [tuple(a for a in node.addresses if a.endswith(f"/p2p/{node.peer}")) for node in nodes]


def _write(folder: RunFolder, met: list[tuple[str, ...]], own: tuple[str, ...]) -> None:
    try:
        remember(folder.peers, met, own, nearest(own))
    except LocalFault as e:
        log.warning("where peers can be reached could not be written down: %s", e)
