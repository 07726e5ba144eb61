"""Attacks on updates, by the names that TUF gives them (docs/threat-model.md), on manifests, heads and stored files."""

import tracemalloc

import pytest

from echo_swarm import codec
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.checkpoint.trust import TrustedHead
from echo_swarm.directory.reading import newest_head
from echo_swarm.envelope import seal
from echo_swarm.errors import BadSignature, MalformedMessage, PeerFault, Untrusted
from echo_swarm.identity import Identity
from echo_swarm.manifest import MANIFEST_LIMITS, ArtifactKind
from echo_swarm.records import HeadRecord
from tests.unit.checkpoint.test_epochs import epoch_of

HIGHEST = 2**63 - 1


def head_of(run) -> TrustedHead:
    return TrustedHead(run_id=run.run_id, publisher_key=run.identity.public_key)


def test_fast_forward_without_the_runs_key_moves_nothing(run):
    thief = Identity.generate()
    head = head_of(run)
    head.update(run.sealed(12), 0.0)
    with pytest.raises(Untrusted):
        head.update(run.sealed(HIGHEST, signer=thief), 0.0)
    assert head.version == 12
    head.update(run.sealed(13), 0.0)
    records = [
        seal(signer, HeadRecord(run_id=run.run_id, policy_version=version, manifest_digest=bytes(32), issued_at=1.0))
        for signer, version in ((thief, HIGHEST), (run.identity, 13))
    ]
    for order in (records, records[::-1]):
        newest = newest_head(order, run_id=run.run_id, run_key=run.identity.public_key)
        assert newest is not None and newest.policy_version == 13


def test_fast_forward_with_the_runs_key_is_undone_by_a_higher_epoch(run):
    base = run.signed(12, epoch=epoch_of(run, 1, None))
    stolen, mended = epoch_of(run, 2, base), epoch_of(run, 3, base)
    head = head_of(run)
    head.update(run.sealed(HIGHEST, epoch=stolen), 0.0)
    with pytest.raises(Untrusted, match="rollback"):
        head.update(run.sealed(13, epoch=stolen), 0.0)
    assert head.update(run.sealed(13, epoch=mended), 0.0).message.policy_version == 13
    with pytest.raises(Untrusted, match="replaced"):
        head.update(run.sealed(HIGHEST, epoch=stolen), 0.0)


def parts(raw: bytes) -> dict:
    return codec.decode(raw, codec.Limits(max_bytes=1 << 20, max_items=64, max_depth=2))


@pytest.mark.parametrize("taken", [("payload",), ("sig",), ("payload", "sig"), ("key", "sig"), ("type",)])
def test_mix_and_match_of_the_parts_of_two_manifests_is_no_manifest(run, taken):
    ours, other = parts(run.sealed(3)), parts(run.sealed(4, signer=Identity.generate()))
    if "type" in taken:
        other["type"] = "HeadRecord"
    mixed = codec.encode(ours | {name: other[name] for name in taken})
    head = head_of(run)
    with pytest.raises((BadSignature, Untrusted, MalformedMessage)):
        head.update(mixed, 0.0)
    assert head.version is None and head.update(run.sealed(4), 0.0)


def test_mix_and_match_of_the_files_of_two_versions_is_found(run, store: VersionStore):
    old, new = run.data(1), run.data(2)
    run.fill(store, 1, old)
    signed = run.fill(store, 2, new)
    name = signed.message.artifacts[0].file_name
    paths = [store.version_folder(version) / name for version in (1, 2)]
    paths[0].rename(paths[0].with_suffix(".x"))
    paths[1].rename(paths[0])
    paths[0].with_suffix(".x").rename(paths[1])
    again = VersionStore(store.folder.parent, run.run_id)
    digest = signed.message.artifacts[0].digest
    assert again.read_piece(digest, 0) is None
    assert again.verify(2, ArtifactKind.GGUF) is None and again.verify(1, ArtifactKind.GGUF) is None


def test_mix_and_match_of_a_delta_with_another_versions_target_is_refused(run):
    target = run.artifact(run.data(2), kind=ArtifactKind.SAFETENSORS)
    elsewhere = run.artifact(run.data(3), kind=ArtifactKind.SAFETENSORS)
    values = {"base_digest": b"b" * 32, "base_version": 1, "kind": ArtifactKind.DELTA}
    for digest, fits in ((target.digest, True), (elsewhere.digest, False)):
        delta = run.artifact(run.data(4), **{**values, "target_digest": digest})
        raw = run.sealed(2, target, delta)
        if fits:
            assert head_of(run).update(raw, 0.0)
        else:
            with pytest.raises(MalformedMessage, match="wrong base or target"):
                head_of(run).update(raw, 0.0)


def test_endless_data_in_place_of_a_manifest_is_refused_before_anything_is_made_of_it(run):
    too_much = bytes(MANIFEST_LIMITS.max_bytes + 4096)
    nested = b"\x91" * MANIFEST_LIMITS.max_bytes
    announced = [b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x85\xa1v\x01\xa7payload\xc6\x7f\xff\xff\xff"]
    head = head_of(run)
    tracemalloc.start()
    try:
        for raw in (too_much, nested, *announced):
            with pytest.raises(PeerFault):
                head.update(raw, 0.0)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert head.update(run.sealed(1), 0.0)


def test_indefinite_freeze_an_old_head_that_is_repeated_for_ever_expires_and_is_told(run):
    head = head_of(run)
    frozen = run.sealed(3, expires_at=2000.0)
    for now_s in (1000.0, 1500.0, 2500.0):
        head.update(frozen, now_s)
    assert not head.is_expired(1999.0) and head.is_expired(2000.0)
    head.update(run.sealed(4, expires_at=9000.0), 2500.0)
    assert not head.is_expired(2500.0)
