"""Whole files: made, applied alone and in chains, and refused when they do not fit."""

import struct
from pathlib import Path

import numpy as np
import pytest

from echo_swarm.checkpoint.delta.apply import DeltaChain
from echo_swarm.checkpoint.delta.delta_file import DeltaFile
from echo_swarm.checkpoint.delta.write import DeltaWriter
from echo_swarm.checkpoint.partial import PartialArtifact, WrongPiece
from echo_swarm.errors import LocalFault, MalformedMessage
from echo_swarm.manifest import Artifact, ArtifactKind
from tests.unit.checkpoint.conftest import Run

MIB = 1 << 20
SIZE = 5 * MIB + 12_346

pytestmark = pytest.mark.anyio


class Versions:
    """Files of bfloat16 numbers that drift a little from one to the next."""

    def __init__(self, folder: Path, count: int, *, size: int = SIZE) -> None:
        self.run = Run()
        self.folder = folder
        random = np.random.default_rng(1)
        values = np.frombuffer(random.bytes(size), "<u2").copy()
        self.contents: list[bytes] = []
        for _ in range(count):
            self.contents.append(values.tobytes())
            values[random.random(len(values)) < 0.02] += 1
        self.artifacts = [self.run.artifact(content, precision="bfloat16") for content in self.contents]
        for number, content in enumerate(self.contents):
            self.path(number).write_bytes(content)

    def path(self, number: int) -> Path:
        return self.folder / f"{number}.bin"

    def delta(self, before: int, after: int) -> tuple[Path, Artifact]:
        base, target = self.artifacts[before], self.artifacts[after]
        path = self.folder / f"{before}-{after}.delta"
        writer = DeltaWriter(self.path(before), base, self.path(after), target)
        assert writer.write(path, max_bytes=target.size_bytes) == path.stat().st_size
        return path, self.described(path, before, after)

    def described(self, path: Path, before: int, after: int) -> Artifact:
        return self.run.artifact(
            path.read_bytes(),
            ArtifactKind.DELTA,
            base_digest=self.artifacts[before].digest,
            base_version=before,
            target_digest=self.artifacts[after].digest,
        )

    def partial(self, number: int) -> PartialArtifact:
        folder = self.folder / "partial"
        folder.mkdir(exist_ok=True)
        return PartialArtifact(folder, self.artifacts[number])


async def apply(base: Path, deltas: list[tuple[Path, Artifact]], partial: PartialArtifact) -> int:
    try:
        return await DeltaChain(base, [DeltaFile(*delta) for delta in deltas], partial).run()
    finally:
        if not partial.have.complete:
            partial.close()


async def test_a_chain_makes_the_last_version_of_the_first(tmp_path: Path) -> None:
    versions = Versions(tmp_path, 4)
    deltas = [versions.delta(n, n + 1) for n in range(3)]
    assert all(path.stat().st_size < 0.05 * SIZE for path, _ in deltas)
    partial = versions.partial(3)
    assert await apply(versions.path(0), deltas, partial) == SIZE
    path = partial.finish()
    assert path is not None and path.read_bytes() == versions.contents[3]


async def test_only_what_is_missing_is_made(tmp_path: Path) -> None:
    versions = Versions(tmp_path, 2)
    partial = versions.partial(1)
    piece = partial.artifact.piece_bytes
    for index in range(0, partial.artifact.piece_count, 2):
        partial.write(index, versions.contents[1][index * piece : (index + 1) * piece])
    missing = SIZE - partial.done_bytes
    assert await apply(versions.path(0), [versions.delta(0, 1)], partial) == missing
    partial.close()


@pytest.mark.parametrize("base", [1, 2], ids=["applied twice", "to a later version"])
async def test_a_delta_does_not_apply_to_another_base_than_its_own(tmp_path: Path, base: int) -> None:
    versions = Versions(tmp_path, 3)
    partial = versions.partial(1)
    with pytest.raises(WrongPiece):
        await apply(versions.path(base), [versions.delta(0, 1)], partial)
    assert partial.done_bytes == 0 or base == 1


async def test_links_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    versions = Versions(tmp_path, 4)
    first, second, third = (versions.delta(n, n + 1) for n in range(3))
    for chain in ([first, third], [third, second], [first], [second, first, third][:2]):
        with pytest.raises(MalformedMessage, match="do not fit together"):
            await apply(versions.path(0), chain, versions.partial(3))


async def test_a_base_that_is_gone_or_cut_is_told(tmp_path: Path) -> None:
    versions = Versions(tmp_path, 2)
    delta = versions.delta(0, 1)
    versions.path(0).write_bytes(versions.contents[0][:-1])
    with pytest.raises(LocalFault, match="gone, or shorter"):
        await apply(versions.path(0), [delta], versions.partial(1))


async def test_what_would_not_be_smaller_is_not_made(tmp_path: Path) -> None:
    run, random = Run(), np.random.default_rng(2)
    contents = [random.bytes(40 * MIB), random.bytes(40 * MIB)]
    paths = [tmp_path / "0", tmp_path / "1"]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    base, target = (run.artifact(content, precision="float32") for content in contents)
    out = tmp_path / "delta"
    assert DeltaWriter(paths[0], base, paths[1], target).write(out, max_bytes=30 * MIB) is None
    assert not out.exists()
    small = [Versions(tmp_path, 2).artifacts[n] for n in (0, 1)]
    writer = DeltaWriter(tmp_path / "0.bin", small[0], tmp_path / "1.bin", small[1])
    assert writer.write(out, max_bytes=1000) is None
    assert not out.exists()


async def test_files_of_other_lengths_have_no_delta(tmp_path: Path) -> None:
    run = Run()
    with pytest.raises(ValueError, match="differ in length"):
        DeltaWriter(tmp_path, run.artifact(bytes(10)), tmp_path, run.artifact(bytes(11)))


def patched(data: bytes, offset: int, fields: bytes) -> bytes:
    return data[:offset] + fields + data[offset + len(fields) :]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: b"", "gone, or shorter"),
        (lambda d: b"ECHODLT2" + d[8:], "does not begin like one"),
        (lambda d: patched(d, 8, bytes(32)), "another file"),
        (lambda d: patched(d, 40, bytes(32)), "another file"),
        (lambda d: patched(d, 72, struct.pack("<Q", 0)), "files of 0 bytes"),
        (lambda d: patched(d, 72, struct.pack("<Q", 2**63)), "files of"),
        (lambda d: patched(d, 72, struct.pack("<Q", 2**40)), "too few for"),
        (lambda d: patched(d, 80, struct.pack("<I", 0)), "blocks of 0 bytes"),
        (lambda d: patched(d, 80, struct.pack("<I", 3 << 19)), "blocks of"),
        (lambda d: patched(d, 84, struct.pack("<I", 1 << 31)), "is encoded in"),
        (lambda d: patched(d, 84, struct.pack("<I", 7)), "its blocks end at"),
        (lambda d: d + b"x", "its blocks end at"),
        (lambda d: d[:-1], "its blocks end at"),
    ],
)
async def test_a_file_that_breaks_a_rule_is_refused(tmp_path: Path, change, told: str) -> None:
    versions = Versions(tmp_path, 2)
    path, _ = versions.delta(0, 1)
    path.write_bytes(change(path.read_bytes()) or b"")
    delta = versions.described(path, 0, 1) if path.stat().st_size else versions.described(versions.path(0), 0, 1)
    with pytest.raises((MalformedMessage, LocalFault), match=told):
        DeltaFile(path, delta)
