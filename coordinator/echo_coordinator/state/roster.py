"""Who takes part: one entry a peer, however often it restarts. Pure; times are monotonic seconds.

A key that is live twice: a hello with another `instance` than the one we know, while that one was heard from within
three beats, is either a quick restart or a copied key. It is put on trial: if the old process is heard from before
the trial ends (a live one beats within it), the newcomer is refused; else it takes over.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from echo_swarm.identity import PeerId
from echo_swarm.work import BackendReport, Beat, Hello, Role

BEATS_TO_LIVE = 3
"""Silence of this many beats means gone."""
MAX_ENTRIES = 4096
"""Peer ids cost nothing; beyond this the longest gone are forgotten, and newcomers refused while all are live."""


class Admission(Enum):
    """What to do with a hello."""

    WELCOME = auto()
    TRIAL = auto()
    FULL = auto()


@dataclass(slots=True, kw_only=True)
class Node:
    """One peer."""

    peer: PeerId
    role: Role
    backend: BackendReport | None
    last_seen: float
    instance: bytes | None = None
    """None: known from before the coordinator's restart, not heard from since."""
    software: str = ""
    addresses: tuple[str, ...] = ()
    """Empty: outbound only."""
    network: str = ""
    """That it was last seen in, see `addresses.network_of`. Empty: unknown."""
    joined_at: float = 0.0
    skew_s: float = 0.0
    """Its clock minus ours."""
    held_version: int | None = None
    told_version: int | None = None
    """The newest version, as it was told last."""
    state: str = ""
    """In its own words."""
    tokens_per_s: float = 0.0
    bytes_served: int = 0
    bytes_fetched_peers: int = 0
    live: bool = False
    left: bool = False
    """It said goodbye."""
    contender: bytes | None = field(default=None, repr=False)
    """A newcomer's instance on trial."""


class Roster:
    """The peers of the run."""

    def __init__(self, beat_s: float) -> None:
        self._beat_s = beat_s
        self._nodes: dict[PeerId, Node] = {}
        self.set_aside: dict[PeerId, str] = {}
        """Peers that get no work, and why; also of peers that are not here now."""
        self.suspended: set[PeerId] = set()
        """Peers that get no work since they failed an audit."""
        self.banned: set[PeerId] = set()
        """Peers that the run's owner banned."""

    def get(self, peer: PeerId) -> Node | None:
        """Return an entry."""
        return self._nodes.get(peer)

    def nodes(self) -> list[Node]:
        """Return all entries, gone ones included."""
        return list(self._nodes.values())

    def live(self, role: Role = Role.INFERENCE) -> int:
        """Return how many peers of a role are live."""
        return sum(node.live and node.role is role for node in self._nodes.values())

    def live_peers(self, role: Role = Role.INFERENCE) -> list[PeerId]:
        """Return the live peers of a role."""
        return [node.peer for node in self._nodes.values() if node.live and node.role is role]

    def alone(self) -> bool:
        """Whether exactly one live peer may be given work. Asked for each request: looks no further than the second."""
        working = (
            n for n in self._nodes.values() if n.live and n.role is Role.INFERENCE and not self.is_barred(n.peer)
        )
        return next(working, None) is not None and next(working, None) is None

    def source_of(self, peer: PeerId) -> str:
        """Return what a peer has in common with others that may be the same machine: its address, if that is known."""
        node = self._nodes.get(peer)
        return peer if node is None else node.network or peer

    def is_from_elsewhere(self, sources: Collection[str]) -> bool:
        """Whether a live peer that may be given work is from none of these sources."""
        return any(
            n.live and n.role is Role.INFERENCE and not self.is_barred(n.peer) and (n.network or n.peer) not in sources
            for n in self._nodes.values()
        )

    def restore(self, peer: PeerId, role: Role, backend: BackendReport | None, last_seen: float) -> None:
        """Know a peer from before the restart."""
        self._nodes[peer] = Node(peer=peer, role=role, backend=backend, last_seen=last_seen)

    def consider(self, peer: PeerId, hello: Hello, now: float) -> Admission:
        """Decide on a hello; `admit` or `end_trial` follows."""
        node = self._nodes.get(peer)
        if node is None:
            return Admission.WELCOME if self._make_room(now) else Admission.FULL
        if not node.live or node.instance in (None, hello.instance) or self._silent(node, now):
            return Admission.WELCOME
        node.contender = hello.instance
        return Admission.TRIAL

    def on_trial(self, peer: PeerId, instance: bytes) -> bool:
        """Whether that newcomer's trial goes on: the old process was not heard from and no other newcomer came."""
        node = self._nodes.get(peer)
        return node is not None and node.contender == instance

    def admit(self, peer: PeerId, hello: Hello, now: float, skew_s: float, network: str = "") -> bool:
        """Take a peer in, its past failures forgotten. Returns whether it replaces an earlier process."""
        before = self._nodes.get(peer)
        replaces = before is not None and before.instance not in (None, hello.instance)
        again = before is not None and before.instance == hello.instance
        self._nodes[peer] = Node(
            peer=peer,
            role=hello.role,
            backend=hello.backend,
            last_seen=now,
            instance=hello.instance,
            software=hello.software,
            addresses=hello.addresses,
            network=network,
            joined_at=before.joined_at if before is not None and again else now,
            skew_s=skew_s,
            live=True,
        )
        return replaces

    def heard(self, peer: PeerId, now: float) -> Node | None:
        """Note a sign of life of the present process. None: it has to say hello first."""
        node = self._nodes.get(peer)
        if node is None or node.instance is None or not node.live:
            return None
        node.last_seen, node.contender = now, None
        return node

    def beat(self, peer: PeerId, beat: Beat, now: float) -> bool:
        """Take in a beat. False: the peer has to say hello first."""
        node = self.heard(peer, now)
        if node is None:
            return False
        node.held_version = beat.held_version
        node.state = beat.state
        node.tokens_per_s = beat.tokens_per_s
        node.bytes_served = beat.bytes_served
        node.bytes_fetched_peers = beat.bytes_fetched_peers
        return True

    def leave(self, peer: PeerId) -> None:
        """Note a goodbye."""
        node = self._nodes.get(peer)
        if node is not None:
            node.live, node.left, node.tokens_per_s, node.state = False, True, 0.0, "left"

    def sweep(self, now: float) -> list[PeerId]:
        """Declare peers gone that were silent for too long and return them."""
        gone = [node for node in self._nodes.values() if node.live and self._silent(node, now)]
        for node in gone:
            node.live, node.tokens_per_s, node.state = False, 0.0, "lost"
        return [node.peer for node in gone]

    def is_barred(self, peer: PeerId) -> bool:
        """Whether a peer gets no work whatever it asks."""
        return peer in self.set_aside or peer in self.suspended or peer in self.banned

    def _silent(self, node: Node, now: float) -> bool:
        return now - node.last_seen > BEATS_TO_LIVE * self._beat_s

    def _make_room(self, now: float) -> bool:
        if len(self._nodes) < MAX_ENTRIES:
            return True
        self.sweep(now)
        gone = min((n for n in self._nodes.values() if not n.live), key=lambda n: n.last_seen, default=None)
        if gone is None:
            return False
        del self._nodes[gone.peer]
        return True
