"""A fetch that is killed goes on where it was, and never shows an unfinished file under its final name."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from random import Random

from echo_coordinator.publisher import Publisher, WeightsFile
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.clock import SystemClock
from echo_swarm.identity import Identity
from echo_swarm.manifest import ArtifactKind

RUN_ID = "0123456789abcdef" * 2
CHILD = Path(__file__).with_name("checkpoint_fetch_child.py")
SIZE = 24 << 20


def publish(root: Path, folder: Path) -> bytes:
    header = json.dumps({"w": {"dtype": "U8", "shape": [SIZE], "data_offsets": [0, SIZE]}}).encode()
    data = struct.pack("<Q", len(header)) + header + Random(7).randbytes(SIZE)
    weights = folder / "weights.safetensors"
    weights.write_bytes(data)
    publisher = Publisher(
        identity=Identity.generate(),
        store=VersionStore(root, RUN_ID),
        clock=SystemClock(),
        max_staleness=0,
        keep_versions=1,
    )
    file = WeightsFile(path=weights, kind=ArtifactKind.SAFETENSORS, precision="float32")
    publisher.publish_blocking(0, [file])
    return data


def run_child(seeder: Path, own: Path, *, kill_at_bytes: float, gated: bool = True) -> tuple[int, list[str]]:
    """Run the child until it has verified so many bytes, then SIGKILL it.

    Gated, it stands still while it is killed; else it runs on, and may have finished. Returns the bytes and all lines.
    """
    command = [sys.executable, str(CHILD), str(seeder), str(own), RUN_ID]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        if not gated:
            child.stdin.close()
        seen, lines = 0, []
        for line in child.stdout:
            lines.append(line.strip())
            if line.startswith("done"):
                break
            seen = int(line)
            if seen >= kill_at_bytes:
                child.kill()
                break
            if gated:
                child.stdin.write("\n")
                child.stdin.flush()
        child.stdout.read()
    if gated:
        assert child.returncode == (0 if lines[-1].startswith("done") else -9), lines
    return seen, lines


def test_a_fetch_killed_at_several_points_resumes_and_ends_with_the_right_bytes(tmp_path):
    data = publish(tmp_path / "seeder", tmp_path)
    own = tmp_path / "own"
    final = own / RUN_ID / "v00000000" / ArtifactKind.SAFETENSORS.file_name
    reached = 0
    for share in (0.02, 0.5, 0.91, 1.0):
        seen, lines = run_child(tmp_path / "seeder", own, kill_at_bytes=share * len(data))
        assert int(lines[0]) > reached, "what was verified before the kill was fetched again"
        assert not final.exists()
        reached = seen
    _, lines = run_child(tmp_path / "seeder", own, kill_at_bytes=float("inf"))
    assert lines == [f"done {len(data)} {final}"]
    assert final.read_bytes() == data
    assert sorted(path.name for path in final.parent.iterdir()) == ["manifest.bin", "model.safetensors"]


def test_a_fetch_killed_while_it_runs_never_shows_a_wrong_file(tmp_path):
    data = publish(tmp_path / "seeder", tmp_path)
    own = tmp_path / "own"
    final = own / RUN_ID / "v00000000" / ArtifactKind.SAFETENSORS.file_name
    for share in (0.3, 0.95, 1.0):
        run_child(tmp_path / "seeder", own, kill_at_bytes=share * len(data), gated=False)
        assert not final.exists() or final.read_bytes() == data
    run_child(tmp_path / "seeder", own, kill_at_bytes=float("inf"), gated=False)
    assert final.read_bytes() == data
    assert VersionStore(own, RUN_ID).verify(0, ArtifactKind.SAFETENSORS) == final
