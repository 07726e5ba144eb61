"""What a coordinator looks for about the run's keys: its own key succeeded elsewhere, a rival, an old key still in use.

records under earlier keys, signed after they were succeeded ──► a warning in the status
others that call themselves coordinators of this run ──► asked for their chain ──► longer than ours: this one ends
                                                                               └─► a rival: a warning
"""

import contextlib
from collections.abc import Callable
from random import Random

import anyio

from echo_swarm.checkpoint.blob import ask_keys
from echo_swarm.checkpoint.reach import near_enough, nearest
from echo_swarm.directory.base import Directory, head_topic, peers_topic
from echo_swarm.directory.reading import newest_peers, signed_by_earlier_key
from echo_swarm.errors import PeerFault, PeerUnreachable, TakenOver
from echo_swarm.identity import PeerId, peer_id_of
from echo_swarm.succession import Rival, RunKeys, Succession, day
from echo_swarm.transport.base import Host
from echo_swarm.work import Role

WATCH_EVERY_S = 60.0
MAX_ASKED = 4
ASK_S = 5.0


class KeyWatch:
    """See the module.

    Args:
        keys: the run's, of which the newest is this coordinator's.
        host: asks.
        directory: where others are found.
        warn: told a line for the status, each once.

    """

    def __init__(
        self,
        keys: RunKeys,
        host: Host,
        directory: Directory,
        warn: Callable[[str], None],
        random_source: Random | None = None,
    ) -> None:
        self._keys = keys
        self._host = host
        self._directory = directory
        self._warn = warn
        self._warned: set[str] = set()
        self._random = random_source or Random()

    async def run(self) -> None:
        """Look for ever. Raises TakenOver when the key was succeeded."""
        while True:
            await self.look()
            await anyio.sleep(WATCH_EVERY_S)

    async def look(self) -> None:
        """Look once. Raises TakenOver."""
        run_id = self._keys.run_id
        peers = await self._directory.find(peers_topic(run_id))
        for signer, gone in signed_by_earlier_key(
            [*await self._directory.find(head_topic(run_id)), *peers], self._keys
        ):
            self._tell(
                f"somebody announces this run under {peer_id_of(signer)}, the key that was replaced on "
                f"{day(gone.made_at)}: a copy of the folder from before, or a thief; nodes that follow refuse it"
            )
        records = newest_peers(peers, run_id=run_id)
        ours = (self._keys.coordinator, self._host.peer_id)
        claims = [peer for peer, record in records.items() if record.role is Role.COORDINATOR and peer not in ours]
        for peer in self._random.sample(claims, min(MAX_ASKED, len(claims))):
            await self._ask(peer, records[peer].addresses)

    async def _ask(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        try:
            with anyio.fail_after(2 * ASK_S):
                for address in near_enough(addresses, nearest(self._host.addresses))[:MAX_ASKED]:
                    with contextlib.suppress(PeerUnreachable):
                        if await self._host.connect(address, timeout_s=ASK_S) == peer:
                            break
                checked = self._keys.judge(await ask_keys(self._host, peer, self._keys.run_id, timeout_s=ASK_S))
        except Rival as e:
            self._tell(str(e))
        except (PeerUnreachable, PeerFault, TimeoutError):
            pass  # Whoever claims to be a coordinator and cannot show why does not count.
        else:
            if checked is not None:
                raise TakenOver(_succeeded(checked.links[len(self._keys.chain.links)].message))

    def _tell(self, line: str) -> None:
        if line not in self._warned and len(self._warned) < 8:
            self._warned.add(line)
            self._warn(line)


def _succeeded(by: Succession) -> str:
    return (
        f"the key of this folder was replaced on {day(by.made_at)} by {peer_id_of(by.new_key)}, in another copy of the "
        "folder: nodes follow that one, and this is from before. Go on with that copy. If nobody of yours did that, "
        "somebody has the key: give the run another with rotate-key, and publish a fresh invite"
    )
