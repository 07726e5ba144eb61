"""What a peer says of how a version's files came to it, and of the sources that were at fault. Part of a `Beat`.

It is one peer's word: readers count it once for each peer and file, bound it by the file's size, and tell who says so.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, Field

from echo_swarm.wire import U32, U63, Digest, Message, Seconds, Word, clean

MAX_TRANSFERS = 8
"""In one beat: the last ones."""
MAX_FAULTS = 8
"""Sources named with one file."""


class FaultReason(StrEnum):
    """What a source did. The first three cannot happen to one that does what it should."""

    WRONG_BYTES = "wrong_bytes"
    BROKEN_PROMISE = "broken_promise"
    """It said again and again that it has pieces which it then did not give."""
    MALFORMED = "malformed"
    SILENT = "silent"
    HUNG_UP = "hung_up"
    BAD_SERVER = "bad_server"
    """A mirror answered with an error, or otherwise than a file server should."""


LIES = frozenset({FaultReason.WRONG_BYTES, FaultReason.BROKEN_PROMISE, FaultReason.MALFORMED})


class SourceFault(Message):
    """A source, and what it did."""

    source: Annotated[str, Field(min_length=1, max_length=512), AfterValidator(clean)]
    """Peer id, or the URL of a mirror."""
    reason: Annotated[FaultReason, *Word]


class SourceBytes(Message):
    """Verified bytes by where they came from."""

    coordinator: U63
    peers: U63
    mirrors: U63

    @property
    def total(self) -> int:
        """All of them."""
        return self.coordinator + self.peers + self.mirrors


class Transfer(Message):
    """How one file came to one peer, all attempts of its process together."""

    policy_version: U63
    digest: Digest
    """Of the artifact."""
    whole: bool
    """It is complete and verified here."""
    fetched: SourceBytes
    """Of the file itself."""
    deltas: SourceBytes
    """Of the changes that it was made of, if it was."""
    made_bytes: U63
    """Of the file: made of an older version and changes."""
    disk_bytes: U63
    """Of the file: on this disk before."""
    seconds: Seconds
    """That it took, by the peer's clock."""
    failures: U32
    """Times that a source failed."""
    faults: Annotated[tuple[SourceFault, ...], Field(strict=False, max_length=MAX_FAULTS)]
