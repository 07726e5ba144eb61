"""How small a version becomes as its difference from the one before, and how fast it is made and applied.

    real AdamW steps ─► files ─► DeltaWriter (as the publisher) ─► DeltaChain, PartialArtifact (as a node) ─► compared

Eleven versions of SmolLM2-135M in bfloat16 at each of three learning rates, and of the demo's model in float32 at the
demo's. One thread each, so that the speeds are those of a core; MB are of the whole file. In the same run, on the same
bytes: sha256, and a copy of the file to disk with fsync.

    python -m benchmarks.deltas --model models/smollm2 [--versions 11]

The model is a folder made by docs/recipes/smollm2.md.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import anyio

from benchmarks._report import ROOT, write_report
from echo_coordinator.publisher.deltas import MAX_SHARE
from echo_coordinator.publisher.pack import pack
from echo_swarm.checkpoint.delta.apply import DeltaChain
from echo_swarm.checkpoint.delta.delta_file import DeltaFile
from echo_swarm.checkpoint.delta.write import DeltaWriter
from echo_swarm.checkpoint.partial import PartialArtifact
from echo_swarm.manifest import Artifact, ArtifactKind

MODEL = ROOT / "models" / "smollm2"
RATES = (1e-6, 1e-5, 1e-4)


def versions(model: Path, folder: Path, *, lr: float, count: int, precision: str) -> Iterator[Path]:
    """Yield the versions' files as they are made."""
    asked = {"model": str(model), "out": str(folder), "lr": lr, "versions": count, "precision": precision}
    command = [sys.executable, "-m", "benchmarks._delta_versions", json.dumps(asked)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        made = [int(line) for line in child.stdout]
    if child.returncode:
        raise SystemExit(f"the versions could not be made: {' '.join(command)}")
    for number in made:
        yield folder / f"{number}.safetensors"


def described(path: Path, folder: Path, precision: str) -> Artifact:
    """Pack a version's file as the publisher does."""
    folder.mkdir()
    return pack(path, folder, kind=ArtifactKind.SAFETENSORS, precision=precision, base_digest=None)


async def step(folder: Path, base: tuple[Path, Artifact], target: tuple[Path, Artifact]) -> dict[str, float]:
    """Make and apply one delta and return its figures."""
    size, out = target[1].size_bytes, folder / "delta.tmp"
    writer = DeltaWriter(*base, *target, threads=1)
    start = time.perf_counter()
    made = writer.write(out, max_bytes=size)
    encode_s = time.perf_counter() - start
    assert made is not None, "no smaller than the file"
    delta = pack(out, folder, kind=ArtifactKind.DELTA, precision=target[1].precision, base_digest=base[1].digest)
    delta = delta.model_copy(update={"target_digest": target[1].digest, "base_version": 0})
    arrived = folder / "arrived"
    arrived.mkdir(exist_ok=True)
    partial = PartialArtifact(arrived, target[1])
    start = time.perf_counter()
    await DeltaChain(base[0], [DeltaFile(folder / delta.file_name, delta)], partial, threads=1).run()
    decode_s = time.perf_counter() - start
    path = partial.finish()
    assert path is not None and path.read_bytes() == target[0].read_bytes()
    path.unlink()
    return {"share": made / size, "encode_mb_s": size / encode_s / 1e6, "decode_mb_s": size / decode_s / 1e6}


def limits(path: Path) -> dict[str, float]:
    """Return what hashing and writing the same bytes take at least."""
    data = path.read_bytes()
    start = time.perf_counter()
    hashlib.sha256(data).digest()
    hash_s = time.perf_counter() - start
    copy = path.with_suffix(".copy")
    start = time.perf_counter()
    with copy.open("wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())
    write_s = time.perf_counter() - start
    copy.unlink()
    return {"sha256_mb_s": len(data) / hash_s / 1e6, "write_fsync_mb_s": len(data) / write_s / 1e6}


async def measure(model: Path, *, lr: float, count: int, precision: str) -> dict[str, Any]:
    """Return the figures of one learning rate."""
    steps: list[dict[str, float]] = []
    scratch = ROOT / "benchmarks" / "results" / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder = Path(name)
        before: tuple[Path, Artifact] | None = None
        bounds: dict[str, float] = {}
        for number, path in enumerate(versions(model, folder, lr=lr, count=count, precision=precision)):
            artifact = described(path, folder / f"v{number}", precision)
            now = (folder / f"v{number}" / artifact.file_name, artifact)
            path.unlink()
            if before is not None:
                steps.append(await step(folder, before, now))
                print(f"lr {lr:g} version {number}: {_said(steps[-1])}", file=sys.stderr, flush=True)
                before[0].unlink()
            bounds = bounds or limits(now[0])
            before = now
    shares = [one["share"] for one in steps]
    return {
        "learning_rate": lr,
        "precision": precision,
        "megabytes": before[1].size_bytes / 1e6 if before else 0.0,
        "shares": shares,
        "share_mean": sum(shares) / len(shares),
        "encode_mb_s": median(one["encode_mb_s"] for one in steps),
        "decode_mb_s": median(one["decode_mb_s"] for one in steps),
        "published_as_deltas": sum(share <= MAX_SHARE for share in shares),
        **bounds,
    }


def _said(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())


async def main(model: Path, demo: Path | None, count: int) -> None:
    """Measure all and report."""
    runs = [await measure(model, lr=lr, count=count, precision="bfloat16") for lr in RATES]
    runs.append(await measure(model, lr=1e-5, count=min(count, 4), precision="float32"))
    if demo is not None:
        runs.append(await measure(demo, lr=3e-4, count=count, precision="float32"))
    write_report("deltas", {"runs": runs}, packages=("numpy", "zstandard", "torch"))


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument(
        "--demo-model", type=Path, help="the demo's model folder, for float32 at its learning rate, 3e-4"
    )
    parser.add_argument("--versions", type=int, default=11)
    return parser.parse_args()


if __name__ == "__main__":
    given = parse()
    if not (given.model / "config.json").is_file():
        raise SystemExit(f"{given.model} is no model folder; make one by docs/recipes/smollm2.md")
    anyio.run(main, given.model.resolve(), given.demo_model and given.demo_model.resolve(), given.versions)
