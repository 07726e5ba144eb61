"""Checkpoints on disk: complete or passed over, never guessed."""

import json
from pathlib import Path

import pytest

from echo_coordinator.trainer.state import Checkpoints, TrainerState
from echo_swarm.errors import BackendFailed, StorageFull


def fill(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "optimizer.safetensors").write_bytes(b"moments")


@pytest.fixture
def store(tmp_path: Path) -> Checkpoints:
    store = Checkpoints(tmp_path / "checkpoints")
    for version in range(3):
        state = TrainerState(
            update=version, policy_version=version, consumed_groups=(version, 7), data_position={"index": 8 * version}
        )
        store.write(state, fill)
    return store


def test_what_was_written_is_read_again(store: Checkpoints):
    found = store.newest()
    assert found.warnings == () and found.checkpoint is not None
    assert found.checkpoint.folder.name == "v00000002"
    assert found.checkpoint.state.data_position == {"index": 16}
    assert found.checkpoint.state.consumed_groups == (2, 7)
    assert [c.state.policy_version for c in store.complete()] == [0, 1, 2]


def test_an_empty_folder_is_a_fresh_run(tmp_path: Path):
    assert Checkpoints(tmp_path / "none").newest().checkpoint is None


@pytest.mark.parametrize("content", [b"", b'{"update": 2, "pol', b"null", b"[]", b'{"format": 9, "files": {}}'])
def test_a_damaged_state_file_falls_back_with_a_warning(store: Checkpoints, content: bytes):
    (store.folder / "v00000002" / "state.json").write_bytes(content)
    found = store.newest()
    assert found.checkpoint is not None and found.checkpoint.state.policy_version == 1
    assert "v00000002 is damaged" in found.warnings[0]
    assert [c.state.policy_version for c in store.complete()] == [0, 1]


@pytest.mark.parametrize("name", ["state.json", "model.safetensors", "optimizer.safetensors"])
def test_a_missing_file_is_said_and_never_replaced_by_a_default(store: Checkpoints, name: str):
    (store.folder / "v00000002" / name).unlink()
    found = store.newest()
    assert found.checkpoint is not None and found.checkpoint.state.data_position == {"index": 8}
    assert name in found.warnings[0]


def test_with_no_intact_checkpoint_it_refuses_to_begin_again(store: Checkpoints):
    for folder in store.folder.iterdir():
        (folder / "state.json").unlink()
    with pytest.raises(BackendFailed, match=r"no checkpoint in .* is intact"):
        store.newest()


def test_a_flipped_byte_of_the_same_length_is_noticed(store: Checkpoints):
    (store.folder / "v00000002" / "model.safetensors").write_bytes(b"weighty")
    assert "other contents" in store.newest().warnings[0]


def test_a_state_that_names_too_little_is_not_trusted(store: Checkpoints):
    path = store.folder / "v00000002" / "state.json"
    raw = json.loads(path.read_text())
    del raw["files"]["optimizer.safetensors"]
    path.write_text(json.dumps(raw))
    assert "optimizer.safetensors is missing" in store.newest().warnings[0]


def test_an_interrupted_write_leaves_nothing_that_counts(store: Checkpoints):
    leftover = store.folder / ".v00000003.1.tmp"
    leftover.mkdir()
    fill(leftover)
    assert store.newest().checkpoint is not None
    assert [c.state.policy_version for c in store.complete()] == [0, 1, 2]
    store.sweep()
    assert not leftover.exists()


def test_a_full_disk_is_named_and_leaves_nothing(store: Checkpoints):
    def no_room(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageFull, match="MiB free"):
        store.write(TrainerState(policy_version=3), no_room)
    assert len(list(store.folder.iterdir())) == 3


def test_a_damaged_folder_is_replaced_by_its_successor_of_the_same_number(store: Checkpoints):
    (store.folder / "v00000002" / "state.json").write_bytes(b"")
    store.write(TrainerState(update=2, policy_version=2), fill)
    assert store.newest().warnings == ()


def test_pruning_keeps_the_newest_and_what_is_protected(store: Checkpoints):
    assert store.prune(1, protect=(0,)) == ["v00000001"]
    assert [c.state.policy_version for c in store.complete()] == [0, 2]
    assert store.prune(0) == ["v00000000"]
    assert [c.state.policy_version for c in store.complete()] == [2]
