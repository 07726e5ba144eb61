"""What a LoRA run publishes: the base once, an adapter a version, and the same for llama.cpp."""

import json
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from echo_coordinator.loops.publishing import Publishing
from echo_coordinator.publisher import Publisher
from echo_coordinator.publisher.contents import AdapterOverBase
from echo_coordinator.state.core import RunFacts
from echo_coordinator.state.run_state import open_run
from echo_coordinator.state.work_settings import WorkSettings
from echo_swarm.checkpoint.adapter_file import adapter_config, tensor_names
from echo_swarm.checkpoint.gguf_file import check_gguf_adapter
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.clock import ManualClock
from echo_swarm.errors import LocalFault
from echo_swarm.identity import Identity
from echo_swarm.manifest import ArtifactKind
from tests.swarm.test_gguf_publishing import RUN_ID, converter_of, llama

pytestmark = pytest.mark.anyio

KINDS = [ArtifactKind.SAFETENSORS, ArtifactKind.LORA, ArtifactKind.GGUF, ArtifactKind.LORA_GGUF]


@pytest.fixture
def anyio_backend() -> str:
    """The coordinator runs on asyncio."""
    return "asyncio"


def adapter(seed: int, layer: str = "model.layers.0.self_attn.q_proj") -> bytes:
    """Return a `lora` file over the small Llama."""
    config = json.dumps(adapter_config(rank=2, alpha=4.0, targets=["q_proj"]))
    header: dict[str, object] = {"__metadata__": {"adapter_config": config}}
    data = b""
    for name, shape in zip(tensor_names(layer), ((2, 32), (32, 2)), strict=True):
        values = np.random.default_rng(seed).normal(size=shape).astype("<f4")
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + values.nbytes]}
        data += values.tobytes()
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@asynccontextmanager
async def publishing_of(folder: Path, *precisions: str) -> AsyncGenerator[tuple[Publishing, VersionStore]]:
    identity, clock = Identity.from_seed(bytes(32)), ManualClock()
    store = VersionStore(folder / "store", RUN_ID)
    publisher = Publisher(identity=identity, store=store, clock=clock, max_staleness=0, keep_versions=1)
    facts = RunFacts(run_id=RUN_ID, vocabulary_size=64, end_token_ids=(0,))
    contents = AdapterOverBase(
        base=folder / "base.safetensors", precision="float32", converter=converter_of(folder, *precisions)
    )
    async with open_run(folder / "state.db", WorkSettings(), facts, clock) as state:
        yield (
            Publishing(state=state, publisher=publisher, identity=identity, clock=clock, contents=contents),
            store,
        )


async def test_the_base_goes_out_with_version_0_and_stays_while_adapters_come_and_go(tmp_path: Path):
    (tmp_path / "base.safetensors").write_bytes(llama(1))
    weights = tmp_path / "adapter.safetensors"
    async with publishing_of(tmp_path, "q8_0") as (publishing, store):
        for version in range(4):
            weights.write_bytes(adapter(version))
            published = (await publishing.publish(version, weights)).message
            assert publishing.warnings == []
            assert [a.kind for a in published.artifacts] == (KINDS if version == 0 else KINDS[1::2])
        assert store.versions() == [0, 3]
        base = store.manifest(0).message.artifact(ArtifactKind.SAFETENSORS)
        assert {a.base_digest for a in published.artifacts} == {base.digest}
        check_gguf_adapter(store.verify(3, ArtifactKind.LORA_GGUF))
        assert store.verify(0, ArtifactKind.SAFETENSORS) and store.verify(0, ArtifactKind.GGUF, "q8_0")
    assert not (tmp_path / "gguf").exists()


async def test_a_version_is_published_again_as_it_is_and_an_adapter_without_a_place_in_gguf_is_told(tmp_path: Path):
    (tmp_path / "base.safetensors").write_bytes(llama(1))
    weights = tmp_path / "adapter.safetensors"
    weights.write_bytes(adapter(1, "model.layers.9.self_attn.q_proj"))
    async with publishing_of(tmp_path, "f32") as (publishing, _):
        first = await publishing.publish(0, weights)
        (warning,) = publishing.warnings
    assert warning.startswith("version 0 is published without lora-gguf: layer 'model.layers.9.self_attn.q_proj'")
    async with publishing_of(tmp_path, "f32") as (publishing, _):
        assert (await publishing.publish(0, weights)).raw == first.raw
        assert publishing.warnings == ["version 0 is published without lora-gguf"]


async def test_a_base_that_is_gone_is_said(tmp_path: Path):
    async with publishing_of(tmp_path) as (publishing, _):
        with pytest.raises(LocalFault, match=r"cannot read .*base\.safetensors"):
            await publishing.publish(0, tmp_path / "adapter.safetensors")
