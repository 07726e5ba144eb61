"""The status file of a node that does not take part yet: what it waits for, for `echo-node status`."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from echo_node.config import NodeConfig, StatePaths
from echo_node.liveness import stamp
from echo_node.status import LocalStatus, write_status
from echo_swarm.checkpoint.files import read_file
from echo_swarm.clock import Clock
from echo_swarm.errors import LocalFault
from echo_swarm.identity import PeerId
from echo_swarm.invite import Invite

BEAT_S = 30.0
"""What is waited for is noted again at least this often (see `ticker`), or nearly."""
_LIMIT_BYTES = 1 << 20


def noting(config: NodeConfig, invite: Invite, peer: PeerId, clock: Clock) -> Callable[[str], None]:
    """Return what writes a state into the status file, keeping the counters that an earlier process left there.

    It blocks for one small file. That it cannot be written is told later, by the node itself.
    """
    path = StatePaths(state_dir=config.state_dir, run_id=invite.run).status
    started_at, started_up_s = clock.wall_s(), clock.monotonic_s()
    before = _before(path) or LocalStatus(
        run_id=invite.run, peer_id=peer, pid=0, written_at=0.0, started_at=0.0, beat_s=BEAT_S, state=""
    )

    def note(state: str) -> None:
        up_s = clock.monotonic_s() - started_up_s
        now = {**stamp(clock), "pid": os.getpid(), "started_at": started_at, "up_s": up_s, "beat_s": BEAT_S}
        gone = {"loaded_version": None, "tokens": 0, "tokens_per_s": 0.0, "swaps": (), "standing": ""}
        status = before.model_copy(
            update={**now, **gone, "peer_id": peer, "role": config.role.value, "running": True, "state": state[:128]}
        )
        with contextlib.suppress(LocalFault, OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_status(path, status)

    return note


def _before(path: Path) -> LocalStatus | None:
    try:
        return LocalStatus.model_validate_json(read_file(path, _LIMIT_BYTES) or b"")
    except ValidationError:
        return None
