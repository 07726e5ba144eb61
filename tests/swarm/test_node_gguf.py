"""A node takes the file that its backend can load, and gets along with versions that have none."""

from pathlib import Path

import pytest

from echo_node.wanted import Wanted
from echo_swarm.manifest import ArtifactKind, sha256
from tests.swarm.support.node_harness import Swarm, make_swarm, until
from tests.unit.checkpoint.gguf_files import gguf_bytes

pytestmark = pytest.mark.anyio

GGUF = Wanted(kind=ArtifactKind.GGUF, precisions=("q8_0", "f16", "f32"))


def publish(swarm: Swarm, version: int, *precisions: str) -> dict[str, bytes]:
    files = {precision: gguf_bytes(seed=10 * version + i) for i, precision in enumerate(precisions)}
    swarm.coordinator.publish(version, gguf=files)
    return files


async def test_a_gguf_node_takes_the_best_file_there_is_and_only_that(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    files = publish(swarm, 0, "f32", "f16", "q4_0")
    async with swarm.serving(), swarm.node(wanted_files=GGUF) as running:
        await until(lambda: swarm.coordinator.accepted)
        folder = running.node.store.version_folder(0)
        assert [path.name for path in folder.iterdir() if path.name != "manifest.bin"] == ["model-f16.gguf"]
        assert swarm.coordinator.accepted[0].policy.artifact_digest == sha256(files["f16"])


async def test_nodes_of_both_kinds_work_on_one_version_and_fetch_from_each_other(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    files = publish(swarm, 0, "q8_0")
    async with (
        swarm.serving(),
        swarm.node("torch") as torch,
        swarm.node("first", wanted_files=GGUF, outbound_only=False) as first,
    ):
        await until(lambda: first.node.policies.newest == 0 and torch.node.policies.newest == 0)
        await until(lambda: len({t.policy.artifact_digest for t in swarm.coordinator.accepted}) == 2)
        await until(lambda: len(swarm.directory) >= 1)
        (swarm.coordinator.store.version_folder(0) / "model-q8_0.gguf").unlink()
        async with swarm.node("second", wanted_files=GGUF) as second:
            await until(lambda: second.node.policies.newest == 0)
            assert second.node.status().bytes_fetched_peers == len(files["q8_0"])


async def test_a_version_without_gguf_leaves_a_gguf_node_at_work_on_the_last_good_one(tmp_path: Path):
    swarm = make_swarm(tmp_path, max_staleness=2)
    publish(swarm, 0, "q8_0")
    async with swarm.serving(), swarm.node(wanted_files=GGUF) as running:
        await until(lambda: swarm.coordinator.accepted)
        swarm.coordinator.publish(1)
        await until(lambda: "version 1 has no gguf" in running.node.status().state)
        accepted = len(swarm.coordinator.accepted)
        await until(lambda: len(swarm.coordinator.accepted) > accepted + 8)
        assert running.node.policies.newest == 0
        assert any("staying with version 0" in line for line in running.lines)
        publish(swarm, 2, "q8_0")
        await until(lambda: swarm.coordinator.accepted[-1].policy.newest_version == 2)
        assert "has no gguf" not in running.node.status().state


async def test_a_gguf_node_falls_behind_in_good_order_and_catches_up(tmp_path: Path):
    swarm = make_swarm(tmp_path, max_staleness=0)
    publish(swarm, 0, "q8_0")
    async with swarm.serving(), swarm.node(wanted_files=GGUF) as running:
        await until(lambda: swarm.coordinator.accepted)
        swarm.coordinator.publish(1)
        await until(lambda: "waiting for a version that this backend can use" in running.node.status().state)
        # Whatever it had been given for version 1 is handed back, and nothing more is asked for.
        await until(lambda: not running.node.worker.held_leases())
        publish(swarm, 2, "q8_0")
        await until(lambda: swarm.coordinator.accepted[-1].policy.newest_version == 2)
    assert all(t.policy.newest_version != 1 for t in swarm.coordinator.accepted)


async def test_a_node_that_joins_at_a_version_without_gguf_takes_the_one_before_it(tmp_path: Path):
    swarm = make_swarm(tmp_path, max_staleness=2)
    publish(swarm, 3, "q8_0")
    swarm.coordinator.publish(4)
    async with swarm.serving(), swarm.node(wanted_files=GGUF) as running:
        await until(lambda: swarm.coordinator.accepted)
        assert running.node.policies.newest == 3


async def test_a_gguf_file_that_is_none_never_reaches_the_backend(tmp_path: Path):
    swarm = make_swarm(tmp_path, max_staleness=2)
    publish(swarm, 0, "q8_0")
    async with swarm.serving(), swarm.node(wanted_files=GGUF) as running:
        await until(lambda: swarm.coordinator.accepted)
        swarm.coordinator.publish(1, gguf={"q8_0": gguf_bytes(version=2)})
        await until(lambda: any("not handed to the backend (gguf: " in line for line in running.lines))
        publish(swarm, 2, "q8_0")
        await until(lambda: swarm.coordinator.accepted[-1].policy.newest_version == 2)
    assert running.puppet.loaded == [0, 2]


def test_what_is_wanted_is_chosen_in_order_of_preference(tmp_path: Path):
    swarm = make_swarm(tmp_path)
    publish(swarm, 0, "f32", "q4_0")
    manifest = swarm.coordinator.store.manifest(0).message
    assert Wanted().choose(manifest).kind is ArtifactKind.SAFETENSORS
    assert GGUF.choose(manifest).precision == "f32"
    assert Wanted(kind=ArtifactKind.GGUF).choose(manifest).precision == "f32"
    none = Wanted(kind=ArtifactKind.GGUF, precisions=("q8_0", "bf16"))
    assert none.choose(manifest) is None
    lacking = "version 0 has no gguf q8_0 or bf16 file, only safetensors uint8, gguf f32, gguf q4_0"
    assert none.lacking(manifest) == lacking
