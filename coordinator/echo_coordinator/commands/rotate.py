"""`echo-coordinator rotate-key`: what is told of it."""

from pathlib import Path

from echo_coordinator.run_folder import RunFolder
from echo_coordinator.run_keys import rotate_key
from echo_swarm.clock import SystemClock


def rotate(root: Path, *, take_over: bool) -> list[str]:
    """Give a stopped run a new key, and return what to tell. Raises as `rotate_key`."""
    done = rotate_key(root, SystemClock(), take_over=take_over)
    begun = "finished the rotation that was interrupted: " if done.was_interrupted else ""
    folder = RunFolder(root)
    return [
        f"{begun}the run's key is {done.new} now, and no longer {done.old}",
        f"Back up {folder.key.parent} at once: without the new key the run is lost, and a backup of the old key is "
        "worth nothing. The old private key is gone from here; delete its backups.",
        "Nodes follow by themselves, with the invites that they have. If the old key may have been stolen, publish a "
        "fresh invite all the same: with an old one, newcomers who meet the thief first would follow the thief.",
        f"  echo-coordinator start {root}",
    ]
