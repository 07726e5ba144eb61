"""What a peer knows of a run from earlier: enough to begin while the coordinator is away."""

from pathlib import Path

from anyio import to_thread

from echo_node.activity import Activity
from echo_node.config import KEYS
from echo_node.following import read_keys
from echo_node.policy_sync import PolicySync
from echo_swarm.checkpoint.shelf import ManifestShelf
from echo_swarm.checkpoint.trust import TrustedHead, check_run_manifest
from echo_swarm.envelope import Signed
from echo_swarm.errors import PeerFault
from echo_swarm.invite import Invite
from echo_swarm.manifest import CheckpointManifest, RunManifest
from echo_swarm.succession import RunKeys


def known_run(runs: Path, invite: Invite) -> Signed[RunManifest] | None:
    """Return the run's description if a good one lies in the folder of runs. Blocking."""
    if not (runs / invite.run).is_dir():
        return None
    raw = ManifestShelf(runs, invite.run).run()
    try:
        return None if raw is None else _checked(raw, invite, read_keys(runs / invite.run / KEYS, invite))
    except PeerFault:
        return None


def known_head(runs: Path, invite: Invite) -> CheckpointManifest | None:
    """Return the newest version that was trusted here, for the choice of a backend. Blocking."""
    if not (runs / invite.run).is_dir():
        return None
    persisted = ManifestShelf(runs, invite.run).known_manifests()
    keys = read_keys(runs / invite.run / KEYS, invite)
    head = TrustedHead(run_id=invite.run, publisher_key=invite.key, persisted=persisted, keys=keys).head
    return None if head is None else head.message


def keep_run(runs: Path, run: Signed[RunManifest]) -> None:
    """Write the run's description down for the node, and for later starts. Blocking. Raises LocalFault."""
    ManifestShelf(runs, run.message.run_id).save_run(run.raw)


async def recall_run(
    shelf: ManifestShelf, invite: Invite, keys: RunKeys, policies: PolicySync, activity: Activity
) -> None:
    """Tell policy sync what the run is, as far as it lies on this disk."""
    raw = await to_thread.run_sync(shelf.run)
    if raw is None:
        return
    try:
        signed = _checked(raw, invite, keys)
    except PeerFault as e:
        activity.say(f"warning: the run's description on disk is damaged ({e}); asking the coordinator")
    else:
        await policies.joined(signed.message, raw, None)


def _checked(raw: bytes, invite: Invite, keys: RunKeys) -> Signed[RunManifest]:
    return check_run_manifest(raw, run_id=invite.run, publisher_key=invite.key, keys=keys)
