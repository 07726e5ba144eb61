"""Versions on disk: resume, damage, room, retention."""

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest

from echo_swarm.checkpoint import files
from echo_swarm.checkpoint.files import FileBusy
from echo_swarm.checkpoint.partial import PartialArtifact, WrongPiece
from echo_swarm.checkpoint.pieces import PieceMap
from echo_swarm.checkpoint.safetensors_file import layout_digest, read_header
from echo_swarm.checkpoint.store import SLACK_BYTES, VersionStore
from echo_swarm.checkpoint.trust import TrustedHead
from echo_swarm.errors import LocalFault, MalformedMessage, StorageFull, UsageError
from echo_swarm.manifest import ArtifactKind

GGUF = ArtifactKind.GGUF
WEIGHTS = ArtifactKind.SAFETENSORS
PIECE = 1 << 16


def pieces(data):
    return [data[i : i + PIECE] for i in range(0, len(data), PIECE)]


def begin(run, store, version=1, *, written=(), data=None):
    data = run.data(version) if data is None else data
    artifact = run.artifact(data)
    store.add(run.signed(version, artifact))
    partial = store.open_partial(version, artifact)
    for index in written:
        partial.write(index, pieces(data)[index])
    return artifact, data, partial


def names(folder: Path):
    return sorted(path.name for path in folder.iterdir())


def test_a_version_gets_its_final_name_only_when_it_is_whole(run, store):
    artifact, data, partial = begin(run, store, written=[2, 0, 3])
    assert partial.finish() is None
    assert store.artifact_path(1, GGUF) is None
    assert partial.done_bytes == len(data) - PIECE
    assert partial.write(1, pieces(data)[1])
    assert not partial.write(1, pieces(data)[1])
    path = store.finish_partial(partial)
    store.close_partial(partial)
    assert path == store.artifact_path(1, GGUF) == store.verify(1, GGUF)
    assert path.read_bytes() == data
    assert names(path.parent) == ["manifest.bin", "model.gguf"]
    assert store.complete_versions(GGUF) == [1]
    assert store.complete_digests() == [artifact.digest]


def test_pieces_that_lie_side_by_side_are_written_at_once_and_read_at_once(run, store):
    _, data, partial = begin(run, store, written=[2])
    assert partial.write(1, data[PIECE:]) == len(data) - 2 * PIECE, "one of them was there"
    assert partial.write(1, data[PIECE:]) == 0
    assert partial.read(1, 9) == data[PIECE:] and partial.read(1, 2) == data[PIECE : 3 * PIECE]
    assert partial.read(0, 4) is None
    assert partial.write(0, data) == PIECE and store.read_piece(partial.artifact.digest, 0, 16) == data
    assert store.finish_partial(partial)
    store.close_partial(partial)
    assert store.read_piece(partial.artifact.digest, 1, 16) == data[PIECE:]


def test_a_run_with_one_wrong_piece_is_not_written(run, store):
    _, data, partial = begin(run, store)
    wrong = bytearray(data[PIECE:])
    wrong[PIECE + 5] ^= 1
    for bad in (bytes(wrong), data[PIECE : 2 * PIECE + 10], data[PIECE:] + b"x", data[PIECE:] + data[:PIECE]):
        with pytest.raises(WrongPiece):
            partial.write(1, bad)
    assert partial.have.held == 0 and partial.read(1, 3) is None
    store.close_partial(partial)


def test_a_damaged_piece_in_a_run_is_found_when_it_is_first_read(run, store):
    artifact, data, partial = begin(run, store, written=range(4))
    path = store.finish_partial(partial)
    store.close_partial(partial)
    store._checked.clear()
    with path.open("r+b") as file:
        file.seek(2 * PIECE + 3)
        file.write(bytes([data[2 * PIECE + 3] ^ 1]))
    assert store.read_piece(artifact.digest, 0, 2) == data[: 2 * PIECE]
    assert store.read_piece(artifact.digest, 1, 3) is None
    assert store.artifact_path(1, GGUF) is None, "it is a download again"


def test_a_wrong_piece_is_not_written(run, store):
    _, data, partial = begin(run, store)
    wrong = bytearray(pieces(data)[1])
    wrong[100] ^= 1
    for bad in (bytes(wrong), b"", pieces(data)[1] + b"x", pieces(data)[0]):
        with pytest.raises(WrongPiece):
            partial.write(1, bad)
    assert partial.have.held == 0
    assert partial.read(1) is None
    store.close_partial(partial)


def test_a_download_is_resumed_and_what_a_crash_damaged_is_fetched_again(run, tmp_path, store):
    artifact, data, partial = begin(run, store, written=[0, 2, 3])
    store.close_partial(partial)
    with partial.part_path.open("r+b") as file:
        file.seek(2 * PIECE + 5)
        file.write(b"damage")
    with partial.journal_path.open("ab") as file:
        file.write(b"\x01\0\0\0" + b"\xff\xff\xff\xff" + b"\x03\0")  # never written; impossible; torn
    again = VersionStore(tmp_path, run.run_id)
    resumed = again.open_partial(1, artifact)
    assert list(resumed.have) == [0, 3]
    for index in (1, 2):
        resumed.write(index, pieces(data)[index])
    assert again.finish_partial(resumed).read_bytes() == data
    again.close_partial(resumed)


def test_a_journal_of_another_artifact_counts_for_nothing(run, store):
    _, _, partial = begin(run, store, written=[0, 1])
    store.close_partial(partial)
    other = run.artifact(run.data(99))
    partial = PartialArtifact(partial.path.parent, other)
    assert partial.have.held == 0
    partial.close()


def test_a_piece_that_the_disk_lost_is_missing_again_instead_of_published(run, store):
    _, data, partial = begin(run, store, written=[0, 1, 2, 3])
    with partial.part_path.open("r+b") as file:
        file.write(b"rot")
    assert store.finish_partial(partial) is None
    assert list(partial.have.missing()) == [0]
    partial.write(0, pieces(data)[0])
    assert store.finish_partial(partial).read_bytes() == data
    store.close_partial(partial)


def test_the_beginning_is_read_back_while_the_rest_is_missing(run, store):
    _, data, partial = begin(run, store, written=[0, 1, 3])
    partial.read_ahead()
    told = []
    partial.write(2, pieces(data)[2])
    # The read-back does not begin again.
    assert partial.finish(told.append).read_bytes() == data and min(told) > 2 * PIECE
    store.close_partial(partial)


def test_what_came_is_flushed_while_a_gap_before_it_keeps_it_from_being_read_back(run, store, monkeypatch):
    monkeypatch.setattr("echo_swarm.checkpoint.partial.FLUSH_EVERY_S", 0)
    _, data, partial = begin(run, store, written=[1, 3])
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda _: flushed.append(partial.have.held))
    assert partial.lags
    partial.read_ahead()
    assert flushed == [2] and not partial.lags
    partial.read_ahead()
    partial.write(0, pieces(data)[0])
    assert flushed == [2] and partial.lags
    store.close_partial(partial)


def test_a_piece_that_the_disk_lost_before_it_was_read_back_is_missing_again(run, store):
    _, data, partial = begin(run, store, written=[0, 1, 3])
    with partial.part_path.open("r+b") as file:
        file.seek(PIECE)
        file.write(b"rot")
    partial.read_ahead()
    partial.write(2, pieces(data)[2])
    assert store.finish_partial(partial) is None
    assert list(partial.have.missing()) == [1]
    partial.write(1, pieces(data)[1])
    assert store.finish_partial(partial).read_bytes() == data
    store.close_partial(partial)


def test_a_write_that_the_system_reports_lost_while_reading_ahead_ends_the_download(run, store, monkeypatch):
    """It tells so once; a sync that succeeds later says nothing of these bytes."""
    _, data, partial = begin(run, store, written=[0, 1])
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
        broken.setattr("echo_swarm.checkpoint.read_back._FLUSH_BYTES", 1)
        with pytest.raises(LocalFault, match="Input/output error"):
            partial.read_ahead()
    with pytest.raises(LocalFault, match="Input/output error"):
        partial.write(2, pieces(data)[2])
    with pytest.raises(LocalFault, match="Input/output error"):
        partial.finish()
    assert names(partial.path.parent) == ["manifest.bin"]
    store.close_partial(partial)


def test_bytes_that_were_once_read_wrong_are_read_again_before_the_manifest_is_blamed(run, store):
    _, data, partial = begin(run, store, written=[0, 1, 3])
    with partial.part_path.open("r+b") as file:
        right = file.read(3)
        file.seek(0)
        file.write(b"rot")
        partial.read_ahead()
        file.seek(0)
        file.write(right)
    partial.write(2, pieces(data)[2])
    assert partial.finish().read_bytes() == data
    store.close_partial(partial)


def test_reading_ahead_of_a_download_that_was_closed_does_nothing(run, store):
    _, _, partial = begin(run, store, written=[0])
    store.close_partial(partial)
    partial.read_ahead()
    with pytest.raises(LocalFault, match="closed meanwhile"):
        partial.finish()


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64])
def test_a_map_knows_how_far_it_reaches_without_a_gap(count):
    have = PieceMap(count)
    for index in (*range(1, count), 0):
        assert have.beginning == 0
        have.add(index)
    assert have.beginning == count


def test_a_manifest_that_contradicts_itself_is_refused_and_leaves_no_file(run, store):
    data = run.data(1)
    artifact = run.artifact(data, digest=bytes(32))
    store.add(run.signed(1, artifact))
    partial = store.open_partial(1, artifact)
    for index, piece in enumerate(pieces(data)):
        partial.write(index, piece)
    with pytest.raises(MalformedMessage, match="manifest is wrong"):
        store.finish_partial(partial)
    store.close_partial(partial)
    assert names(partial.path.parent) == ["manifest.bin"]


def test_a_safetensors_artifact_must_have_the_layout_of_its_manifest(run, store, tmp_path, safetensors):
    data = safetensors({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}}, bytes(8))
    source = tmp_path / "x.safetensors"
    source.write_bytes(data)
    right = layout_digest(read_header(source))
    for version, layout, junk in ((1, right, b""), (2, bytes(32), b""), (3, right, bytes(8))):
        artifact = run.artifact(data + junk, ArtifactKind.SAFETENSORS, layout_digest=layout)
        store.add(run.signed(version, artifact))
        partial = store.open_partial(version, artifact)
        partial.write(0, data + junk)
        if version == 1:
            assert store.finish_partial(partial).name == "model.safetensors"
        else:
            with pytest.raises(MalformedMessage):
                store.finish_partial(partial)
        store.close_partial(partial)
    assert store.complete_versions(ArtifactKind.SAFETENSORS) == [1]


def test_too_little_room_is_refused_before_the_first_byte_with_both_figures(run, tmp_path):
    store = VersionStore(tmp_path, run.run_id, free=lambda _: 3_421_600)
    artifact = run.artifact(run.data(1, 60))
    store.add(run.signed(1, artifact))
    with pytest.raises(StorageFull, match=r"4\.98 MB.*3\.42 MB"):
        store.open_partial(1, artifact)
    assert names(store.version_folder(1)) == ["manifest.bin"]


def test_a_resume_needs_room_only_for_what_is_missing(run, tmp_path):
    room = [10 * SLACK_BYTES]
    store = VersionStore(tmp_path, run.run_id, free=lambda _: room[0])
    artifact, _, partial = begin(run, store, written=range(8), data=run.data(1, 10))
    store.close_partial(partial)
    room[0] = SLACK_BYTES + 3 * PIECE
    store.close_partial(store.open_partial(1, artifact))


@pytest.mark.skipif(os.name != "posix" or not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_fills_half_way_leaves_no_temporary_file_and_a_retry_works(run, store):
    old = run.fill(store, 0, run.data(0))
    artifact, data, partial = begin(run, store, written=[0])
    partial._file.close()
    with Path("/dev/full").open("r+b", buffering=0) as full:
        partial._file = full
        with pytest.raises(StorageFull, match="became full"):
            partial.write(1, pieces(data)[1])
    with pytest.raises(StorageFull, match="became full"):
        partial.write(2, pieces(data)[2])
    store.close_partial(partial)
    assert names(store.version_folder(1)) == ["manifest.bin"]
    assert store.read_piece(old.message.artifacts[0].digest, 0) == pieces(run.data(0))[0]
    retry = store.open_partial(1, artifact)
    for index, piece in enumerate(pieces(data)):
        retry.write(index, piece)
    assert store.finish_partial(retry)
    store.close_partial(retry)


def fetch_both(run, store, version, weights, layout):
    """Fetch a version's two files: a GGUF one, and one for other backends, twice as long."""
    contents = {GGUF: run.data(version), WEIGHTS: weights[:-1] + bytes([version])}
    artifacts = {
        kind: run.artifact(data, kind, layout_digest=layout if kind is WEIGHTS else bytes(32))
        for kind, data in contents.items()
    }
    store.add(run.signed(version, *artifacts.values()))
    for kind, data in contents.items():
        partial = store.open_partial(version, artifacts[kind])
        for index in partial.have.missing():
            partial.write(index, pieces(data)[index])
        assert store.finish_partial(partial)
        store.close_partial(partial)


def test_a_quota_evicts_old_versions_but_never_the_one_in_use(run, tmp_path, safetensors):
    """Field case 20: both files of a version count."""
    weights = safetensors(
        {"a": {"dtype": "U8", "shape": [7 * PIECE], "data_offsets": [0, 7 * PIECE]}}, bytes(7 * PIECE)
    )
    (tmp_path / "weights").write_bytes(weights)
    layout = layout_digest(read_header(tmp_path / "weights"))
    size = len(run.data(0)) + len(weights)
    quota = int(2.5 * size) + 20_000
    store = VersionStore(tmp_path / "store", run.run_id, quota_bytes=quota)
    fetch_both(run, store, 0, weights, layout)
    used = 0
    store.set_in_use([used])
    for version in range(1, 10):
        try:
            fetch_both(run, store, version, weights, layout)
        except StorageFull:
            used = version - 1
            assert set(store.complete_versions(GGUF)) >= {used}
            store.set_in_use([used])
            fetch_both(run, store, version, weights, layout)
        assert store.used_bytes() <= quota
        assert sum(p.stat().st_size for p in store.folder.rglob("*") if p.is_file()) <= quota + 20_000
        assert used in store.complete_versions(GGUF) and used in store.complete_versions(WEIGHTS)


def test_an_artifact_larger_than_the_quota_is_refused_with_both_figures(run, tmp_path):
    store = VersionStore(tmp_path, run.run_id, quota_bytes=100_000)
    artifact = run.artifact(run.data(1))
    store.add(run.signed(1, artifact))
    with pytest.raises(StorageFull, match=r"0\.23 MB.*0\.10 MB"):
        store.open_partial(1, artifact)


def test_retention_keeps_the_newest_the_one_in_use_and_the_running_download(run, store):
    for version in range(6):
        run.fill(store, version, run.data(version))
    _, _, partial = begin(run, store, 6, written=[0])
    assert store.retain(2, in_use=[1]) == [0, 2, 3]
    assert store.versions() == [1, 4, 5, 6]
    assert store.retain(2, in_use=[5]) == [1]
    store.close_partial(partial)
    store.add(run.signed(7))
    assert store.retain(2, in_use=[]) == [6]
    assert names(store.folder) == ["v00000004", "v00000005", "v00000007"]


def test_a_file_that_the_system_holds_is_deleted_later(run, store, monkeypatch, caplog):
    for version in range(3):
        run.fill(store, version, run.data(version))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refused)
        assert store.retain(1, in_use=[]) == []
    assert "tried again later" in caplog.text
    assert store.read_piece(store.manifest(0).message.artifacts[0].digest, 0)
    assert store.retain(1, in_use=[]) == [0, 1]


def test_a_refused_rename_keeps_the_download_and_works_later(run, store, monkeypatch):
    artifact, data, partial = begin(run, store, written=range(4))
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refused)
        with pytest.raises(FileBusy, match="tried again later"):
            store.finish_partial(partial)
        with pytest.raises(FileBusy):
            store.save_head(store.manifest(1))
    store.close_partial(partial)
    again = store.open_partial(1, artifact)
    assert again.have.complete
    assert store.finish_partial(again).read_bytes() == data
    store.close_partial(again)


def refused(*_, **__):
    raise PermissionError(errno.EACCES, "in use by another process")


def test_a_refused_unlink_is_no_crash(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(b"1")
    monkeypatch.setattr(Path, "unlink", refused)
    assert files.remove_file(path) is False


def test_empty_and_damaged_files_are_skipped_with_a_warning(run, tmp_path, store, caplog):
    for version in range(4):
        run.fill(store, version, run.data(version))
        store.save_head(store.manifest(version))
    (store.version_folder(0) / "model.gguf").write_bytes(b"")
    (store.version_folder(1) / "manifest.bin").write_bytes(b"")
    (store.folder / "head.bin").write_bytes(b"")
    shutil.copytree(store.version_folder(3), store.folder / "v00000009")
    with caplog.at_level(logging.WARNING):
        again = VersionStore(tmp_path, run.run_id)
    assert again.complete_versions(GGUF) == [2, 3]
    assert "expected" in caplog.text and "no usable manifest" in caplog.text
    head = TrustedHead(run_id=run.run_id, publisher_key=run.identity.public_key, persisted=again.known_manifests())
    assert head.version == 3
    partial = again.open_partial(0, run.artifact(run.data(0)))
    assert partial.have.held == 0
    again.close_partial(partial)


def test_a_rotten_whole_file_is_neither_loaded_nor_served_and_keeps_its_good_pieces(run, tmp_path, store, caplog):
    artifact = run.fill(store, 1, run.data(1)).message.artifacts[0]
    with (store.version_folder(1) / "model.gguf").open("r+b") as file:
        file.seek(PIECE + 3)
        file.write(b"rot")
    for check in (lambda s: s.verify(1, GGUF), lambda s: s.read_piece(artifact.digest, 1)):
        copy = tmp_path / f"copy{id(check)}"
        shutil.copytree(tmp_path / run.run_id, copy / run.run_id)
        again = VersionStore(copy, run.run_id)
        assert again.read_piece(artifact.digest, 0) == pieces(run.data(1))[0]
        assert check(again) is None
        assert "is damaged" in caplog.text
        assert again.complete_versions(GGUF) == []
        partial = again.open_partial(1, artifact)
        assert list(partial.have.missing()) == [1]
        again.close_partial(partial)


def test_leftovers_of_a_crash_are_removed(run, tmp_path, store):
    run.fill(store, 1, run.data(1))
    (store.folder / "trash-v00000000-1-aa").mkdir()
    (store.folder / "trash-v00000000-1-aa" / "model.gguf").write_bytes(b"x")
    (store.folder / "head.bin.tmp").write_bytes(b"x")
    (store.version_folder(1) / "manifest.bin.tmp").write_bytes(b"x")
    VersionStore(tmp_path, run.run_id)
    assert names(store.folder) == ["v00000001"]
    assert names(store.version_folder(1)) == ["manifest.bin", "model.gguf"]


def test_a_kill_between_the_final_name_and_the_end_of_the_download_leaves_nothing(run, tmp_path, store):
    _, data, partial = begin(run, store, written=range(4))
    journal = partial.journal_path.read_bytes()
    path = store.finish_partial(partial)
    partial.journal_path.write_bytes(journal)
    again = VersionStore(tmp_path, run.run_id)
    assert again.verify(1, GGUF) == path and path.read_bytes() == data
    assert names(path.parent) == ["manifest.bin", "model.gguf"]


def test_the_head_survives_a_restart_and_never_goes_down(run, tmp_path, store):
    store.save_head(run.signed(5))
    store.save_head(run.signed(4))
    again = VersionStore(tmp_path, run.run_id)
    assert again.head().message.policy_version == 5
    assert again.head().raw == store.head().raw


def test_a_second_manifest_of_a_version_does_not_replace_the_first(run, store):
    store.add(run.signed(1))
    store.add(run.signed(1))
    with pytest.raises(LocalFault, match="another manifest"):
        store.add(run.signed(1, issued_at=7.0))


@pytest.mark.parametrize("run_id", ["../x", "/etc", "", "A" * 32, "0" * 33])
def test_a_run_id_that_could_be_a_path_is_refused(tmp_path, run_id):
    with pytest.raises(UsageError):
        VersionStore(tmp_path, run_id)


def test_pieces_of_whole_and_unfinished_artifacts_can_be_read(run, store):
    whole = run.fill(store, 1, run.data(1)).message.artifacts[0]
    artifact, data, partial = begin(run, store, 2, written=[3])
    assert store.have(whole.digest).complete
    assert list(store.have(artifact.digest)) == [3]
    assert store.have(bytes(32)) is None
    assert store.read_piece(artifact.digest, 3) == pieces(data)[3]
    assert store.read_piece(artifact.digest, 0) is None
    assert store.read_piece(whole.digest, 3) == pieces(run.data(1))[3]
    assert store.read_piece(whole.digest, 4) is None
    store.close_partial(partial)


def test_equal_pieces_of_other_versions_are_found(run, store):
    one = run.data(1)
    run.fill(store, 1, one)
    two = one[:PIECE] + run.data(2)[PIECE : 3 * PIECE] + one[:PIECE]
    artifact, _, partial = begin(run, store, 2, data=two)
    found = store.local_pieces(artifact, partial.have)
    assert [(piece.offset, piece.wanted) for piece in found] == [(0, (0, 3))]
    store.close_partial(partial)
