"""What a node holds to: the run's keys, the newest version under them, and how both are learnt. For node and seeder."""

from dataclasses import dataclass
from typing import Protocol

from anyio import to_thread

from echo_node.activity import Activity
from echo_node.config import StatePaths
from echo_node.following import Following, read_keys
from echo_node.heads import Heads
from echo_node.link import Link
from echo_node.peers import Peers
from echo_node.policy_sync import PolicySync
from echo_swarm.checkpoint.fetch import Fetcher
from echo_swarm.checkpoint.reach import Reach
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.checkpoint.trust import TrustedHead
from echo_swarm.clock import Clock
from echo_swarm.directory.base import Directory
from echo_swarm.invite import Invite
from echo_swarm.succession import RunKeys
from echo_swarm.transport.base import Host


@dataclass(frozen=True, slots=True, kw_only=True)
class Allegiance:
    """Made once for a node; `attach` connects the parts that follow a new key."""

    keys: RunKeys
    trusted: TrustedHead
    heads: Heads
    following: Following
    store: VersionStore
    peers: Peers

    def attach(self, fetcher: Fetcher, policies: PolicySync, link: Link) -> None:
        """Have these follow the run's key from now on."""

        async def changed() -> None:
            self.peers.coordinator = self.keys.coordinator
            fetcher.follow(self.keys.coordinator)
            dropped = await to_thread.run_sync(self.store.keep_under, self.keys)
            self.trusted.keys_changed()
            policies.key_changed(dropped)
            link.check_key()

        self.following.changed = changed


class Seams(Protocol):
    """What of a node's seams is needed here."""

    @property
    def host(self) -> Host:
        """Asks others."""
        ...

    @property
    def directory(self) -> Directory:
        """Where others are found."""
        ...

    @property
    def clock(self) -> Clock:
        """For pauses."""
        ...


def make_allegiance(
    seams: Seams, invite: Invite, paths: StatePaths, store: VersionStore, activity: Activity, near: Reach
) -> Allegiance:
    """Read what this node knew when it ended. `near`: how near addresses may be that peers give."""
    host, directory, clock = seams.host, seams.directory, seams.clock
    keys = read_keys(paths.keys, invite)
    if keys.last is not None:
        store.keep_under(keys)  # A kill may have come between following and this.
    trusted = TrustedHead(
        run_id=invite.run,
        publisher_key=invite.key,
        persisted=store.known_manifests(),
        epoch=store.epoch(),
        keys=keys,
    )
    for problem in trusted.damaged:
        activity.say(f"warning: a manifest on disk is damaged and was skipped ({problem})")
    peers = Peers(
        host=host, directory=directory, run_id=invite.run, coordinator=keys.coordinator, near=near, clock=clock
    )
    following = Following(host, invite, keys, path=paths.keys, say=activity.say, near=near, clock=clock)
    following.directory = directory
    heads = Heads(
        host=host,
        directory=directory,
        invite=invite,
        store=store,
        trusted=trusted,
        peers=peers,
        clock=clock,
        following=following,
    )
    return Allegiance(keys=keys, trusted=trusted, heads=heads, following=following, store=store, peers=peers)
