"""Bans: the run's owner wants nothing from a peer any more, until it is pardoned. Outlives restarts and crashes."""

import contextlib
from collections.abc import Mapping
from sqlite3 import Connection

from echo_coordinator.state import ban_rows, rows
from echo_coordinator.state.audits import Audits
from echo_coordinator.state.ban_rows import Ban
from echo_coordinator.state.batch import Event
from echo_coordinator.state.core import RunCore
from echo_swarm.errors import LocalFault, RemoteError
from echo_swarm.identity import PeerId
from echo_swarm.render import short_peer
from echo_swarm.work import BANNED


class Bans:
    """Who is banned. A banned peer's calls are refused unread; `status` alone is open to everybody."""

    def __init__(self, core: RunCore, audits: Audits, connection: Connection) -> None:
        self._core = core
        self._audits = audits
        self._bans = ban_rows.load_bans(connection)
        self._owed: dict[PeerId, Ban] = {}
        """Bans that are not on disk yet."""
        for peer, ban in self._bans.items():
            # A ban may have been written while no coordinator ran: what follows from it is done now.
            self._apply(peer, takes_back=ban.takes_back)

    @property
    def all(self) -> Mapping[PeerId, Ban]:
        """Bans by peer."""
        return self._bans

    def refuse(self, peer: PeerId) -> None:
        """Raise RemoteError if a peer is banned."""
        if (ban := self._bans.get(peer)) is not None:
            raise RemoteError(BANNED, ban.reason or "no reason was given")

    async def ban(self, peer: PeerId, reason: str, *, take_back: bool) -> int:
        """Ban a peer, and return how many of its completions were taken back. It need not have been here ever.

        Raises:
            LocalFault: that cannot be written. The ban is in force all the same, and written as soon as it can be.

        """
        core, before = self._core, self._bans.get(peer)
        takes_back = take_back or (before is not None and before.takes_back)
        ban = Ban(at=core.clock.wall_s(), reason=reason, takes_back=takes_back)
        self._bans[peer] = ban
        taken = self._apply(peer, takes_back=take_back)
        text = f"{short_peer(peer)} was banned ({reason or 'no reason given'})"
        if take_back:
            text += f"; {taken} completions of it were taken back"

        def job(db: Connection) -> None:
            ban_rows.write_ban(db, peer, ban)
            rows.insert_event(db, Event(at=ban.at, kind="ban", text=text))

        core.notify_all()
        try:
            # In one transaction with the slots and leases that changed.
            await core.committer.execute(job)
        except LocalFault as e:
            self._owed[peer] = ban
            raise type(e)(
                f"{peer} is banned, but that could not be written down ({e}): it is tried again, and forgotten if the "
                "coordinator ends before"
            ) from e
        self._owed.pop(peer, None)
        return taken

    async def write_owed(self) -> None:
        """Try again to write bans down that could not be written."""
        for peer, ban in list(self._owed.items()):
            with contextlib.suppress(LocalFault):
                await self._core.committer.execute(lambda db, peer=peer, ban=ban: ban_rows.write_ban(db, peer, ban))
                self._owed.pop(peer, None)

    async def pardon(self, peer: PeerId) -> bool:
        """Lift a ban. False: there is none. Raises LocalFault: it cannot be written, and the ban holds."""
        if peer not in self._bans:
            return False
        core, event = self._core, Event(at=self._core.clock.wall_s(), kind="pardon", text=f"{short_peer(peer)}")

        def job(db: Connection) -> None:
            ban_rows.delete_ban(db, peer)
            rows.insert_event(db, event)

        await core.committer.execute(job)
        self._owed.pop(peer, None)
        self._bans.pop(peer, None)
        core.roster.banned.discard(peer)
        return True

    def _apply(self, peer: PeerId, *, takes_back: bool) -> int:
        core = self._core
        core.roster.banned.add(peer)
        core.roster.leave(peer)
        core.on_dropped(core.leases.release_all(peer, "banned", core.clock.monotonic_s()))
        return self._audits.take_back(peer) if takes_back else 0
