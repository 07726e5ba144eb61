"""What `echo-node status` shows of a node that does not take part yet."""

from pathlib import Path

from echo_node.config import NodeConfig, StatePaths
from echo_node.early_status import noting
from echo_node.status import LocalStatus, read_statuses, write_status
from echo_swarm.clock import ManualClock
from echo_swarm.identity import Identity
from echo_swarm.invite import Invite

RUN = "ab" * 16


def test_a_node_that_is_connecting_says_so_and_keeps_what_it_had_counted(tmp_path: Path):
    clock, key = ManualClock(), Identity.generate()
    invite = Invite(run=RUN, key=key.public_key, boot=(f"/ip4/127.0.0.1/tcp/1/p2p/{key.peer_id}",))
    config = NodeConfig(state_dir=tmp_path)
    noting(config, invite, key.peer_id, clock)("connecting, through there")
    clock.advance(60)
    (first,) = read_statuses(tmp_path, clock)
    assert first.live and first.status.state == "connecting, through there" and first.status.accepted == 0
    ran = LocalStatus(
        run_id=RUN,
        run_name="sums",
        peer_id=key.peer_id,
        pid=1,
        written_at=1.0,
        started_at=1.0,
        beat_s=1.0,
        running=False,
        state="left",
        loaded_version=3,
        accepted=7,
        pending=2,
        rejected={"stale": 1},
    )
    write_status(StatePaths(state_dir=tmp_path, run_id=RUN).status, ran)
    noting(config, invite, key.peer_id, clock)("asking the coordinator what the run is" + "." * 200)
    clock.advance(1000)
    (again,) = read_statuses(tmp_path, clock)
    assert not again.live and again.status.run_name == "sums" and len(again.status.state) == 128
    assert (again.status.accepted, again.status.pending, again.status.rejected) == (7, 2, {"stale": 1})
    assert again.status.running and again.status.loaded_version is None


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path):
    (tmp_path / "runs").write_text("in the way")
    key = Identity.generate()
    invite = Invite(run=RUN, key=key.public_key, boot=(f"/ip4/127.0.0.1/tcp/1/p2p/{key.peer_id}",))
    noting(NodeConfig(state_dir=tmp_path), invite, key.peer_id, ManualClock())("connecting")
