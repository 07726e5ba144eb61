"""Adapters over a base: which manifests count, and that no base in use is ever deleted."""

import json

import pytest

from echo_node.wanted import Wanted
from echo_swarm.checkpoint.adapter_file import adapter_config, read_adapter
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.checkpoint.trust import TrustedHead
from echo_swarm.errors import MalformedMessage
from echo_swarm.manifest import ArtifactKind
from tests.unit.checkpoint.conftest import safetensors_bytes

LORA, SAFETENSORS, GGUF = ArtifactKind.LORA, ArtifactKind.SAFETENSORS, ArtifactKind.GGUF


def base_of(run):
    return run.artifact(run.data(100))


def fill_run(run, store, versions):
    """Version 0 has the base; each later one is an adapter that names it."""
    base = run.fill(store, 0, run.data(100)).message.artifacts[0]
    for version in range(1, versions):
        # Whose content a store does not check, so that it need not be a real adapter.
        adapter = run.artifact(run.data(version, 1), ArtifactKind.LORA_GGUF, base_digest=base.digest)
        signed = run.signed(version, adapter)
        store.add(signed)
        partial = store.open_partial(version, adapter)
        for index in range(adapter.piece_count):
            partial.write(index, run.data(version, 1)[index * 65536 : (index + 1) * 65536])
        assert store.finish_partial(partial)
        store.close_partial(partial)
    return base


def test_retention_keeps_the_base_as_long_as_an_adapter_names_it(run, store, tmp_path):
    base = fill_run(run, store, 6)
    assert store.retain(2, ()) == [1, 2, 3]
    again = VersionStore(tmp_path, run.run_id)
    assert again.retain(1, ()) == [4]
    assert again.versions() == [0, 5] and again.complete_digests(limit=1) == [base.digest]


def test_a_quota_evicts_adapters_and_never_their_base(run, tmp_path):
    store = VersionStore(tmp_path, run.run_id)
    fill_run(run, store, 4)
    small = VersionStore(tmp_path, run.run_id, quota_bytes=store.used_bytes())
    newest = run.artifact(run.data(9, 1), ArtifactKind.LORA_GGUF, base_digest=base_of(run).digest)
    small.add(run.signed(9, newest))
    small.close_partial(small.open_partial(9, newest))
    assert small.versions()[0] == 0 and 1 not in small.versions() and 9 in small.versions()


@pytest.mark.parametrize(
    ("kind", "base_digest"), [(LORA, None), (ArtifactKind.LORA_GGUF, None), (SAFETENSORS, bytes(32)), (GGUF, bytes(32))]
)
def test_adapters_name_a_base_and_whole_models_none(run, kind, base_digest):
    head = TrustedHead(run_id=run.run_id, publisher_key=run.identity.public_key)
    artifact = run.artifact(run.data(1), kind, base_digest=base_digest)
    with pytest.raises(MalformedMessage, match=f"of kind {kind.value} with (no|a) base"):
        head.update(run.sealed(1, artifact), 0.0)


def test_a_backend_takes_the_adapter_before_the_base_and_any_gguf_of_the_same_model(run):
    base = run.artifact(run.data(1), SAFETENSORS)
    quantised = [run.artifact(run.data(i), GGUF, precision=p) for i, p in ((2, "f16"), (3, "q8_0"))]
    adapters = [run.artifact(run.data(4, 1), kind, base_digest=base.digest) for kind in (LORA, ArtifactKind.LORA_GGUF)]
    first = run.manifest(0, base, *quantised, *adapters)
    torch = Wanted(adapter=LORA)
    llama = Wanted(kind=GGUF, precisions=("q8_0", "f16"), adapter=ArtifactKind.LORA_GGUF)
    assert (torch.choose(first), torch.choose_base(first, adapters[0])) == (adapters[0], base)
    assert (llama.choose(first), llama.choose_base(first, adapters[1])) == (adapters[1], quantised[1])
    assert Wanted().choose(first) == base
    stranger = run.artifact(run.data(5, 1), LORA, base_digest=run.artifact(run.data(6)).digest)
    assert torch.choose_base(first, stranger) is None
    assert llama.choose_base(run.manifest(0, base, adapters[1]), adapters[1]) is None
    assert "version 0 as safetensors" in torch.lacking_base(first, run.manifest(3, stranger))


def adapter_bytes(config=None, **changes):
    names = [f"base_model.model.model.layers.0.self_attn.q_proj.lora_{part}.weight" for part in "AB"]
    entries = {
        "__metadata__": {
            "adapter_config": json.dumps({**adapter_config(rank=2, alpha=4, targets=["q_proj"]), **changes})
        },
        names[0]: {"dtype": "F32", "shape": [2, 8], "data_offsets": [0, 64]},
        names[1]: {"dtype": "F32", "shape": [4, 2], "data_offsets": [64, 96]},
    }
    return safetensors_bytes({**entries, **(config or {})}, bytes(96))


def test_a_good_adapter_is_described(tmp_path):
    (tmp_path / "a").write_bytes(adapter_bytes())
    found = read_adapter(tmp_path / "a")
    assert (found.rank, found.scale) == (2, 2.0)
    assert found.layers == {"model.layers.0.self_attn.q_proj": (4, 8)}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (adapter_bytes({"__metadata__": {}}), "has no adapter_config"),
        (adapter_bytes({"__metadata__": {"adapter_config": "{"}}), "is no JSON"),
        (adapter_bytes({"__metadata__": {"adapter_config": "[]"}}), "does not have exactly"),
        (adapter_bytes(surprise=1), "does not have exactly"),
        (adapter_bytes(use_dora=True), "use_dora is 'True'"),
        (adapter_bytes(r=0), "r is '0'"),
        (adapter_bytes(r=True), "r is 'True'"),
        (adapter_bytes(r=513), "r is '513'"),
        (adapter_bytes(r=3), "rank 3"),
        (adapter_bytes(lora_alpha=float("inf")), "lora_alpha is 'inf'"),
        (adapter_bytes(lora_alpha="4"), "lora_alpha is '4'"),
        (safetensors_bytes({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "adapter_config"),
    ],
)
def test_a_file_that_is_no_adapter_is_refused_with_the_rule(tmp_path, data, reason):
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(MalformedMessage, match=reason):
        read_adapter(tmp_path / "a")


def test_a_tensor_that_belongs_to_no_pair_is_refused(tmp_path):
    extra = {"base_model.model.lm_head.weight": {"dtype": "F32", "shape": [0], "data_offsets": [96, 96]}}
    (tmp_path / "a").write_bytes(adapter_bytes(extra))
    with pytest.raises(MalformedMessage, match=r"'base_model\.model\.lm_head\.weight' \(F32\) has no place"):
        read_adapter(tmp_path / "a")
