"""Makes the demo's model once and keeps it: `python -m echo_coordinator.demo.warmup --cache FOLDER --seed 0`.

Runs as a child process, since it imports torch. Frames to the parent: {op: "progress", text}, and at the end
{op: "done", model, made}. The folder's name holds a digest of everything the model depends on, so that a changed recipe
makes a new one; it appears under that name only when complete.
"""

import argparse
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from echo_coordinator.demo import answers, recipe, tokenizer
from echo_swarm.children import claim_pipes, die_with_parent, write_frame

Progress = Callable[[str], None]


def model_folder(cache_dir: Path, seed: int) -> Path:
    """Return where the model of this recipe and seed is kept, whether or not it is there yet."""
    source = Path(__file__).with_name("model.py").read_bytes()
    told = "/".join((recipe.digest(), str(seed), *tokenizer.VOCABULARY))
    code = source + Path(answers.__file__).read_bytes()
    digest = hashlib.sha256(told.encode() + code).hexdigest()
    return cache_dir / f"demo-seed{seed}-{digest[:12]}"


def make_demo_model(cache_dir: Path, seed: int, progress: Progress) -> Path:
    """Return the folder of the warmed-up model, making it first if it is not in the cache (imports torch then).

    Same seed, recipe and number of threads give the same weights on the same kind of machine.
    """
    target = model_folder(cache_dir, seed)
    if target.is_dir():
        progress("found in the cache")
        return target
    import torch

    from echo_coordinator.demo.model import make_model

    torch.set_num_threads(min(recipe.WARM_UP.threads, os.cpu_count() or 1))
    cache_dir.mkdir(parents=True, exist_ok=True)
    building = cache_dir / f".{target.name}.{secrets.token_hex(4)}"
    started = time.monotonic()
    try:
        make_model(building, seed=seed, progress=progress)
        try:
            building.rename(target)
        except OSError:
            # Another process made the same one meanwhile; anything else is an error.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    progress(f"made in {time.monotonic() - started:.0f} s")
    return target


def main() -> None:
    """Make the model and say where it is."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m echo_coordinator.demo.warmup", description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="folder that keeps finished models")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    _, writer = claim_pipes()
    made = not model_folder(arguments.cache, arguments.seed).is_dir()
    model = make_demo_model(
        arguments.cache, arguments.seed, lambda text: write_frame(writer, {"op": "progress", "text": text})
    )
    write_frame(writer, {"op": "done", "model": str(model), "made": made})


if __name__ == "__main__":
    main()
