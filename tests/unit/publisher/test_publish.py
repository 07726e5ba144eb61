"""Versions are published whole, once, and in order."""

import json
import os
import struct
from pathlib import Path
from random import Random

import numpy as np
import pytest

from echo_coordinator.publisher import Publisher, VersionConflict, WeightsFile, head_record
from echo_coordinator.publisher.pack import piece_bytes_for
from echo_swarm.checkpoint.safetensors_file import check_layout
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.checkpoint.trust import TrustedHead
from echo_swarm.clock import ManualClock
from echo_swarm.errors import LocalFault, MalformedMessage, SettingsError, StorageFull, UsageError
from echo_swarm.identity import Identity
from echo_swarm.manifest import MAX_ARTIFACT_BYTES, ArtifactKind, sha256

pytestmark = pytest.mark.anyio

RUN_ID = "0123456789abcdef" * 2


def weights_of(folder: Path, seed: int, *, size: int = 2_500_000) -> WeightsFile:
    entry = {"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    header = json.dumps(entry).encode()
    path = folder / f"weights{seed}.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + Random(seed).randbytes(size))
    return WeightsFile(path=path, kind=ArtifactKind.SAFETENSORS, precision="float32")


def publisher_of(folder: Path, *, identity=None, clock=None, max_staleness=1, keep_versions=2, **options) -> Publisher:
    return Publisher(
        identity=identity or Identity.from_seed(bytes(32)),
        store=VersionStore(folder / "store", RUN_ID, **options),
        clock=clock or ManualClock(),
        max_staleness=max_staleness,
        keep_versions=keep_versions,
    )


async def test_what_was_just_published_is_not_hashed_again_to_be_served_but_after_a_restart_it_is(
    tmp_path, monkeypatch
):
    publisher, hashed = publisher_of(tmp_path), []
    monkeypatch.setattr("echo_swarm.checkpoint.store.sha256", lambda data: hashed.append(len(data)) or sha256(data))
    weights = weights_of(tmp_path, 0)
    (artifact,) = (await publisher.publish(0, [weights])).message.artifacts
    piece = weights.path.read_bytes()[: 1 << 16]
    assert publisher._store.read_piece(artifact.digest, 0) == piece and not hashed
    publisher._store.artifact_path(0, ArtifactKind.SAFETENSORS).write_bytes(bytes(artifact.size_bytes))
    restarted = publisher_of(tmp_path)._store
    assert restarted.read_piece(artifact.digest, 0) is None and hashed == [1 << 16]


async def test_versions_form_a_chain_that_a_node_trusts(tmp_path):
    publisher, identity = publisher_of(tmp_path), Identity.from_seed(bytes(32))
    head = TrustedHead(run_id=RUN_ID, publisher_key=identity.public_key)
    parent = None
    for version in range(4):
        weights = weights_of(tmp_path, version)
        published = await publisher.publish(version, [weights])
        manifest = head.update(published.raw, 0.0).message
        (artifact,) = manifest.artifacts
        data = weights.path.read_bytes()
        assert manifest.parent_digest == parent
        assert artifact.digest == sha256(data) and artifact.size_bytes == len(data)
        assert [artifact.piece_digest(i) for i in range(artifact.piece_count)] == [
            sha256(data[i : i + (1 << 16)]) for i in range(0, len(data), 1 << 16)
        ]
        path = publisher._store.artifact_path(version, ArtifactKind.SAFETENSORS)
        assert path is not None and path.read_bytes() == data
        check_layout(path, artifact.layout_digest)
        record = head_record(published, issued_at=5.0)
        assert (record.policy_version, record.manifest_digest) == (version, published.digest)
        assert publisher.head is not None and publisher.head.digest == published.digest
        parent = published.digest
    assert publisher._store.versions() == [2, 3]


async def test_a_version_in_use_outlives_retention(tmp_path):
    publisher = publisher_of(tmp_path)
    for version in range(4):
        await publisher.publish(version, [weights_of(tmp_path, version)], in_use=[0])
    assert publisher._store.versions() == [0, 2, 3]


async def test_what_was_derived_from_the_weights_need_not_be_given_again(tmp_path):
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(bytes(1000))
    files = [weights_of(tmp_path, 0), WeightsFile(path=gguf, kind=ArtifactKind.GGUF, precision="q8_0")]
    publisher = publisher_of(tmp_path)
    assert not publisher.exists(0)
    first = await publisher.publish(0, files)
    assert publisher.exists(0)
    assert (await publisher_of(tmp_path).publish(0, files[:1])).raw == first.raw
    with pytest.raises(VersionConflict):
        await publisher_of(tmp_path).publish(0, [weights_of(tmp_path, 1)])


async def test_publishing_the_same_again_returns_the_same_envelope(tmp_path):
    clock = ManualClock()
    first = await publisher_of(tmp_path, clock=clock).publish(0, [weights_of(tmp_path, 0)])
    clock.advance(100)
    again = await publisher_of(tmp_path, clock=clock).publish(0, [weights_of(tmp_path, 0)])
    assert again.raw == first.raw


async def test_other_weights_under_a_published_version_are_refused(tmp_path):
    publisher = publisher_of(tmp_path)
    first = await publisher.publish(0, [weights_of(tmp_path, 0)])
    with pytest.raises(VersionConflict, match="other weights"):
        await publisher.publish(0, [weights_of(tmp_path, 1)])
    assert publisher.head is not None and publisher.head.raw == first.raw


async def test_a_version_number_can_be_skipped_but_never_lowered(tmp_path):
    publisher = publisher_of(tmp_path)
    first = await publisher.publish(0, [weights_of(tmp_path, 0)])
    later = await publisher.publish(3, [weights_of(tmp_path, 3)])
    assert later.message.parent_digest == first.digest
    await publisher.publish(4, [weights_of(tmp_path, 4)])
    for version in (0, 2):
        with pytest.raises(UsageError, match="the next one is 5"):
            await publisher.publish(version, [weights_of(tmp_path, 9)])


@pytest.mark.parametrize("crash_at", range(1, 7))
async def test_a_crash_at_any_durable_step_is_healed_by_publishing_again(tmp_path, monkeypatch, crash_at):
    """Each rename is a step that a crash can follow or precede: the call ends there, a new process starts."""
    await publisher_of(tmp_path).publish(0, [weights_of(tmp_path, 0)])
    real, calls = os.replace, []

    def replace(source, target):
        calls.append(target)
        if len(calls) == (crash_at + 1) // 2 and crash_at % 2:
            raise KeyboardInterrupt
        real(source, target)
        if len(calls) == crash_at // 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        with pytest.raises(KeyboardInterrupt):
            publisher_of(tmp_path).publish_blocking(1, [weights_of(tmp_path, 1)])
    restarted = publisher_of(tmp_path)
    seen = restarted.head
    assert seen is not None and seen.message.policy_version in (0, 1)
    published = await restarted.publish(1, [weights_of(tmp_path, 1)])
    assert published.message.policy_version == 1
    assert restarted._store.verify(1, ArtifactKind.SAFETENSORS) is not None
    assert (await restarted.publish(2, [weights_of(tmp_path, 2)])).message.parent_digest == published.digest
    assert not list((tmp_path / "store").rglob("*.tmp"))


async def test_a_full_disk_leaves_the_old_version_and_no_temporary_file(tmp_path, monkeypatch):
    room = [1 << 40]
    publisher = publisher_of(tmp_path, free=lambda _: room[0])
    await publisher.publish(0, [weights_of(tmp_path, 0)])
    room[0] = 1_000_000
    with pytest.raises(StorageFull, match=r"3\.55 MB.*1\.00 MB"):
        await publisher.publish(1, [weights_of(tmp_path, 1)])
    room[0] = 1 << 40
    with monkeypatch.context() as patch:

        def full(*_):
            raise OSError(28, "No space left on device")

        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageFull, match="became full"):
            await publisher.publish(1, [weights_of(tmp_path, 1)])
    assert [path.name for path in publisher._store.folder.iterdir() if path.is_dir()] == ["v00000000"]
    assert publisher.head is not None and publisher.head.message.policy_version == 0
    await publisher.publish(1, [weights_of(tmp_path, 1)])


async def test_weights_that_are_no_safetensors_missing_empty_or_given_twice_are_refused(tmp_path):
    publisher = publisher_of(tmp_path)
    good = weights_of(tmp_path, 0)
    cut = tmp_path / "cut"
    cut.write_bytes(good.path.read_bytes()[:-1])
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    for path, error in ((cut, MalformedMessage), (empty, LocalFault), (tmp_path / "gone", LocalFault)):
        with pytest.raises(error):
            await publisher.publish(0, [WeightsFile(path=path, kind=ArtifactKind.SAFETENSORS, precision="float32")])
    for weights in ([], [good, good]):
        with pytest.raises(UsageError):
            await publisher.publish(0, weights)
    assert publisher.head is None
    assert (await publisher.publish(0, [good])).message.policy_version == 0


async def test_several_kinds_can_be_published_together(tmp_path):
    publisher = publisher_of(tmp_path)
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(Random(1).randbytes(3_000_000))
    weights = [weights_of(tmp_path, 0), WeightsFile(path=gguf, kind=ArtifactKind.GGUF, precision="q8_0")]
    published = await publisher.publish(0, weights)
    assert [artifact.kind.file_name for artifact in published.message.artifacts] == ["model.safetensors", "model.gguf"]


def test_retention_below_staleness_is_refused_at_start(tmp_path):
    with pytest.raises(SettingsError, match="at least 9"):
        publisher_of(tmp_path, max_staleness=8, keep_versions=2)


def test_a_piece_has_64_kibibytes_to_four_mebibytes():
    sizes = (1, (1 << 26) + 1, (1 << 28) + 1, (1 << 31) + 1, (1 << 34) + 1)
    assert [piece_bytes_for(size) >> 10 for size in sizes] == [64, 256, 1024, 2048, 4096]
    assert piece_bytes_for(MAX_ARTIFACT_BYTES) == 4 << 20


def drifted(folder: Path, steps: int, *, size: int = 2_500_000, gguf: bool = False) -> list[WeightsFile]:
    """Weights of a version that came `steps` updates later: one element in fifty moved at each."""
    values = np.frombuffer(Random(1).randbytes(size), "<u2").copy()
    for step in range(steps):
        values[np.random.default_rng(step).random(len(values)) < 0.02] += 1
    entry = {"w": {"dtype": "BF16", "shape": [len(values)], "data_offsets": [0, size]}}
    header = json.dumps(entry).encode()
    header += b" " * (-len(header) % 8)
    path = folder / f"drifted{steps}.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + values.tobytes())
    files = [WeightsFile(path=path, kind=ArtifactKind.SAFETENSORS, precision="bfloat16")]
    if gguf:
        (folder / f"drifted{steps}.gguf").write_bytes(b"GGUF" + values.tobytes())
        files.append(WeightsFile(path=folder / f"drifted{steps}.gguf", kind=ArtifactKind.GGUF, precision="f16"))
    return files


async def test_a_version_near_the_one_before_is_published_as_a_delta_too(tmp_path):
    publisher, identity = publisher_of(tmp_path), Identity.from_seed(bytes(32))
    head = TrustedHead(run_id=RUN_ID, publisher_key=identity.public_key)
    first = head.update((await publisher.publish(0, drifted(tmp_path, 0, gguf=True))).raw, 0.0).message
    second = head.update((await publisher.publish(2, drifted(tmp_path, 1, gguf=True))).raw, 0.0).message
    assert len(first.artifacts) == 2
    whole, deltas = second.artifacts[:2], second.artifacts[2:]
    assert [delta.file_name for delta in deltas] == ["delta.bin", "delta-f16.bin"]
    for base, target, delta in zip(first.artifacts, whole, deltas, strict=True):
        assert (delta.base_digest, delta.base_version, delta.target_digest) == (base.digest, 0, target.digest)
        assert delta.size_bytes < 0.05 * target.size_bytes
    assert not list((tmp_path / "store").rglob("*.tmp"))
    assert (await publisher.publish(2, drifted(tmp_path, 1))).message == second


async def test_unlike_versions_and_those_of_another_size_have_no_delta(tmp_path):
    publisher = publisher_of(tmp_path)
    await publisher.publish(0, drifted(tmp_path, 0))
    for version, weights in ((1, weights_of(tmp_path, 5)), (2, weights_of(tmp_path, 6))):
        assert len((await publisher.publish(version, [weights])).message.artifacts) == 1
    assert len((await publisher.publish(3, drifted(tmp_path, 0, size=2_000_000))).message.artifacts) == 1


async def test_a_damaged_base_or_a_full_disk_costs_the_delta_and_not_the_version(tmp_path):
    room = [1 << 40]
    publisher = publisher_of(tmp_path, free=lambda _: room[0], keep_versions=4)
    await publisher.publish(0, drifted(tmp_path, 0))
    room[0] = 4_000_000
    assert len((await publisher.publish(1, drifted(tmp_path, 1))).message.artifacts) == 1
    room[0] = 1 << 40
    path = publisher._store.artifact_path(1, ArtifactKind.SAFETENSORS)
    assert path is not None
    with path.open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"rot")
    assert len((await publisher.publish(2, drifted(tmp_path, 2))).message.artifacts) == 1
    assert len((await publisher.publish(3, drifted(tmp_path, 3))).message.artifacts) == 2


@pytest.mark.parametrize("crash_at", range(1, 9))
async def test_a_crash_while_a_delta_is_made_is_healed_by_publishing_again(tmp_path, monkeypatch, crash_at):
    await publisher_of(tmp_path).publish(0, drifted(tmp_path, 0))
    real, calls = os.fsync, []

    def fsync(descriptor):
        calls.append(descriptor)
        if len(calls) == crash_at:
            raise KeyboardInterrupt
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(KeyboardInterrupt):
            publisher_of(tmp_path).publish_blocking(1, drifted(tmp_path, 1))
    published = await publisher_of(tmp_path).publish(1, drifted(tmp_path, 1))
    assert len(published.message.artifacts) == 2
    assert not list((tmp_path / "store").rglob("*.tmp"))


async def test_a_version_whose_delta_was_lost_is_still_whole(tmp_path):
    publisher = publisher_of(tmp_path)
    await publisher.publish(0, drifted(tmp_path, 0))
    published = await publisher.publish(1, drifted(tmp_path, 1))
    delta = publisher._store.whole(published.message.artifacts[1].digest)
    assert delta is not None
    delta.unlink()
    assert (await publisher_of(tmp_path).publish(1, drifted(tmp_path, 1))).raw == published.raw
