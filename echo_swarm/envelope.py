"""Signed messages. What is signed is the type and the payload, so that one kind can never pass for another.

An envelope is the canonical map {v, type, payload, key, sig}: `payload` is the canonical encoding of a message,
`key` the signer's public key and `sig` its signature over the pre-authentication encoding

    "echo-swarm/1" ‖ u32le(len(type)) ‖ type ‖ u64le(len(payload)) ‖ payload

in the manner of DSSE: lengths first, so that no two (type, payload) pairs share an encoding.
"""

import hashlib
import struct
from dataclasses import dataclass
from typing import Annotated, Generic, TypeVar

from pydantic import Field

from echo_swarm import codec
from echo_swarm.codec import Limits
from echo_swarm.errors import MalformedMessage
from echo_swarm.identity import Identity, PeerId, peer_id_of, verify
from echo_swarm.wire import Message, Name, ProtocolVersion, PublicKeyBytes

M = TypeVar("M", bound=Message)

VERSION = 1
OVERHEAD_BYTES = 256
"""Upper bound of what an envelope adds to its payload."""

_DOMAIN = b"echo-swarm/1"


class _Envelope(Message):
    v: ProtocolVersion
    type: Name
    payload: bytes
    key: PublicKeyBytes
    sig: Annotated[bytes, Field(min_length=64, max_length=64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed(Generic[M]):
    """A message whose signature has been checked."""

    message: M
    signer: bytes
    """32-byte public key."""
    digest: bytes
    """sha256 of the encoded payload: names the content, whoever signed it."""
    raw: bytes
    """The envelope as received, to be stored or passed on."""

    @property
    def peer_id(self) -> PeerId:
        """The signer's peer id."""
        return peer_id_of(self.signer)


def seal(identity: Identity, message: Message) -> bytes:
    """Return the signed envelope of `message`. Its type is the message's class name."""
    payload = codec.encode(message.to_wire())
    kind = type(message).__name__
    envelope = _Envelope(
        v=1,
        type=kind,
        payload=payload,
        key=identity.public_key,
        sig=identity.sign(_authenticated(kind, payload)),
    )
    return codec.encode(envelope.to_wire())


def unseal(raw: bytes, kind: type[M], limits: Limits) -> Signed[M]:
    """Check an envelope from outside. Order: size, form, type, signature, payload.

    Args:
        raw: the envelope's bytes.
        kind: the message class expected; any other is refused.
        limits: of the payload; the envelope may be OVERHEAD_BYTES longer.

    Raises:
        MalformedMessage: it cannot be decoded, is of another type, or its payload breaks a rule.
        BadSignature: the signature does not fit.

    """
    outer = Limits(max_bytes=limits.max_bytes + OVERHEAD_BYTES, max_items=16, max_depth=1)
    envelope = _Envelope.from_wire(codec.decode(raw, outer))
    if envelope.type != kind.__name__:
        raise MalformedMessage(f"envelope of type {envelope.type!r}, expected {kind.__name__!r}")
    verify(envelope.key, _authenticated(envelope.type, envelope.payload), envelope.sig)
    message = kind.from_wire(codec.decode(envelope.payload, limits))
    digest = hashlib.sha256(envelope.payload).digest()
    return Signed(message=message, signer=envelope.key, digest=digest, raw=raw)


def _authenticated(kind: str, payload: bytes) -> bytes:
    name = kind.encode()
    return b"".join((_DOMAIN, struct.pack("<I", len(name)), name, struct.pack("<Q", len(payload)), payload))
