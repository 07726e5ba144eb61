"""Runs whose key can be replaced."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from echo_coordinator.run_keys import rotate_key
from echo_swarm.clock import SystemClock
from echo_swarm.identity import Identity, load, load_or_create
from tests.swarm.support.whole_run import WholeRun, make_run


def make_keyed_run(folder: Path, **work: Any) -> WholeRun:
    """Make a run whose key lies in its folder."""
    run = make_run(folder, **{"beat_s": 5.0, **work})
    run.folder.settings.write_text(
        f'[run]\nid = "{run.settings.run.id}"\nname = "run"\n[environment]\nname = "reasoning_gym:chain_sum"\n'
    )
    identity, _ = load_or_create(run.folder.key)
    return replace(run, identity=identity)


def rotated(run: WholeRun) -> WholeRun:
    """Give a stopped run a new key."""
    rotate_key(run.folder.root, SystemClock())
    return replace(run, identity=load(run.folder.key))


def known_before(run: WholeRun, old: Identity) -> WholeRun:
    """The run as somebody knows it who has an invite from before the rotation."""
    return replace(run, identity=old)
