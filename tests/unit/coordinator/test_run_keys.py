"""Giving a run a new key: what lies in its folder before, between and after."""

import shutil
import stat
from pathlib import Path

import pytest

from echo_coordinator.commands.rotate import rotate
from echo_coordinator.config import load_settings
from echo_coordinator.epochs import read_noted, take_epoch
from echo_coordinator.publisher import Publisher, WeightsFile
from echo_coordinator.run_folder import RunFolder
from echo_coordinator.run_keys import known_keys, load_run_key, rotate_key
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.checkpoint.trust import TrustedHead
from echo_swarm.clock import ManualClock
from echo_swarm.envelope import seal
from echo_swarm.epoch import Epoch
from echo_swarm.errors import LocalFault, TakenOver, Untrusted, UsageError
from echo_swarm.identity import Identity, load, load_or_create
from echo_swarm.manifest import ArtifactKind
from echo_swarm.succession import MAX_SUCCESSIONS, RunKeys
from tests.unit.publisher.test_publish import weights_of

RUN = "0123456789abcdef" * 2
SETTINGS = f'[run]\nid = "{RUN}"\nname = "sums"\n[environment]\nname = "reasoning_gym:chain_sum"\n'


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that was made and not started."""
    made = RunFolder(tmp_path / "run")
    made.root.mkdir()
    made.settings.write_text(SETTINGS)
    load_or_create(made.key)
    return made


def rotated(folder: RunFolder, **options: bool) -> Identity:
    done = rotate_key(folder.root, ManualClock(), **options)
    now = load_run_key(folder, RUN)
    assert done.new == now.peer_id and not done.was_interrupted
    return now


def nodes_keys(folder: RunFolder, pinned: Identity) -> RunKeys:
    """What a node with an invite of that time learns."""
    keys = RunKeys(RUN, pinned.public_key)
    checked = keys.judge(known_keys(folder, RUN, load_run_key(folder, RUN)).chain)
    if checked is not None:
        keys.adopt(checked)
    return keys


def test_each_rotation_leads_all_earlier_invites_to_the_newest_key(folder: RunFolder) -> None:
    load_settings(folder)
    keys = [load(folder.key)]
    for _ in range(3):
        keys.append(rotated(folder))
    for pinned in keys:
        assert nodes_keys(folder, pinned).key == keys[-1].public_key
    assert stat.S_IMODE(folder.key.stat().st_mode) == 0o600
    assert sorted(path.name for path in folder.key.parent.iterdir()) == ["run.key", "succession.bin"]
    held = b"".join(path.read_bytes() for path in folder.key.parent.iterdir())
    for old in keys[:-1]:
        assert old.seed not in held and old.seed.hex().encode() not in held, "an old private key is gone"


def test_published_versions_stay_good_and_nothing_else_under_the_old_key(folder: RunFolder, tmp_path: Path) -> None:
    old = load(folder.key)
    store = VersionStore(folder.store, RUN)
    publisher = Publisher(identity=old, store=store, clock=ManualClock(), max_staleness=1, keep_versions=2)
    published = [publisher.publish_blocking(version, [weights_of(tmp_path, version)]) for version in (0, 1)]
    new = rotated(folder)
    keys = nodes_keys(folder, old)
    head = TrustedHead(run_id=RUN, publisher_key=old.public_key, keys=keys)
    for signed in published:
        head.update(signed.raw, 0.0)
    thief = Publisher(
        identity=old,
        store=VersionStore(tmp_path / "stolen", RUN),
        clock=ManualClock(),
        max_staleness=1,
        keep_versions=2,
    )
    with pytest.raises(Untrusted, match=f"replaced on .*{old.peer_id}"):
        head.update(thief.publish_blocking(9, [weights_of(tmp_path, 9)]).raw, 0.0)
    going_on = Publisher(
        identity=new,
        store=VersionStore(folder.store, RUN),
        clock=ManualClock(),
        max_staleness=1,
        keep_versions=2,
        keys=known_keys(folder, RUN, new),
    )
    again = WeightsFile(path=tmp_path / "weights1.safetensors", kind=ArtifactKind.SAFETENSORS, precision="float32")
    assert going_on.publish_blocking(1, [again]).raw == published[1].raw, "a start publishes the newest one again"
    assert head.update(going_on.publish_blocking(2, [weights_of(tmp_path, 2)]).raw, 0.0).message.policy_version == 2


def test_epochs_go_on_counting_under_the_new_key(folder: RunFolder) -> None:
    old = load(folder.key)
    for _ in range(3):
        take_epoch(folder, RUN, old, None, ManualClock())
    new = rotated(folder)
    last = known_keys(folder, RUN, new).last
    assert last is not None and last.epoch == 3
    assert take_epoch(folder, RUN, new, None, ManualClock(), above=last.epoch).own.message.number == 4
    assert take_epoch(folder, RUN, new, None, ManualClock(), above=last.epoch).own.message.number == 5


def test_a_run_that_was_taken_over_is_rotated_only_when_told_to_and_a_thiefs_epoch_is_void_then(
    folder: RunFolder,
) -> None:
    old = load(folder.key)
    fence = take_epoch(folder, RUN, old, None, ManualClock())
    highest = {"number": 2**32 - 1, "nonce": b"\xff" * 16, "started_at": 0.0, "base_version": None, "base_digest": None}
    fence.hear(seal(old, Epoch(run_id=RUN, **highest)))
    with pytest.raises(TakenOver, match="rotate-key --take-over"):
        rotate_key(folder.root, ManualClock())
    assert load(folder.key).public_key == old.public_key and not folder.successions.exists()
    new = rotated(folder, take_over=True)
    assert read_noted(folder).other is not None
    assert take_epoch(folder, RUN, new, None, ManualClock(), above=1).own.message.number == 2


def test_a_running_run_is_not_rotated(folder: RunFolder) -> None:
    with folder.locked(), pytest.raises(UsageError, match="stop it with"):
        rotate_key(folder.root, ManualClock())
    with pytest.raises(UsageError, match="is no run"):
        rotate_key(folder.root / "elsewhere", ManualClock())


def test_a_rotation_that_was_interrupted_is_finished_by_a_start_or_by_the_next_one(folder: RunFolder) -> None:
    old = folder.key.read_bytes()
    before = load(folder.key)
    new = rotated(folder)
    for finish in ("start", "rotate"):
        shutil.copy(folder.key, folder.next_key)
        folder.key.write_bytes(old)
        if finish == "start":
            assert load_run_key(folder, RUN).public_key == new.public_key
        else:
            (first, *_) = rotate(folder.root, take_over=False)
            assert "finished the rotation" in first and new.peer_id in first and before.peer_id in first
        assert load(folder.key).public_key == new.public_key and not folder.next_key.exists()
    assert len(known_keys(folder, RUN, new).chain.links) == 1


def test_a_key_restored_from_before_the_rotation_is_refused(folder: RunFolder) -> None:
    old = folder.key.read_bytes()
    rotated(folder)
    folder.key.write_bytes(old)
    for call in (lambda: load_run_key(folder, RUN), lambda: rotate_key(folder.root, ManualClock())):
        with pytest.raises(LocalFault, match="restore both"):
            call()
    load_or_create(folder.next_key)
    with pytest.raises(LocalFault, match="restore both"):
        load_run_key(folder, RUN)
    folder.successions.write_bytes(b"damaged")
    with pytest.raises(LocalFault, match="restore both"):
        load_run_key(folder, RUN)


def test_a_run_has_so_many_keys_and_no_more(folder: RunFolder) -> None:
    first = load(folder.key)
    for _ in range(MAX_SUCCESSIONS):
        rotated(folder)
    with pytest.raises(UsageError, match="all it can have"):
        rotate_key(folder.root, ManualClock())
    assert nodes_keys(folder, first).key == load(folder.key).public_key
