"""What becomes of versions and epochs on disk when the run's key is succeeded."""

from pathlib import Path

import pytest

from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.checkpoint.trust import TrustedHead
from echo_swarm.envelope import Signed, unseal
from echo_swarm.epoch import EPOCH_LIMITS, NO_EPOCH, Epoch
from echo_swarm.errors import Untrusted
from echo_swarm.identity import Identity
from echo_swarm.manifest import CheckpointManifest
from echo_swarm.succession import KeyChain, RunKeys, Succession, make_link
from tests.unit.checkpoint.test_epochs import epoch_of

NEW = Identity.from_seed(b"n" * 32)
HIGHEST = 2**32 - 1


def keys_of(run, *kept: Signed[CheckpointManifest]) -> RunKeys:
    """The run's keys after a succession that keeps these manifests."""
    succession = Succession(
        run_id=run.run_id,
        sequence=1,
        old_key=run.identity.public_key,
        new_key=NEW.public_key,
        epoch=1,
        made_at=1.0,
        kept=tuple(signed.digest for signed in kept),
    )
    keys = RunKeys(run.run_id, run.identity.public_key)
    checked = keys.judge(KeyChain(links=(make_link(run.identity, NEW, succession),)))
    assert checked is not None
    keys.adopt(checked)
    return keys


def trusted(run, store: VersionStore, keys: RunKeys) -> TrustedHead:
    return TrustedHead(
        run_id=run.run_id,
        publisher_key=run.identity.public_key,
        persisted=store.known_manifests(),
        epoch=store.epoch(),
        keys=keys,
    )


@pytest.fixture
def held(run, tmp_path: Path):
    """A peer that had version 12, and 13 from a thief whose epoch nobody can outbid."""
    store = VersionStore(tmp_path, run.run_id)
    good = run.fill(store, 12, run.data(12))
    highest = epoch_of(run, HIGHEST, good)
    store.take_epoch(unseal(highest, Epoch, EPOCH_LIMITS))
    thiefs = run.signed(13, epoch=highest)
    store.add(thiefs)
    store.save_head(thiefs)
    return store, good, thiefs


def test_what_the_succession_does_not_name_goes_and_the_rest_stays(run, held, tmp_path: Path):
    store, good, _ = held
    keys = keys_of(run, good)
    assert store.keep_under(keys) == [13]
    for opened in (store, VersionStore(tmp_path, run.run_id)):
        assert opened.versions() == [12] and opened.head() is None and opened.epoch() is None
        assert opened.whole(good.message.artifacts[0].digest) is not None
        assert opened.keep_under(keys) == []
    head = trusted(run, store, keys)
    assert head.version == 12
    ours = unseal(epoch_of(run, 2, good, signer=NEW), Epoch, EPOCH_LIMITS)
    assert head.hear(ours.raw) and store.take_epoch(ours) == []
    assert store.epoch() == ours.raw and head.version == 12
    assert head.update(run.sealed(13, signer=NEW, epoch=ours.raw), 0.0).signer == NEW.public_key


def test_a_kill_before_anything_was_dropped_is_made_up(run, held):
    store, good, thiefs = held
    head = trusted(run, store, keys_of(run, good))
    assert head.version == 12 and head.epochs.rank == NO_EPOCH
    assert any("replaced on" in problem for problem in head.damaged)
    for wrong in (thiefs.raw, run.sealed(14), run.sealed(12, run.artifact(b"other"))):
        with pytest.raises(Untrusted, match="whoever signs with it is not the run"):
            head.update(wrong, 0.0)
    with pytest.raises(Untrusted):
        head.hear(epoch_of(run, HIGHEST, None))
    assert head.check_past(good.raw).digest == good.digest


def test_a_head_that_is_trusted_falls_when_the_key_is_succeeded_without_it(run, held):
    store, good, thiefs = held
    keys = RunKeys(run.run_id, run.identity.public_key)
    head = trusted(run, store, keys)
    assert head.version == 13 and head.epochs.rank[0] == HIGHEST
    keys.adopt(keys_of(run, good)._known)
    assert head.keys_changed() and head.head is None and head.epochs.rank == NO_EPOCH
    assert not head.keys_changed()
    assert head.update(good.raw, 0.0).message.policy_version == 12
    with pytest.raises(Untrusted):
        head.update(thiefs.raw, 0.0)


def test_the_chain_on_disk_is_handed_on_and_damage_there_is_none(run, held):
    store, good, _ = held
    assert store.keys() is None
    chain = keys_of(run, good).chain
    store.save_keys(chain)
    assert store.keys() == chain
    (store.folder / "keys.bin").write_bytes(b"damaged")
    assert store.keys() is None
