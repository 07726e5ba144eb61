"""Following the run's key: from the one in the invite to its newest successor, whoever tells of it first.

    dialled under an earlier key, another answers ─┐
    a coordinator, before each hello ──────────────┼─► its chain ─► RunKeys.judge ─► keys.bin ─► adopted ─► changed
    peers that call themselves coordinators ───────┤     (a rival is refused, and told once)
    any peer, while the coordinator is lost ───────┘

What others say are hints where to look: the chain itself is the proof. It is on disk before anything acts on it, if the
disk has room.
"""

import contextlib
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from random import Random

import anyio
from anyio import to_thread

from echo_swarm.checkpoint.blob import ask_keys
from echo_swarm.checkpoint.files import explained, read_file, write_atomically
from echo_swarm.checkpoint.reach import Reach, near_enough
from echo_swarm.clock import Clock
from echo_swarm.directory.base import Directory, peers_topic
from echo_swarm.directory.reading import newest_peers, signed_by_earlier_key
from echo_swarm.errors import AnotherPeer, LocalFault, PeerFault, PeerUnreachable
from echo_swarm.identity import PeerId, peer_id_of
from echo_swarm.invite import Invite
from echo_swarm.succession import CHAIN_LIMITS, CheckedChain, KeyChain, Rival, RunKeys, day, read_chain
from echo_swarm.transport.base import Host
from echo_swarm.work import Role

ASK_S = 5.0
"""For one peer to answer, dialling included."""
MAX_ASKED = 4
"""Of each kind, a random choice at each look."""
AGAIN_S = 60.0
"""A peer that knew nothing new is left alone for this long, and the directory by a node that misses nobody."""
MAX_REMEMBERED = 1024


def read_keys(path: Path | None, invite: Invite) -> RunKeys:
    """Return the run's keys as `path` has them; what is damaged there, or of another invite's run, counts for nothing.

    The invite is the person's word: a chain without its key is forgotten, as after one learnt from a thief.
    """
    keys = RunKeys(invite.run, invite.key)
    raw = None if path is None else read_file(path, CHAIN_LIMITS.max_bytes)
    with contextlib.suppress(PeerFault):
        if raw is not None and (checked := keys.judge(read_chain(raw))) is not None:
            keys.adopt(checked)
    return keys


async def _nobody() -> None:
    pass


class Following:
    """Learns of successors of the run's key.

    Args:
        host: asks.
        invite: names the run, its key then, and where to begin.
        keys: shared with all who must know the run's key.
        path: where the chain is kept; None to forget it.
        say: tells a line to a person.
        near: how near an address may be that is dialled because a record has it.
        clock: for how often a peer is asked.

    """

    def __init__(
        self,
        host: Host,
        invite: Invite,
        keys: RunKeys,
        *,
        path: Path | None,
        say: Callable[[str], None],
        near: Reach,
        clock: Clock,
        random_source: Random | None = None,
    ) -> None:
        self.keys = keys
        self.changed: Callable[[], Awaitable[None]] = _nobody
        """Called after another chain was adopted, before the one who asked goes on."""
        self.directory: Directory | None = None
        """Where records are looked for; None before there is one."""
        self._host = host
        self._invite = invite
        self._path = path
        self._say = say
        self._near = near
        self._clock = clock
        self._random = random_source or Random()
        self._looked_at_s = float("-inf")
        self._asked: dict[PeerId, float] = {}
        self._told: set[str] = set()
        self._turn = anyio.Lock()

    @property
    def invited(self) -> list[str]:
        """Where the invite says that the coordinator is, under the key of now."""
        boot = self._invite.boot
        return [self.keys.address(address) for address in boot if self.keys.has_been(address.rpartition("/p2p/")[2])]

    async def at(self, address: str, *, timeout_s: float = ASK_S) -> PeerId:
        """Dial an address. Whoever answers there in place of a key of the run is followed, if it can show the chain.

        Raises:
            PeerUnreachable: also when another one answers, who is no successor.

        """
        try:
            return await self._host.connect(address, timeout_s=timeout_s)
        except AnotherPeer as e:
            if not await self.is_successor(e):
                raise
            return PeerId(e.found)

    async def is_successor(self, stranger: AnotherPeer) -> bool:
        """Say whether the peer that answers at the address of a key of the run has the run's key now; then follow."""
        where, _, expected = stranger.address.rpartition("/p2p/")
        if not self.keys.has_been(expected):
            return False
        address = f"{where}/p2p/{stranger.found}"
        try:
            found = await self._host.connect(address, timeout_s=ASK_S)
        except PeerUnreachable:
            return False
        await self.ask(found)
        if self.keys.coordinator != found:
            return False
        if self.directory is not None:
            self.directory.meet(address)
        return True

    async def ask(self, peer: PeerId) -> bool:
        """Ask a peer for the chain that it knows. Returns whether it led on."""
        self._note(peer)
        try:
            with anyio.fail_after(ASK_S):
                chain = await ask_keys(self._host, peer, self._invite.run, timeout_s=ASK_S)
            return await self._take(chain)
        except Rival as e:
            self._tell(f"warning: {e}")
        except (PeerUnreachable, PeerFault, TimeoutError):
            pass  # One of many; one that is too old to know the question is no fault either.
        return False

    async def _take(self, chain: KeyChain) -> bool:
        async with self._turn:
            checked = self.keys.judge(chain)
            if checked is None:
                return False
            # Whoever asked may have a deadline; parts of a node that hold to different keys would be worse than a wait.
            with anyio.CancelScope(shield=True):
                await self._adopt(checked)
            return True

    async def _adopt(self, checked: CheckedChain) -> None:
        before = self.keys.coordinator
        if self._path is not None:
            try:
                await to_thread.run_sync(_save, self._path, checked)
            except LocalFault as e:
                # A full disk must not keep a node at a thief.
                self._tell(f"warning: the run's new key counts, and a restart will not know it: {e}")
        self.keys.adopt(checked)
        if self.keys.coordinator != before and (last := self.keys.last) is not None:
            self._say(
                f"the run's key was replaced on {day(last.made_at)}: the coordinator is {self.keys.coordinator} "
                f"now, and no longer {before}, which signed that"
            )
        await self.changed()

    async def look(self, *, lost: bool = False) -> bool:
        """Ask some of those who may know more. Returns whether one of them did.

        Args:
            lost: the coordinator cannot be found: ask ordinary peers and those that the invite names, too.

        """
        now_s = self._clock.monotonic_s()
        if self.directory is None or (not lost and now_s - self._looked_at_s < AGAIN_S):
            return False
        self._looked_at_s = now_s
        records = newest_peers(await self.directory.find(peers_topic(self._invite.run)), run_id=self._invite.run)
        known = (self._host.peer_id, self.keys.coordinator)
        others = {peer: record for peer, record in records.items() if peer not in known and self._may_ask(peer)}
        claims = [peer for peer, record in others.items() if record.role is Role.COORDINATOR]
        chosen = self._some(claims)
        if lost:
            chosen += self._some(peer for peer in others if peer not in claims)
        before = self.keys.chain
        async with anyio.create_task_group() as tasks:
            for peer in chosen:
                tasks.start_soon(self._dial_and_ask, peer, near_enough(others[peer].addresses, self._near))
            if lost:
                for address in self._invite.boot:
                    peer = PeerId(address.rpartition("/p2p/")[2])
                    if not self.keys.has_been(peer) and self._may_ask(peer):
                        tasks.start_soon(self._dial_and_ask, peer, (address,))
        return self.keys.chain != before

    def notice(self, envelopes: Iterable[bytes]) -> None:
        """Tell, once, that somebody goes on signing records with a key that was succeeded."""
        for signer, gone in signed_by_earlier_key(envelopes, self.keys):
            self._tell(
                f"warning: somebody announces versions of this run under {peer_id_of(signer)}, the key that its owner "
                f"replaced on {day(gone.made_at)}; that is refused"
            )

    async def _dial_and_ask(self, peer: PeerId, addresses: Iterable[str]) -> None:
        with anyio.move_on_after(2 * ASK_S):
            for address in [*addresses][:MAX_ASKED]:
                with contextlib.suppress(PeerUnreachable):
                    if await self._host.connect(address, timeout_s=ASK_S) == peer:
                        break
            await self.ask(peer)

    def _some(self, peers: Iterable[PeerId]) -> list[PeerId]:
        found = list(peers)
        return self._random.sample(found, min(MAX_ASKED, len(found)))

    def _may_ask(self, peer: PeerId) -> bool:
        return self._clock.monotonic_s() - self._asked.get(peer, float("-inf")) >= AGAIN_S

    def _note(self, peer: PeerId) -> None:
        if len(self._asked) >= MAX_REMEMBERED:
            self._asked.clear()
        self._asked[peer] = self._clock.monotonic_s()

    def _tell(self, line: str) -> None:
        if line not in self._told and len(self._told) < MAX_REMEMBERED:
            self._told.add(line)
            self._say(line)


def _save(path: Path, checked: CheckedChain) -> None:
    with explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, checked.chain.raw)
