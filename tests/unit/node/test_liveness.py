"""Whether `echo-node status` calls a node live, whatever is done to the machine's clock; and the key it follows."""

import io
import itertools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from echo_node.config import NodeConfig, StatePaths
from echo_node.early_status import noting
from echo_node.liveness import boot_id, stamp
from echo_node.show import show_local
from echo_node.status import LocalStatus, Seen, key_change, read_statuses, write_status
from echo_swarm.clock import SystemClock
from echo_swarm.identity import Identity
from echo_swarm.invite import Invite
from echo_swarm.render import short_peer
from echo_swarm.succession import KeyChain, RunKeys, Succession, make_link

RUN = "ab" * 16
HOURS = 3600.0
KEY = Identity.from_seed(b"k" * 32)


@dataclass
class TwoClocks:
    """Clocks that go together, or are set, or stand still."""

    wall: float = 2e9
    up: float = 500.0

    def wall_s(self) -> float:
        return self.wall

    def monotonic_s(self) -> float:
        return self.up

    def passed(self, seconds: float) -> None:
        self.wall, self.up = self.wall + seconds, self.up + seconds


def written(folder: Path, clock: TwoClocks) -> None:
    invite = Invite(run=RUN, key=KEY.public_key, boot=(f"/ip4/127.0.0.1/tcp/1/p2p/{KEY.peer_id}",))
    noting(NodeConfig(state_dir=folder), invite, KEY.peer_id, clock)("connecting")


def seen(folder: Path, clock: TwoClocks, boot: str | None = None) -> Seen:
    (found,) = read_statuses(folder, clock, boot=boot)
    return found


@pytest.mark.parametrize("set_by_s", [-3 * HOURS, 3 * HOURS])
def test_a_node_lives_and_dies_whatever_the_wall_clock_is_set_to(tmp_path: Path, set_by_s: float) -> None:
    clock = TwoClocks()
    written(tmp_path, clock)
    clock.wall += set_by_s
    clock.passed(20)
    assert seen(tmp_path, clock).live and seen(tmp_path, clock).age_s == 20
    clock.passed(200)
    assert not seen(tmp_path, clock).live and seen(tmp_path, clock).age_s >= 220


def test_a_node_of_before_the_machine_was_started_again_is_gone_though_its_clock_began_anew(tmp_path: Path) -> None:
    clock = TwoClocks()
    written(tmp_path, clock)
    assert seen(tmp_path, clock).live and not seen(tmp_path, clock, boot="another").live
    # No battery: the wall clock begins where it was, too. Without an id of the start, the other clock tells.
    clock.up = 10.0
    assert not seen(tmp_path, clock).live


def test_a_node_that_is_gone_was_last_seen_before_the_machine_slept(tmp_path: Path) -> None:
    clock = TwoClocks()
    written(tmp_path, clock)
    clock.wall += 8 * HOURS
    assert seen(tmp_path, clock).live, "it slept too, and writes again in a moment"
    clock.passed(200)
    assert not seen(tmp_path, clock).live and seen(tmp_path, clock).age_s == 8 * HOURS + 200


def test_the_status_of_a_node_that_is_too_old_to_tell_is_judged_by_the_wall_clock(tmp_path: Path) -> None:
    clock = TwoClocks()
    written(tmp_path, clock)
    path = StatePaths(state_dir=tmp_path, run_id=RUN).status
    kept = json.loads(path.read_bytes())
    del kept["written_up_s"], kept["boot"]
    path.write_text(json.dumps(kept))
    assert seen(tmp_path, clock).live
    clock.wall += 3 * HOURS
    assert not seen(tmp_path, clock).live


@pytest.mark.skipif(not Path("/proc/sys/kernel/random/boot_id").exists(), reason="Linux only")
def test_all_processes_share_the_id_of_the_start() -> None:
    program = "from echo_node.liveness import boot_id; print(boot_id())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == boot_id() != ""


def keys_after(changes: int) -> RunKeys:
    ring = [KEY, *(Identity.from_seed(bytes([n]) * 32) for n in range(changes))]
    links = tuple(
        make_link(
            old,
            new,
            Succession(
                run_id=RUN,
                sequence=n,
                old_key=old.public_key,
                new_key=new.public_key,
                epoch=n,
                made_at=1.9e9 + n,
                kept=(),
            ),
        )
        for n, (old, new) in enumerate(itertools.pairwise(ring), start=1)
    )
    keys = RunKeys(RUN, KEY.public_key)
    if (checked := keys.judge(KeyChain(links=links))) is not None:
        keys.adopt(checked)
    return keys


@pytest.mark.parametrize(("changes", "often"), [(0, ""), (1, "replaced once on"), (2, "replaced 2 times, last on")])
def test_a_key_that_the_node_followed_is_shown_with_the_day_and_both_names(
    tmp_path: Path, changes: int, often: str
) -> None:
    keys, clock = keys_after(changes), SystemClock()
    status = LocalStatus(
        run_id=RUN,
        run_name="sums",
        peer_id=KEY.peer_id,
        pid=1,
        **stamp(clock),
        started_at=clock.wall_s(),
        beat_s=5.0,
        state="sampling",
        key_changes=len(keys.chain.links),
        key_change=key_change(keys),
    )
    path = StatePaths(state_dir=tmp_path, run_id=RUN).status
    path.parent.mkdir(parents=True)
    write_status(path, status)
    out = io.StringIO()
    show_local(tmp_path, Console(width=200, file=out), as_json=False)
    shown = out.getvalue()
    if not changes:
        assert "replaced" not in shown
        return
    assert status.key_change is not None
    before, after = short_peer(status.key_change.before), short_peer(status.key_change.after)
    assert f"sums: the run's key was {often} 2030-03-17 17:46 UTC ({before} → {after})" in shown
    assert status.key_change.after == keys.coordinator
