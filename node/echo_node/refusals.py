"""What a coordinator's answer to a hello means for this node: which refusals are final, and what its owner can do."""

from echo_swarm.errors import Banned, IdentityInUse, RemoteError, RunNotFound, UsageError
from echo_swarm.manifest import RunManifest
from echo_swarm.trajectory import DRAW_BY_SEED
from echo_swarm.work import BACKEND_REFUSED, BANNED, seeds_not_followed

UNKNOWN_RUN_CODE = "unknown_run"
IN_USE_CODE = "identity_in_use"

USE_ANOTHER = "start the node with --backend torch or --backend llama_cpp"


def refusal(error: RemoteError, run_id: str) -> Exception:
    """Return what ends this node, or `error` itself: then a later hello may be taken."""
    if error.code == UNKNOWN_RUN_CODE:
        return RunNotFound(f"the peer in the invite does not serve run {run_id} ({error}); ask for a new invite")
    if error.code == IN_USE_CODE:
        return IdentityInUse(
            f"another process with this node's key is live ({error}); stop it, or start this node with its own "
            "--state-dir"
        )
    if error.code == BANNED:
        return Banned(f"the owner of this run has banned this node's key ({error.message}); ask for a pardon to go on")
    if error.code == BACKEND_REFUSED:
        return UsageError(f"the coordinator refused this node: {error.message}; {USE_ANOTHER}")
    return error


def against_backend(name: str, run: RunManifest) -> str:
    """Return why this run would refuse a node with this backend; empty: it would not."""
    if run.require_followed_seeds and name not in DRAW_BY_SEED:
        return seeds_not_followed(name)
    return ""
