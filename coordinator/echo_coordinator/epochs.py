"""The epoch of this start of the coordinator, and its end when another coordinator has a higher one.

    RUN/epoch.json ──► take_epoch: one more than all that is known ──► durable ──► signed ──► manifests, records, hellos
         ▲                                                                                     │
         └── Fence.hear ◄── epochs in the directory, and in the hellos of nodes ◄──────────────┘ of the other one

The file has the epoch of the last start, the highest one of another folder that was heard of, the addresses where the
last start could be reached, and where it lay: a folder that lies elsewhere now was copied, and its lock proves nothing.
"""

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import anyio

from echo_coordinator.run_folder import RunFolder, write_json
from echo_swarm.clock import Clock
from echo_swarm.directory.base import Directory, head_topic, peers_topic
from echo_swarm.directory.reading import epochs_in
from echo_swarm.envelope import Signed, seal
from echo_swarm.epoch import NO_EPOCH, Epoch, HighestEpoch, Rank, open_epoch, rank_of
from echo_swarm.errors import LocalFault, PeerFault, TakenOver
from echo_swarm.identity import Identity
from echo_swarm.manifest import CheckpointManifest

WATCH_EVERY_S = 15.0
"""How often the directory is looked at for another coordinator with this key."""
_FIELDS = ("own", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """What a run's folder knows of epochs."""

    own: bytes | None = None
    """Envelope of the epoch of the last start."""
    other: bytes | None = None
    """Envelope of the highest epoch heard of that was not this folder's."""
    addresses: tuple[str, ...] = ()
    """Where the last start could be reached."""
    place: str = ""
    """Machine and folder of the last start."""


def place_of(folder: RunFolder) -> str:
    """Return what tells one copy of a run's folder from another."""
    return f"{socket.gethostname()}:{folder.root.resolve()}"


def read_noted(folder: RunFolder) -> Noted:
    """Return what RUN/epoch.json says. Raises LocalFault when it is damaged."""
    path = folder.epoch
    try:
        values: Any = json.loads(path.read_bytes())
        own, other = (None if values[name] is None else bytes.fromhex(values[name]) for name in _FIELDS)
        addresses = tuple(str(address) for address in values["addresses"])
        return Noted(own=own, other=other, addresses=addresses, place=str(values.get("place", "")))
    except FileNotFoundError:
        return Noted()
    except OSError as e:
        raise LocalFault(f"cannot read {path}: {e.strerror}") from e
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise LocalFault(
            f"{path} is damaged ({type(e).__name__}); delete it and start with --take-over, so that nodes follow this "
            "coordinator whatever they have heard before"
        ) from e


def note(folder: RunFolder, noted: Noted) -> None:
    """Write RUN/epoch.json, durably."""
    hexed = {name: None if (raw := getattr(noted, name)) is None else raw.hex() for name in _FIELDS}
    write_json(folder.epoch, {**hexed, "addresses": list(noted.addresses), "place": noted.place})


class Fence:
    """This start's epoch, and whether a higher one is known. Thread-safe where it says so."""

    def __init__(self, folder: RunFolder, signed: Signed[Epoch]) -> None:
        self._folder = folder
        self._highest = HighestEpoch(run_id=signed.message.run_id, run_key=signed.signer, persisted=(signed.raw,))
        self.own = signed
        """The epoch of this start."""
        self._changed = anyio.Event()

    @property
    def raw(self) -> bytes:
        """The envelope to put into what is signed."""
        return self.own.raw

    @property
    def is_lost(self) -> bool:
        """Whether a higher epoch is known."""
        return self._highest.rank > self.own.message.rank

    def hear(self, raw: bytes | None) -> None:
        """Take an epoch that somebody told. A higher one ends `watch`; the folder notes it if it can be written.

        Raises:
            MalformedMessage, BadSignature, Untrusted: it is no epoch of this run.

        """
        if self._highest.hear(raw):
            self._changed.set()
            self._note_other()

    def _note_other(self) -> str:
        """Note the highest epoch in the folder. Returns why that cannot be, or nothing."""
        highest = self._highest.signed
        assert highest is not None
        try:
            noted = read_noted(self._folder)
            if noted.other != highest.raw:
                note(self._folder, replace(noted, other=highest.raw))
        except LocalFault as e:
            return str(e)
        return ""

    def require(self) -> None:
        """Raise TakenOver when a higher epoch is known: nothing may be signed any more. From any thread."""
        if self.is_lost:
            self._end()

    def _end(self) -> NoReturn:
        other = self._highest.signed
        assert other is not None
        unnoted = self._note_other()
        forgets = f". This folder will not remember it ({unnoted}): do not start it again" if unnoted else ""
        raise TakenOver(taken_over(other.message, self.own.message.rank) + forgets)

    async def watch(self, directory: Directory) -> None:
        """Look for another coordinator with this key for ever. Raises TakenOver when there is one that began later."""
        run_id = self.own.message.run_id
        while not self.is_lost:
            for topic in (head_topic(run_id), peers_topic(run_id)):
                self.hear_records(await directory.find(topic))
            with anyio.move_on_after(WATCH_EVERY_S):
                await self._changed.wait()
        self._end()

    def hear_records(self, envelopes: Sequence[bytes]) -> None:
        """Take the epochs in records of the directory; what is wrong there does not count."""
        for raw in epochs_in(envelopes, run_id=self.own.message.run_id, run_key=self.own.signer):
            try:
                self.hear(raw)
            except PeerFault:
                continue


def taken_over(other: Epoch, own: Rank) -> str:
    """Return why a coordinator has ended, or may not begin."""
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(other.started_at))
    base = "before version 0" if other.base_version is None else f"from version {other.base_version}"
    return (
        f"another coordinator with this run's key has taken over, since {since} (epoch {other.number}, {base}; the one "
        f"of this folder is {own[0]}). Nodes follow that one, and what was published here since does not count. If it "
        "is not to be that way, end the other one and start this one with --take-over; so, too, when this folder was "
        "restored from a backup. If nobody started another one, somebody has the run's key: give the run another with "
        "rotate-key --take-over"
    )


def take_epoch(
    folder: RunFolder,
    run_id: str,
    identity: Identity,
    head: Signed[CheckpointManifest] | None,
    clock: Clock,
    *,
    addresses: Sequence[str] = (),
    take_over: bool = False,
    above: int = 0,
) -> Fence:
    """Begin a new epoch: higher than all that this folder knows of, and durable when this returns.

    Args:
        folder: held by its lock.
        run_id: the run.
        identity: the run's key.
        head: the newest version published from this folder: the epoch's base.
        clock: for people.
        addresses: where this start can be reached, for the next one to know.
        take_over: also when the folder knows of a higher epoch than its own, which this one then replaces.
        above: number of the last epoch under the key before this one, if there was one.

    Raises:
        TakenOver: it knows of a higher one, and `take_over` is not given.
        LocalFault: the file is damaged, or cannot be written.

    """
    noted = read_noted(folder)
    require_newest(folder, run_id, identity, take_over=take_over)
    own, other = _rank(noted.own, run_id, identity), _rank(noted.other, run_id, identity)
    of_head = _rank(None if head is None else head.message.epoch, run_id, identity)
    epoch = Epoch(
        run_id=run_id,
        number=max(own[0], other[0], of_head[0], above) + 1,
        nonce=os.urandom(16),
        started_at=clock.wall_s(),
        base_version=None if head is None else head.message.policy_version,
        base_digest=None if head is None else head.digest,
    )
    raw = seal(identity, epoch)
    note(folder, Noted(own=raw, other=noted.other, addresses=tuple(addresses), place=place_of(folder)))
    return Fence(folder, open_epoch(raw, run_id=run_id, run_key=identity.public_key))


def require_newest(folder: RunFolder, run_id: str, identity: Identity, *, take_over: bool) -> None:
    """Raise TakenOver when the folder knows of a higher epoch than its own, unless that one is to be replaced."""
    noted = read_noted(folder)
    own = _rank(noted.own, run_id, identity)
    if noted.other is not None and _rank(noted.other, run_id, identity) > own and not take_over:
        raise TakenOver(taken_over(open_epoch(noted.other, run_id=run_id, run_key=identity.public_key).message, own))


def number_of(raw: bytes | None, run_id: str, identity: Identity) -> int:
    """Return the number of an epoch under this key; 0 for none."""
    return _rank(raw, run_id, identity)[0]


def _rank(raw: bytes | None, run_id: str, identity: Identity) -> Rank:
    try:
        return rank_of(raw, run_id=run_id, run_key=identity.public_key)
    except PeerFault:
        return NO_EPOCH  # Of an earlier key.
