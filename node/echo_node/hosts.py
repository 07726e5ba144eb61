"""The one place that knows which libp2p host and which directory a node runs on."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from anyio import to_thread

from echo_node.following import Following, read_keys
from echo_node.peers import Peers
from echo_swarm.checkpoint.reach import Reach, reach_of_run
from echo_swarm.clock import Clock, SystemClock
from echo_swarm.directory.base import Directory
from echo_swarm.identity import Identity
from echo_swarm.invite import Invite
from echo_swarm.transport.base import Host
from echo_swarm.transport.bootstrap import OnRetry

MAX_KNOWN_DIALLED = 8
"""Of the peers met earlier, beside the addresses of the invite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A node's way to others."""

    host: Host
    directory: Directory
    following: Following
    """Of the run's key, until a node follows for itself."""
    near: Reach
    """How near addresses may be that peers give."""


def peers_of(network: Network, invite: Invite, clock: Clock) -> Peers:
    """Return the other peers of a run, for a look before taking part."""
    return Peers(
        host=network.host,
        directory=network.directory,
        run_id=invite.run,
        coordinator=network.following.keys.coordinator,
        near=network.near,
        clock=clock,
    )


@asynccontextmanager
async def open_network(
    identity: Identity,
    invite: Invite,
    *,
    listen: Sequence[str] = (),
    outbound_only: bool = False,
    patience_s: float = 0.0,
    on_retry: OnRetry | None = None,
    known: Sequence[str] = (),
    alone: bool = False,
    near: Reach | None = None,
    keys_path: Path | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> AsyncGenerator[Network]:
    """Run host and directory for the length of the block. Imports hivemind, which takes some seconds.

    Args:
        identity: of this node.
        invite: names the bootstrap addresses.
        listen: multiaddresses to listen on; empty for any free port.
        outbound_only: listen nowhere and keep nothing for others.
        patience_s: how long to try again while no bootstrap address answers.
        on_retry: told why none did, and the seconds until the next try.
        known: addresses of peers met earlier: one of them is as good as one of the invite's.
        alone: begin though nobody answers; the directory goes on trying.
        near: how near addresses may be that peers give; as the invite says if None.
        keys_path: where it is kept which key the run has by now; None to learn that anew.
        say: told when the run has another key.

    Raises:
        BootstrapFailed: no address of the invite answered, and `alone` is not set.
        DaemonFailed: the helper process did not start or died.
        LocalFault: no host is installed.

    """
    from echo_swarm.directory.dht import open_dht_directory
    from echo_swarm.transport.hivemind import LISTEN_EVERYWHERE, open_hivemind_host

    where = () if outbound_only else (tuple(listen) or LISTEN_EVERYWHERE)
    keys = await to_thread.run_sync(read_keys, keys_path, invite)
    boot = tuple(map(keys.address, invite.boot))
    near = reach_of_run(invite.boot) if near is None else near
    following_of = partial(Following, invite=invite, keys=keys, path=keys_path, say=say, near=near, clock=SystemClock())

    async with open_hivemind_host(
        identity,
        listen=where,
        bootstrap=() if alone else (*boot, *map(keys.address, known[:MAX_KNOWN_DIALLED])),
        patience_s=patience_s,
        on_retry=on_retry,
        on_stranger=lambda host, stranger: following_of(host).is_successor(stranger),
    ) as host:
        following = following_of(host)
        boot = tuple(map(keys.address, invite.boot))  # It may have been followed meanwhile.
        async with open_dht_directory(
            host, identity, client_mode=outbound_only, bootstrap=boot, known=known
        ) as directory:
            following.directory = directory
            yield Network(host=host, directory=directory, following=following, near=near)
