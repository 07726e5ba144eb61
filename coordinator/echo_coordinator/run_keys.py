"""The run's key on disk, and its rotation: a new key, a succession signed by both, then the new one in its place.

    keys/next.key (new) ──► keys/succession.bin (the chain, one link longer) ──► next.key renamed to run.key
                            └ from here on the run has the new key             └ the old one is gone

Killed before succession.bin, the run has the old key and the next rotation makes another new one. Killed after it, the
next start or rotation does the renaming. There is no moment at which the folder holds neither.

The old private key is not kept. It could sign nothing that counts but a second succession, and whoever finds it could
show that one to newcomers with old invites. Backups still hold it.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from echo_coordinator.config import load_settings
from echo_coordinator.epochs import number_of, read_noted, require_newest
from echo_coordinator.run_folder import RunFolder
from echo_swarm.checkpoint.files import explained, read_file, sync_folder, write_atomically
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.clock import Clock
from echo_swarm.envelope import OVERHEAD_BYTES, unseal
from echo_swarm.errors import LocalFault, PeerFault, UsageError
from echo_swarm.identity import Identity, PeerId, load, load_or_create, peer_id_of
from echo_swarm.manifest import MANIFEST_LIMITS, RunManifest
from echo_swarm.succession import (
    CHAIN_LIMITS,
    MAX_SUCCESSIONS,
    SUCCESSION_LIMITS,
    KeyChain,
    RunKeys,
    Succession,
    check_chain,
    kept_of,
    make_link,
    read_chain,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotated:
    """What a rotation did."""

    old: PeerId
    new: PeerId
    sequence: int
    was_interrupted: bool
    """Only finished what an earlier call had begun."""


def load_run_key(folder: RunFolder, run_id: str) -> Identity:
    """Return the run's key, after finishing a rotation that was interrupted. The folder's lock must be held.

    Raises:
        UsageError: the key cannot be read.
        LocalFault: the key is not the one that the successions end with.

    """
    return _settled(folder, run_id)[0]


def known_keys(folder: RunFolder, run_id: str, identity: Identity) -> RunKeys:
    """Return the keys of a run, of which `identity` is the newest. Raises LocalFault."""
    keys = RunKeys(run_id, identity.public_key)
    try:
        checked = keys.judge(_read(folder))
    except PeerFault as e:
        raise _torn(folder, str(e)) from e
    if checked is not None:
        keys.adopt(checked)
    if keys.key != identity.public_key:
        raise _torn(folder, f"they end with {keys.coordinator}")
    return keys


def rotated_at(folder: RunFolder) -> float | None:
    """Return when the run got its newest key, by the clock of then; None if it has its first. Raises LocalFault."""
    chain = _read(folder)
    if not chain.links:
        return None
    try:
        return unseal(chain.links[-1].by_new, Succession, SUCCESSION_LIMITS).message.made_at
    except PeerFault as e:
        raise _torn(folder, str(e)) from e


def rotate_key(root: Path, clock: Clock, *, take_over: bool = False) -> Rotated:
    """Give a run that is not running a new key.

    Args:
        root: the run's folder.
        clock: for the time in the succession.
        take_over: also when another coordinator with this key is known to have begun later; what it published since
            does not count under the new key.

    Raises:
        UsageError: a coordinator runs on it, or it has had as many keys as it can have.
        TakenOver: another coordinator began later, and `take_over` is not given.
        LocalFault: the folder is damaged or cannot be written; the run has the old key or the new one.

    """
    folder = RunFolder(root)
    folder.require()
    with folder.locked():
        run_id = load_settings(folder).run.id
        old, finished = _settled(folder, run_id)
        keys = known_keys(folder, run_id, old)
        if finished and keys.last is not None:
            return _rotated(keys.last, was_interrupted=True)
        require_newest(folder, run_id, old, take_over=take_over)
        sequence = len(keys.chain.links) + 1
        if sequence > MAX_SUCCESSIONS:
            raise UsageError(f"this run has had {sequence} keys, which is all it can have; begin a new run with init")
        for leftover in folder.next_key.parent.glob("*next.key*"):
            leftover.unlink()  # Of a rotation that never was.
        new, _ = load_or_create(folder.next_key)
        sync_folder(folder.next_key.parent)
        succession = _succession(folder, run_id, sequence, old, new, clock)
        chain = KeyChain(links=(*keys.chain.links, make_link(old, new, succession)))
        check_chain(chain, run_id=run_id)
        write_atomically(folder.successions, chain.raw)
        _put_in_place(folder)
    return _rotated(succession, was_interrupted=False)


def _settled(folder: RunFolder, run_id: str) -> tuple[Identity, bool]:
    """Return the run's key, and whether it had to be put into its place."""
    identity = load(folder.key)
    links = _read(folder).links
    try:
        last = check_chain(KeyChain(links=links), run_id=run_id).links[-1].message if links else None
    except PeerFault as e:
        raise _torn(folder, str(e)) from e
    if last is None or last.new_key == identity.public_key:
        return identity, False
    if last.old_key == identity.public_key and folder.next_key.exists():
        following = load(folder.next_key)
        if following.public_key == last.new_key:
            _put_in_place(folder)
            return following, True
    raise _torn(folder, "another key lies there")


def _put_in_place(folder: RunFolder) -> None:
    with explained(folder.key):
        os.replace(folder.next_key, folder.key)
    sync_folder(folder.key.parent)


def _read(folder: RunFolder) -> KeyChain:
    if not folder.successions.exists():
        return KeyChain(links=())
    raw = read_file(folder.successions, CHAIN_LIMITS.max_bytes)
    try:
        return read_chain(raw or b"")
    except PeerFault as e:
        raise _torn(folder, str(e)) from e


def _torn(folder: RunFolder, why: str) -> LocalFault:
    return LocalFault(
        f"{folder.key} is not the key that {folder.successions} ends with ({why}); restore both, and what else is in "
        "that folder, from the same backup. A key from before the last rotation is worth nothing any more"
    )


def _succession(
    folder: RunFolder, run_id: str, sequence: int, old: Identity, new: Identity, clock: Clock
) -> Succession:
    store = VersionStore(folder.store, run_id)
    manifests = [(v, signed) for v in store.versions() if (signed := store.manifest(v)) is not None]
    return Succession(
        run_id=run_id,
        sequence=sequence,
        old_key=old.public_key,
        new_key=new.public_key,
        epoch=number_of(read_noted(folder).own, run_id, old),
        made_at=clock.wall_s(),
        kept=kept_of(_run_digest(folder), [(v, signed.digest) for v, signed in manifests]),
    )


def _run_digest(folder: RunFolder) -> bytes | None:
    raw = read_file(folder.run_manifest, MANIFEST_LIMITS.max_bytes + OVERHEAD_BYTES)
    try:
        return None if raw is None else unseal(raw, RunManifest, MANIFEST_LIMITS).digest
    except PeerFault:
        return None  # It is made anew at the next start.


def _rotated(succession: Succession, *, was_interrupted: bool) -> Rotated:
    return Rotated(
        old=peer_id_of(succession.old_key),
        new=peer_id_of(succession.new_key),
        sequence=succession.sequence,
        was_interrupted=was_interrupted,
    )
