"""Field case 54: a system that does not let go of files (as Windows with what is open or mapped) stops no node."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echo_swarm.manifest import ArtifactKind
from tests.swarm.support.node_harness import make_swarm, until

pytestmark = pytest.mark.anyio

WEIGHTS = ArtifactKind.SAFETENSORS.file_name


class Held:
    """Names inside a node's folder that can be neither replaced nor deleted for now."""

    def __init__(self, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.node = node
        self.names: set[str] = set()
        self.refused = 0
        monkeypatch.setattr(os, "replace", self._guarded(os.replace))
        monkeypatch.setattr(os, "unlink", self._guarded(os.unlink))
        monkeypatch.setattr(shutil, "rmtree", self._guarded(shutil.rmtree))

    def _guarded(self, real: Callable[..., None]) -> Callable[..., None]:
        def call(*paths: Any, **options: Any) -> None:
            held = [path for path in map(Path, paths[:2]) if path.name in self.names and self.node in path.parents]
            if held:
                self.refused += 1
                raise PermissionError(errno.EACCES, "in use by another process", str(held[0]))
            real(*paths, **options)

        return call


async def test_a_version_whose_file_cannot_get_its_name_is_tried_again_while_the_old_one_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm(tmp_path, max_staleness=4)
    swarm.coordinator.publish(0)
    async with swarm.serving(), swarm.node() as running:
        await until(lambda: running.node.policies.newest == 0)
        held = Held(tmp_path / "node", monkeypatch)
        held.names = {WEIGHTS}
        swarm.coordinator.publish(1)
        await until(lambda: held.refused >= 2, "tried again")
        assert running.node.status().state.startswith("waiting for version 1 of the model")
        accepted = len(swarm.coordinator.accepted)
        await until(lambda: len(swarm.coordinator.accepted) > accepted + 8, "more work of the old version")
        assert running.node.policies.newest == 0
        held.names = set()
        await until(lambda: running.node.policies.newest == 1, "let go of, it comes")
        assert sum("cannot be changed right now" in line for line in running.lines) == 1


async def test_an_old_version_that_cannot_be_deleted_is_deleted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = make_swarm(tmp_path, max_staleness=0)
    swarm.coordinator.publish(0)
    async with swarm.serving(), swarm.node() as running:
        await until(lambda: running.node.policies.newest == 0)
        held = Held(tmp_path / "node", monkeypatch)
        held.names = {running.node.store.version_folder(0).name}
        for version in (1, 2):
            swarm.coordinator.publish(version)
            await until(lambda version=version: version in running.puppet.loaded)
        await until(lambda: held.refused >= 1, "the first try")
        assert 0 in running.node.store.versions()
        held.names = set()
        swarm.coordinator.publish(3)
        await until(lambda: 0 not in running.node.store.versions(), "deleted with the next one")
        assert running.error is None
