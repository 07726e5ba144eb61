"""The one string with which a run is joined.

    echo1-<base64url of canonical msgpack {run, key, boot}>-<8 hex digits of its sha256>

The key inside pins trust: whatever a bootstrap peer says later, only manifests signed by it count. The checksum
catches an invite that was cut or mangled on its way through a chat window.
"""

import base64
import binascii
import hashlib
from typing import Annotated

from pydantic import Field

from echo_swarm import codec
from echo_swarm.codec import Limits
from echo_swarm.errors import InviteError, MalformedMessage
from echo_swarm.identity import PeerId, peer_id_of
from echo_swarm.wire import Address, Message, PublicKeyBytes, RunId

_PREFIX = "echo1-"
LIMITS = Limits(max_bytes=16 * 1024, max_items=32, max_depth=2)
_MAX_CHARACTERS = 24 * 1024


class Invite(Message):
    """Everything a node needs to find a run and to know it is the right one."""

    run: RunId
    key: PublicKeyBytes
    """The run's public key. It signs every manifest, and the coordinator's peer id derives from it."""
    boot: Annotated[tuple[Address, ...], Field(strict=False, min_length=1, max_length=16)]
    """Multiaddresses of bootstrap peers, each ending in /p2p/<peer id>."""

    @property
    def coordinator(self) -> PeerId:
        """The coordinator's peer id."""
        return peer_id_of(self.key)

    def __str__(self) -> str:
        """Return the string form."""
        body = codec.encode(self.to_wire())
        text = base64.urlsafe_b64encode(body).decode().rstrip("=")
        return f"{_PREFIX}{text}-{_checksum(body)}"


def parse(text: str) -> Invite:
    """Read an invite. Raises InviteError, saying what to do."""
    cleaned = "".join(text.split()).strip("\"'<>`")
    if not cleaned.startswith(_PREFIX) or len(cleaned) > _MAX_CHARACTERS:
        raise InviteError(f"an invite starts with {_PREFIX!r}; copy the whole line that the coordinator printed")
    encoded, _, checksum = cleaned.removeprefix(_PREFIX).rpartition("-")
    try:
        body = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as e:
        raise InviteError("the invite has characters that do not belong there; copy it again") from e
    if checksum != _checksum(body):
        raise InviteError("the invite is incomplete or was changed (checksum differs); copy it again")
    try:
        return Invite.from_wire(codec.decode(body, LIMITS))
    except MalformedMessage as e:
        raise InviteError(f"this invite cannot be read: {e}; it may be from a newer version") from e


def _checksum(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:8]
