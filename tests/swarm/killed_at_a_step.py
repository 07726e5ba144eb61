"""Does one thing with what is on disk, again and again, and is killed a step later each time: at each change of it.

    python -m tests.swarm.killed_at_a_step SCENARIO TEMPLATE FOLDER [power]

Run n happens in FOLDER/n, a copy of what TEMPLATE has for the scenario, in a process of its own that sends itself
SIGKILL before its n-th step. Prints lines on each: the pieces that were called verified, the step, how it ended. The
last run is not killed. Of many writes in a row, one piece after the other, some steps are left out. With `power`,
FOLDER/n is left as after a power cut (`support.power_cut`), the last one as after a cut at its end.
"""

import io
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import anyio

from echo_coordinator.publisher import Publisher, WeightsFile
from echo_coordinator.run_keys import rotate_key
from echo_coordinator.trainer.state import OPTIMIZER_FILE, PUBLISHED_FILE, WEIGHTS_FILE, Checkpoints, TrainerState
from echo_swarm.checkpoint.delta.apply import DeltaChain
from echo_swarm.checkpoint.delta.delta_file import DeltaFile
from echo_swarm.checkpoint.delta.route import delta_to
from echo_swarm.checkpoint.partial import PartialArtifact
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.clock import SystemClock
from echo_swarm.envelope import Signed, unseal
from echo_swarm.identity import Identity
from echo_swarm.manifest import MANIFEST_LIMITS, Artifact, ArtifactKind, CheckpointManifest
from tests.swarm.support.power_cut import FlushedTree

RUN_ID = "0123456789abcdef" * 2
KIND = ArtifactKind.SAFETENSORS
CALLS = {"replace", "rename", "link", "unlink", "remove", "rmdir", "mkdir", "fsync", "truncate", "ftruncate"}
"""Opening a file for writing is no step of its own: what it leaves is what is there before the next one."""
METHODS = {"write", "truncate", "flush"}
MANY_WRITES, STRIDE = 4, 7
"""After so many kills before writes, one after the other, only every seventh step; odd, since a piece takes two."""


def publisher(store: VersionStore) -> Publisher:
    identity = Identity.from_seed(bytes(32))
    return Publisher(identity=identity, store=store, clock=SystemClock(), max_staleness=0, keep_versions=1)


def weights(template: Path, version: int) -> WeightsFile:
    return WeightsFile(path=template / f"{version}.safetensors", kind=KIND, precision="bfloat16")


def published(template: Path, version: int) -> Signed[CheckpointManifest]:
    raw = (template / "published" / RUN_ID / f"v{version:08d}" / "manifest.bin").read_bytes()
    return unseal(raw, CheckpointManifest, MANIFEST_LIMITS)


def model(signed: Signed[CheckpointManifest]) -> Artifact:
    found = signed.message.artifact(KIND)
    assert found is not None
    return found


def get(store: VersionStore, template: Path, version: int, artifact: Artifact) -> None:
    """Fetch what is missing of an artifact, as `Fetcher` does."""
    if store.verify(version, artifact.kind, artifact.precision) is not None:
        return
    source = template / "published" / RUN_ID / f"v{version:08d}" / artifact.file_name
    data = source.read_bytes()
    partial = store.open_partial(version, artifact)
    for index in list(partial.have.missing()):
        partial.write(index, data[index * artifact.piece_bytes :][: artifact.piece_length(index)])
    assert store.finish_partial(partial)
    store.close_partial(partial)


def download(root: Path, template: Path) -> None:
    """A version into an empty store."""
    signed, store = published(template, 1), VersionStore(root, RUN_ID)
    store.save_head(signed)
    store.add(signed)
    get(store, template, 1, model(signed))


def apply(root: Path, template: Path) -> None:
    """A version from the one before it and a delta."""
    signed, store = published(template, 1), VersionStore(root, RUN_ID)
    target = model(signed)
    delta = delta_to(signed.message, target)
    assert delta is not None and delta.base_digest is not None
    store.save_head(signed)
    store.add(signed)
    if store.verify_digest(target.digest) is not None:
        return
    partial = store.open_partial(1, target)
    get(store, template, 1, delta)
    base, path = store.verify_digest(delta.base_digest), store.whole(delta.digest)
    assert base is not None and path is not None
    anyio.run(DeltaChain(base, [DeltaFile(path, delta)], partial, threads=1).run)
    assert store.finish_partial(partial)
    store.close_partial(partial)


def prune(root: Path, template: Path) -> None:
    """All versions but the newest are deleted."""
    del template
    VersionStore(root, RUN_ID).retain(1, ())


def repair(root: Path, template: Path) -> None:
    """A file that rotted becomes a download again, of what is wrong in it."""
    get(VersionStore(root, RUN_ID), template, 1, model(published(template, 1)))


def publish(root: Path, template: Path) -> None:
    """The coordinator publishes version 1 after version 0, with a delta."""
    publisher(VersionStore(root, RUN_ID)).publish_blocking(1, [weights(template, 1)])


def rotate(root: Path, _template: Path) -> None:
    """The run gets a new key."""
    rotate_key(root, SystemClock())


def fill(folder: Path) -> None:
    """Write what a checkpoint has."""
    for name in (WEIGHTS_FILE, OPTIMIZER_FILE, PUBLISHED_FILE):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(name.encode() * 10_000)


def checkpoint(root: Path, _template: Path) -> None:
    """The trainer writes its checkpoint of version 1, in the place of a damaged one, and deletes that of version 0."""
    checkpoints = Checkpoints(root / "trainer" / "checkpoints")
    newest = checkpoints.newest().checkpoint
    checkpoints.sweep()
    if newest is None or newest.state.policy_version < 1:
        checkpoints.write(TrainerState(update=1, policy_version=1, consumed_groups=(3, 4)), fill)
    checkpoints.prune(1)


SCENARIOS: dict[str, Callable[[Path, Path], None]] = {
    one.__name__: one for one in (download, apply, prune, repair, publish, rotate, checkpoint)
}


class _Steps:
    """Kills this process before the n-th change of the disk. A profiler: it sees the calls of C functions."""

    def __init__(self, last: int, tell: int, cut: Callable[[], None]) -> None:
        self._left = last
        self._tell = tell
        self._cut = cut
        self._lock = threading.Lock()

    def __call__(self, _frame: FrameType, event: str, called: object) -> None:
        if event != "c_call" or not is_step(called):
            return
        if self._left <= 0:
            return  # What is left after a power cut is being written.
        with self._lock:
            self._left -= 1
            if self._left == 0:
                os.write(self._tell, getattr(called, "__name__", "").encode())
                self._cut()
                os.kill(os.getpid(), signal.SIGKILL)


def is_step(called: object) -> bool:
    """Whether a C function that is called changes the disk."""
    name = getattr(called, "__name__", "")
    if getattr(called, "__module__", None) in ("posix", "_io", "io"):
        return name in CALLS
    owner = getattr(called, "__self__", None)
    return name in METHODS and isinstance(owner, io.IOBase) and owner is not sys.stdout.buffer


def _tell_pieces() -> None:
    write = PartialArtifact.write

    def told(self: PartialArtifact, index: int, data: bytes) -> bool:
        fresh = write(self, index, data)
        if fresh:
            os.write(1, json.dumps({"verified": self.artifact.digest.hex()}).encode() + b"\n")
        return fresh

    PartialArtifact.write = told


def _cut(root: Path) -> Callable[[], None]:
    """Return what writes beside a folder how a power cut would leave it."""
    flushed = FlushedTree(root)
    flushed.watch()
    return lambda: flushed.write(root.with_suffix(".cut"))


def main() -> None:
    """Fork for each step, so that everything is imported once."""
    scenario, template, folder = SCENARIOS[sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3])
    power = "power" in sys.argv[4:]
    _tell_pieces()
    last, in_a_row = 1, 0
    while True:
        root = folder / str(last)
        shutil.copytree(template / sys.argv[1], root)
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            cut = _cut(root) if power else lambda: None
            steps = _Steps(last, writer, cut)
            threading.setprofile(steps)
            sys.setprofile(steps)
            scenario(root, template)
            sys.setprofile(None)
            cut()
            os._exit(0)
        os.close(writer)
        with open(reader, encoding="ascii") as pipe:
            before = pipe.read()
        _, status = os.waitpid(child, 0)
        if power:
            shutil.rmtree(root)
            root.with_suffix(".cut").rename(root)
        ended = {"run": last, "before": before, "status": os.waitstatus_to_exitcode(status)}
        print(json.dumps(ended), flush=True)
        if status == 0:
            return
        in_a_row = in_a_row + 1 if before == "write" else 0
        last += 1 if in_a_row < MANY_WRITES else STRIDE


if __name__ == "__main__":
    main()
