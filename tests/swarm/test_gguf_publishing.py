"""Versions carry files for llama.cpp; one that cannot be made is missed and stops nothing."""

import json
import struct
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import numpy as np
import pytest

from echo_coordinator.loops.publishing import Publishing
from echo_coordinator.publisher import Publisher
from echo_coordinator.publisher.contents import WholeModel
from echo_coordinator.publisher.gguf.convert import GgufConverter
from echo_coordinator.state.run_state import RunFacts, open_run
from echo_coordinator.state.work_settings import WorkSettings
from echo_node.wanted import Wanted
from echo_swarm.checkpoint.gguf_file import check_gguf
from echo_swarm.checkpoint.store import SLACK_BYTES, VersionStore
from echo_swarm.clock import ManualClock
from echo_swarm.errors import UsageError
from echo_swarm.identity import Identity
from echo_swarm.manifest import ArtifactKind
from tests.swarm.support import stand_ins
from tests.swarm.support.whole_run import WholeRun, make_run

pytestmark = pytest.mark.anyio

RUN_ID = "ab" * 16
GGUF = Wanted(kind=ArtifactKind.GGUF, precisions=("q8_0",))
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": stand_ins.VOCABULARY,
    "eos_token_id": stand_ins.END,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
SHAPES = {
    "model.embed_tokens.weight": (stand_ins.VOCABULARY, 32),
    "model.norm.weight": (32,),
    "model.layers.0.input_layernorm.weight": (32,),
    "model.layers.0.post_attention_layernorm.weight": (32,),
    "model.layers.0.self_attn.q_proj.weight": (32, 32),
    "model.layers.0.self_attn.k_proj.weight": (16, 32),
    "model.layers.0.self_attn.v_proj.weight": (16, 32),
    "model.layers.0.self_attn.o_proj.weight": (32, 32),
    "model.layers.0.mlp.gate_proj.weight": (64, 32),
    "model.layers.0.mlp.up_proj.weight": (64, 32),
    "model.layers.0.mlp.down_proj.weight": (32, 64),
}


@pytest.fixture
def anyio_backend() -> str:
    """The coordinator runs on asyncio."""
    return "asyncio"


def llama(seed: int, *, broken: bool = False) -> bytes:
    """Return a safetensors file of a small Llama; a broken one holds a number that is not finite."""
    header, data = {}, b""
    random = np.random.default_rng(seed)
    for name, shape in SHAPES.items():
        values = random.normal(size=shape).astype("<f4")
        values.flat[0] = np.nan if broken else values.flat[0]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + values.nbytes]}
        data += values.tobytes()
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def converter_of(folder: Path, *precisions: str, config: dict[str, object] | None = None) -> GgufConverter:
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    return GgufConverter(
        precisions=precisions, config=folder / "config.json", folder=folder / "gguf", log_path=folder / "gguf.log"
    )


def gguf_run(folder: Path, *precisions: str, **settings: object) -> WholeRun:
    run = make_run(folder, **settings)
    publish = run.settings.publish.model_copy(update={"gguf": precisions})
    run.settings = run.settings.model_copy(update={"publish": publish})
    (run.folder.model / "config.json").write_text(json.dumps(CONFIG))
    return run


async def test_a_child_writes_every_precision_asked_for(tmp_path: Path):
    (tmp_path / "w.safetensors").write_bytes(llama(1))
    converter = converter_of(tmp_path, "q8_0", "f32")
    converter.check()
    converted = await converter.convert(tmp_path / "w.safetensors")
    assert [(file.kind, file.precision) for file in converted.files] == [
        (ArtifactKind.GGUF, "q8_0"),
        (ArtifactKind.GGUF, "f32"),
    ]
    assert converted.failures == ()
    assert check_gguf(converted.files[0].path).values["llama.vocab_size"] == stand_ins.VOCABULARY
    converter.clean()
    assert not (tmp_path / "gguf").exists()


async def test_what_fails_is_told_for_each_precision(tmp_path: Path):
    values = np.frombuffer(llama(1)[-(64 * 32 * 4) :], dtype="<f4").copy()
    values[0] = 1e6
    (tmp_path / "w.safetensors").write_bytes(llama(1)[: -values.nbytes] + values.tobytes())
    converted = await converter_of(tmp_path, "f16", "f32").convert(tmp_path / "w.safetensors")
    assert [file.precision for file in converted.files] == ["f32"]
    (failure,) = converted.failures
    assert failure.startswith("gguf f16: tensor 'model.layers.0.mlp.down_proj.weight' holds numbers beyond")


async def test_weights_that_are_no_file_of_weights_are_a_failure_and_no_error(tmp_path: Path):
    (tmp_path / "w.safetensors").write_bytes(b"no safetensors")
    converter = converter_of(tmp_path, "f32")
    assert "safetensors" in (await converter.convert(tmp_path / "w.safetensors")).failures[0]
    assert "missing.safetensors" in (await converter.convert(tmp_path / "missing.safetensors")).failures[0]


async def test_a_child_that_dies_is_a_failure_with_its_last_words(tmp_path: Path, monkeypatch):
    (tmp_path / "w.safetensors").write_bytes(llama(1))
    (tmp_path / "gguf.py").write_text("raise SystemExit('out of luck')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    converted = await converter_of(tmp_path, "f32", "f16").convert(tmp_path / "w.safetensors")
    assert converted.files == ()
    assert len(converted.failures) == 2 and "out of luck" in converted.failures[0]


@asynccontextmanager
async def publishing_of(folder: Path, converter: GgufConverter, **store: object) -> AsyncGenerator[Publishing]:
    """Open what publishes, and the database beside it; again on the same folder is a restart."""
    identity, clock = Identity.from_seed(bytes(32)), ManualClock()
    held = VersionStore(folder / "store", RUN_ID, **store)
    publisher = Publisher(identity=identity, store=held, clock=clock, max_staleness=1, keep_versions=2)
    facts = RunFacts(run_id=RUN_ID, vocabulary_size=64, end_token_ids=(0,))
    async with open_run(folder / "state.db", WorkSettings(), facts, clock) as state:
        yield Publishing(
            state=state,
            publisher=publisher,
            identity=identity,
            clock=clock,
            contents=WholeModel(precision="float32", converter=converter),
        )


async def test_a_disk_with_room_for_the_weights_alone_takes_the_weights(tmp_path: Path):
    weights = tmp_path / "w.safetensors"
    weights.write_bytes(llama(1))
    room = SLACK_BYTES + weights.stat().st_size + 1000
    async with publishing_of(tmp_path, converter_of(tmp_path, "f32"), free=lambda folder: room) as publishing:
        published = await publishing.publish(0, weights)
        (warning,) = publishing.warnings
    assert [artifact.kind for artifact in published.message.artifacts] == [ArtifactKind.SAFETENSORS]
    assert warning.startswith("version 0 is published without gguf: version 0 needs ")
    assert not (tmp_path / "gguf").exists()


async def test_a_version_that_exists_is_published_again_as_it_is_whatever_the_settings_say_now(tmp_path: Path):
    weights = tmp_path / "w.safetensors"
    weights.write_bytes(llama(1))
    async with publishing_of(tmp_path, converter_of(tmp_path, "q8_0")) as publishing:
        first = await publishing.publish(0, weights)
        assert publishing.warnings == []
    async with publishing_of(tmp_path, converter_of(tmp_path, "q8_0", "f16")) as publishing:
        assert (await publishing.publish(0, weights)).raw == first.raw
        assert publishing.warnings == ["version 0 is published without gguf f16"]
        weights.write_bytes(llama(2))
        second = await publishing.publish(1, weights)
        assert publishing.warnings == []
    assert [artifact.precision for artifact in second.message.artifacts] == ["float32", "q8_0", "f16"]


async def test_a_run_that_asks_for_what_its_model_cannot_have_does_not_start(tmp_path: Path):
    run = gguf_run(tmp_path, "q8_0")
    (run.folder.model / "config.json").write_text(json.dumps({**CONFIG, "architectures": ["MambaForCausalLM"]}))
    with pytest.raises(UsageError, match=r"publish\.gguf cannot be had for this model: .*MambaForCausalLM"):
        async with run.coordinator():
            pass


async def test_peers_of_both_kinds_train_one_run_and_a_failed_conversion_stops_neither(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(stand_ins, "weights", lambda version, _=0: llama(version, broken=version == 2))
    run = gguf_run(tmp_path, "q8_0", updates=4, max_staleness=2)
    async with run.coordinator() as coordinator, run.node("torch"), run.node("laptop", wanted_files=GGUF) as laptop:
        with anyio.fail_after(120):
            await coordinator.ended.wait()
        status = coordinator.reporter.status()
        events = await coordinator.state.core.events(50)
    assert status.policy_version == 4 and status.failed_conversions == 1
    told = [event.text for event in events if event.kind == "publish"]
    assert len(told) == 1 and told[0].startswith("version 2 is published without gguf q8_0: tensor ")
    assert "unknown_policy" not in status.rejected and laptop.verdicts["accepted"] > 0
    assert not any("version 2" in warning for warning in status.warnings)
    assert any("version 2 has no gguf q8_0 file" in line for line in laptop.lines) or laptop.node.policies.newest != 2
    assert not (run.folder.root / "gguf").exists()
