"""Signed messages: only the signer's exact bytes, of the type asked for, come through."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_swarm import codec, envelope
from echo_swarm.codec import Limits
from echo_swarm.envelope import OVERHEAD_BYTES, seal, unseal
from echo_swarm.errors import BadSignature, MalformedMessage, PeerFault
from echo_swarm.identity import Identity
from echo_swarm.records import RECORD_LIMITS, HeadRecord
from echo_swarm.wire import Message
from echo_swarm.work import Release, StatusRequest

ALICE = Identity.from_seed(bytes(range(32)))
MALLORY = Identity.from_seed(bytes(32))
HEAD = HeadRecord(run_id="0" * 32, policy_version=7, manifest_digest=bytes(32), issued_at=1.5)
RAW = seal(ALICE, HEAD)
NO_LIMIT = Limits(max_bytes=1 << 20)


class Lookalike(Message):
    """Has the fields of StatusRequest, and is something else."""

    run_id: str


def fields(raw: bytes = RAW) -> dict[str, object]:
    return codec.decode(raw, NO_LIMIT)


def test_what_was_sealed_is_unsealed_with_its_signer_and_digest() -> None:
    signed = unseal(RAW, HeadRecord, RECORD_LIMITS)
    assert signed.message == HEAD
    assert signed.signer == ALICE.public_key
    assert signed.peer_id == ALICE.peer_id
    assert signed.raw == RAW
    assert signed.digest == hashlib.sha256(fields()["payload"]).digest()


def test_sealing_twice_gives_the_same_bytes() -> None:
    assert seal(ALICE, HEAD) == RAW


def test_an_envelope_adds_no_more_than_is_allowed_for() -> None:
    for size in (0, 255, 256, 65_536):
        message = Release(lease_ids=(bytes(16),) * (size // 16 % 4096), cause="x" * 256, leaving=True)
        assert len(seal(ALICE, message)) <= len(codec.encode(message.to_wire())) + OVERHEAD_BYTES
    assert envelope.OVERHEAD_BYTES >= 64 + 32 + 64 + 40


def test_one_kind_of_message_cannot_pass_for_another() -> None:
    raw = seal(ALICE, Lookalike(run_id="0" * 32))
    with pytest.raises(MalformedMessage, match="Lookalike"):
        unseal(raw, StatusRequest, RECORD_LIMITS)
    relabelled = codec.encode(fields(raw) | {"type": "StatusRequest"})
    with pytest.raises(BadSignature):
        unseal(relabelled, StatusRequest, RECORD_LIMITS)


def test_a_byte_moved_between_type_and_payload_breaks_the_signature() -> None:
    inner = fields()
    payload = inner["payload"]
    assert isinstance(payload, bytes)
    moved = codec.encode(inner | {"type": "HeadRecor", "payload": b"d" + payload})
    with pytest.raises(PeerFault):
        unseal(moved, HeadRecord, RECORD_LIMITS)


def test_the_key_of_another_signer_does_not_fit() -> None:
    with pytest.raises(BadSignature):
        unseal(codec.encode(fields() | {"key": MALLORY.public_key}), HeadRecord, RECORD_LIMITS)


def test_the_same_payload_signed_by_another_shows_that_signer_and_the_same_digest() -> None:
    copied = unseal(seal(MALLORY, HEAD), HeadRecord, RECORD_LIMITS)
    assert copied.signer == MALLORY.public_key
    assert copied.digest == unseal(RAW, HeadRecord, RECORD_LIMITS).digest


@pytest.mark.parametrize("position", range(len(RAW)))
def test_a_flipped_bit_anywhere_is_refused(position: int) -> None:
    for bit in (1, 0x80):
        raw = bytearray(RAW)
        raw[position] ^= bit
        with pytest.raises(PeerFault):
            unseal(bytes(raw), HeadRecord, RECORD_LIMITS)


def test_an_envelope_cut_anywhere_is_refused() -> None:
    for length in range(len(RAW)):
        with pytest.raises(MalformedMessage):
            unseal(RAW[:length], HeadRecord, RECORD_LIMITS)


def test_anything_after_the_envelope_is_refused() -> None:
    with pytest.raises(MalformedMessage):
        unseal(RAW + b"\x00", HeadRecord, RECORD_LIMITS)


@pytest.mark.parametrize(
    "change",
    [
        {"v": 2},
        {"v": True},
        {"v": 1.0},
        {"v": None},
        {"extra": 1},
        {"type": ""},
        {"type": "x" * 65},
        {"type": b"HeadRecord"},
        {"key": bytes(31)},
        {"key": "k" * 32},
        {"sig": bytes(63)},
        {"sig": bytes(65)},
        {"payload": "text"},
        {"payload": None},
        {"payload": ["nested"]},
    ],
)
def test_a_header_of_another_form_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage):
        unseal(codec.encode(fields() | change), HeadRecord, RECORD_LIMITS)


def test_a_signature_over_another_version_of_the_domain_does_not_count() -> None:
    inner = fields()
    payload = inner["payload"]
    assert isinstance(payload, bytes)
    with pytest.raises(BadSignature):
        unseal(codec.encode(inner | {"sig": ALICE.sign(payload)}), HeadRecord, RECORD_LIMITS)


def test_a_payload_in_another_than_canonical_form_is_refused_though_it_is_signed() -> None:
    payload = codec.encode(HEAD.to_wire())
    # `policy_version` 7 as an integer of two bytes.
    longer = payload.replace(b"\xaepolicy_version\x07", b"\xaepolicy_version\xcc\x07")
    assert longer != payload
    with pytest.raises(MalformedMessage, match="canonical"):
        unseal(_signed("HeadRecord", longer), HeadRecord, RECORD_LIMITS)


def test_a_signed_payload_that_breaks_a_rule_of_its_message_is_refused_by_field() -> None:
    with pytest.raises(MalformedMessage, match="policy_version"):
        unseal(_signed("HeadRecord", codec.encode(HEAD.to_wire() | {"policy_version": -1})), HeadRecord, RECORD_LIMITS)


def test_the_size_limit_counts_the_payload() -> None:
    payload_bytes = len(codec.encode(HEAD.to_wire()))
    assert unseal(RAW, HeadRecord, Limits(max_bytes=payload_bytes)).message == HEAD
    with pytest.raises(MalformedMessage, match="limit"):
        unseal(RAW, HeadRecord, Limits(max_bytes=payload_bytes - 1))
    with pytest.raises(MalformedMessage, match="limit"):
        unseal(bytes(RECORD_LIMITS.max_bytes + OVERHEAD_BYTES + 1), HeadRecord, RECORD_LIMITS)


@given(st.integers(0, len(RAW) - 1), st.integers(0, 40), st.binary(max_size=40))
def test_no_splice_is_ever_accepted(start: int, length: int, inserted: bytes) -> None:
    spliced = RAW[:start] + inserted + RAW[start + length :]
    if spliced == RAW:
        return
    with pytest.raises(PeerFault):
        unseal(spliced, HeadRecord, RECORD_LIMITS)


@given(st.binary(max_size=400))
def test_noise_is_refused_without_any_other_error(noise: bytes) -> None:
    with pytest.raises(PeerFault):
        unseal(noise, HeadRecord, RECORD_LIMITS)


def _signed(kind: str, payload: bytes) -> bytes:
    """Sign bytes that `seal` would never make."""
    lengths = len(kind).to_bytes(4, "little"), len(payload).to_bytes(8, "little")
    signature = ALICE.sign(b"echo-swarm/1" + lengths[0] + kind.encode() + lengths[1] + payload)
    return codec.encode({"v": 1, "type": kind, "payload": payload, "key": ALICE.public_key, "sig": signature})
