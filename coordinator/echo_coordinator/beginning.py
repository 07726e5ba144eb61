"""What a coordinator makes sure of before it speaks to anybody: its description, its keys, its parts, its epoch."""

from collections.abc import Sequence
from dataclasses import dataclass

from echo_coordinator.config import RunSettings
from echo_coordinator.epochs import Fence, take_epoch
from echo_coordinator.manifests import write_run_manifest
from echo_coordinator.run_folder import RunFolder
from echo_coordinator.run_keys import known_keys
from echo_coordinator.state.run_state import RunState
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.clock import Clock
from echo_swarm.errors import LocalFault
from echo_swarm.identity import Identity
from echo_swarm.succession import RunKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What a coordinator stands on."""

    identity: Identity
    """The run's key."""
    keys: RunKeys
    """That key and those before it."""
    run_manifest: bytes
    store: VersionStore


def prepare(folder: RunFolder, settings: RunSettings, identity: Identity, clock: Clock) -> Ground:
    """Write the run's description and the successions of its key where they are served from.

    Raises SettingsError, LocalFault.
    """
    run_manifest = write_run_manifest(folder, settings, identity, clock)
    keys = known_keys(folder, settings.run.id, identity)
    store = VersionStore(folder.store, settings.run.id)
    store.save_run(run_manifest)
    if keys.last is not None:
        store.save_keys(keys.chain)
    return Ground(identity=identity, keys=keys, run_manifest=run_manifest, store=store)


def begin_epoch(folder: RunFolder, ground: Ground, clock: Clock, addresses: Sequence[str], *, take_over: bool) -> Fence:
    """Begin this start's epoch, above those under the key before; see `take_epoch`."""
    return take_epoch(
        folder,
        ground.store.run_id,
        ground.identity,
        ground.store.newest(),
        clock,
        addresses=addresses,
        take_over=take_over,
        above=ground.keys.last.epoch if ground.keys.last else 0,
    )


def check_whole(folder: RunFolder, store: VersionStore, state: RunState) -> None:
    """Refuse a run folder of which a part is missing: going on would quietly begin again.

    A version is published after its line in the ledger, and that after its checkpoint, so that no crash leaves the
    database behind the store, or the checkpoints empty.
    """
    trained, held = state.core.versions.trained, store.versions()
    if held and held[-1] > trained:
        raise LocalFault(
            f"{folder.store} holds version {held[-1]}, and {folder.database} knows of none after {trained}: the "
            "database was lost or replaced. Restore it from a backup, or begin a new run with init"
        )
    if trained and not any(folder.checkpoints.glob("v*")):
        raise LocalFault(
            f"{folder.checkpoints} is empty, and version {trained} was trained: the optimizer's state is lost. Restore "
            "the folder from a backup, or begin a new run with init from an export of this one"
        )
