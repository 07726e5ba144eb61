# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUntypedBaseClass=false
"""Binds each record of the hivemind DHT to its signer, key and expiry, and bounds what a peer stores. Imports hivemind.

A record lies under a subkey, its owner's public key. Its value is [payload, signature] with

    signature over "echo-swarm/dht/1" ‖ u16le(len(key)) ‖ u16le(len(subkey)) ‖ key ‖ subkey ‖ f64le(expiry) ‖ payload

so that nobody else can store an old record of somebody with a later expiry, or under another topic. The payload is
an envelope; whoever reads it checks that, too. An owner can replay its own old record, which harms only itself.
"""

import heapq
import logging
import math
import struct
import time
from typing import Any, cast

from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase

from echo_swarm import codec
from echo_swarm.codec import Limits
from echo_swarm.directory.rules import MAX_ENVELOPE_BYTES, MAX_TTL_S, RecordQuota, Refusal
from echo_swarm.errors import BadSignature, MalformedMessage
from echo_swarm.identity import Identity, verify

logger = logging.getLogger(__name__)

SKEW_S = 30.0
"""Clocks may differ by this much. One record that is refused makes hivemind throw away its whole topic, so that
neither a record that has just expired nor one of a peer whose clock is ahead may be."""
_DOMAIN = b"echo-swarm/dht/1"
_VALUE_LIMITS = Limits(max_bytes=MAX_ENVELOPE_BYTES + 128, max_items=2, max_depth=1)


class SignedRecordValidator(RecordValidatorBase):
    """Checks and makes the outer signature. Never raises, since hivemind would drop the connection to its peer."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._own_subkey = subkey_of(identity.public_key)

    def validate(self, record: DHTRecord) -> bool:
        """Say whether a record may be stored or believed. Order: expiry, owner, size and form, signature."""
        now = time.time()
        if not now - SKEW_S < record.expiration_time <= now + MAX_TTL_S + SKEW_S:
            return False
        owner = owner_of(record.subkey)
        if owner is None:
            return False
        try:
            payload, signature = _unpack(record.value)
            verify(owner, _authenticated(record, payload), signature)
        except (MalformedMessage, BadSignature):
            return False
        return True

    def sign_value(self, record: DHTRecord) -> bytes:
        """Return the value with our signature; others' records as they are."""
        if record.subkey != self._own_subkey:
            return record.value
        return codec.encode([record.value, self._identity.sign(_authenticated(record, record.value))])

    def strip_value(self, record: DHTRecord) -> bytes:
        """Return the payload of a value that was found valid."""
        return _unpack(record.value)[0]

    @property
    def priority(self) -> int:
        """Return its place among several validators; it is the only one."""
        return 0


class BoundedStorage(DHTLocalStorage):
    """What this peer keeps for others, within `RecordQuota`. hivemind's own has no bound."""

    def __init__(self, maxsize: int | None = None) -> None:
        super().__init__(maxsize)
        self.quota = RecordQuota()
        self.refused: dict[Refusal, int] = {}

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        """Store a record of an owner; refuse those without one."""
        return subkey is not None and self.store_subkey(key, subkey, value, expiration_time)

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        """Store a record if it is newer than its owner's last and within the quota."""
        if not isinstance(subkey, bytes) or not math.isfinite(expiration_time):
            return False
        held = cast("Any", self.get(key))
        topic: Any = held.value if held is not None else None
        if isinstance(topic, DictionaryDHTValue):
            earlier = topic.get(subkey)
            if earlier is not None and earlier.expiration_time >= expiration_time:
                return False
        name = key.to_bytes()
        refusal = self.quota.refusal(name, subkey, len(value), expiration_time, time.time())
        if refusal is not None:
            self.refused[refusal] = self.refused.get(refusal, 0) + 1
            return False
        if not super().store_subkey(key, subkey, value, expiration_time):
            return False
        self.quota.note(name, subkey, len(value), expiration_time)
        _compact(self)
        if isinstance(topic, DictionaryDHTValue):
            _compact(topic)
        return True


def _compact(storage: Any) -> None:
    """Forget superseded entries of hivemind's expiry heap; an owner that renews often would grow it without bound."""
    if len(storage.expiration_heap) > 2 * len(storage.data) + 64:
        storage.expiration_heap = list(storage.key_to_heap.values())
        heapq.heapify(storage.expiration_heap)


def subkey_of(public_key: bytes) -> bytes:
    """Return the encoded subkey under which an owner's records lie."""
    return codec.encode(public_key)


def owner_of(subkey: bytes) -> bytes | None:
    """Return the public key in an encoded subkey, or None."""
    try:
        owner = codec.decode(subkey, Limits(max_bytes=40))
    except MalformedMessage:
        return None
    return owner if isinstance(owner, bytes) and len(owner) == 32 else None


def _unpack(value: bytes) -> tuple[bytes, bytes]:
    parts: Any = codec.decode(value, _VALUE_LIMITS)
    if not isinstance(parts, list) or len(cast("list[Any]", parts)) != 2:
        raise MalformedMessage("record is no pair")
    payload, signature = cast("list[Any]", parts)
    if not isinstance(payload, bytes) or not isinstance(signature, bytes):
        raise MalformedMessage("record is no pair of payload and signature")
    return payload, signature


def _authenticated(record: DHTRecord, payload: bytes) -> bytes:
    lengths = struct.pack("<HH", len(record.key), len(record.subkey))
    expiry = struct.pack("<d", record.expiration_time)
    return b"".join((_DOMAIN, lengths, record.key, record.subkey, expiry, payload))
