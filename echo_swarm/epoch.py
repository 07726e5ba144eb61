"""Which of several coordinators with a run's key counts: the one with the highest epoch. No IO.

Each start of a coordinator takes a new epoch, and what it signs carries it. Of two epochs the one with the higher
number is higher; of equal numbers (two copies of a folder, started without knowing of each other) the one with the
higher nonce.

An epoch names its base: the newest version in the run's folder when it began. What earlier epochs published up to the
base is the run's past. What they published above it was published by a coordinator that had been replaced, and does not
count any more. This is no consensus: see docs/adr/0015-epochs.md.
"""

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field, model_validator

from echo_swarm.codec import Limits
from echo_swarm.envelope import Signed, unseal
from echo_swarm.errors import PeerFault, Untrusted
from echo_swarm.succession import RunKeys
from echo_swarm.wire import U32, U63, Digest, Message, RunId, Seconds

EPOCH_LIMITS = Limits(max_bytes=512, max_items=16, max_depth=1)
MAX_EPOCH_BYTES = 768
"""Of the envelope."""
EpochEnvelope = Annotated[bytes, Field(max_length=MAX_EPOCH_BYTES)]

Rank = tuple[int, bytes]
"""Orders epochs: number, then nonce."""
NO_EPOCH: Rank = (0, b"")
"""Of what was signed before there were epochs: below all of them."""


class Epoch(Message):
    """One start of a coordinator. Signed by the run's key, and made durable before anything is signed under it."""

    run_id: RunId
    number: Annotated[U32, Field(ge=1)]
    """One more than the highest that the coordinator knew of."""
    nonce: Annotated[bytes, Field(min_length=16, max_length=16)]
    started_at: Seconds
    """By the coordinator's clock, for people: it decides nothing."""
    base_version: U63 | None
    """The newest version in its folder when it began; None before version 0."""
    base_digest: Digest | None
    """Of that version's manifest."""

    @model_validator(mode="after")
    def _base_is_whole(self) -> "Epoch":
        if (self.base_version is None) != (self.base_digest is None):
            raise ValueError("a base has a version and a digest")
        return self

    @property
    def rank(self) -> Rank:
        """Its place in the order of epochs."""
        return self.number, self.nonce

    def refuses(self, rank: Rank, version: int, digest: bytes) -> bool:
        """Say whether a manifest falls to this epoch: published above the base by a lower one, or not that base.

        Args:
            rank: of the epoch under which it was signed.
            version: its policy version.
            digest: of its payload.

        """
        if rank >= self.rank:
            return False
        if self.base_version is None or version > self.base_version:
            return True
        return version == self.base_version and digest != self.base_digest


def open_epoch(raw: bytes, *, run_id: str, run_key: bytes) -> Signed[Epoch]:
    """Check an epoch's envelope.

    Raises:
        MalformedMessage, BadSignature: it is none.
        Untrusted: another key signed it, or it is about another run.

    """
    signed = unseal(raw, Epoch, EPOCH_LIMITS)
    if signed.signer != run_key:
        raise Untrusted("an epoch signed by another key than the run's")
    if signed.message.run_id != run_id:
        raise Untrusted(f"an epoch of run {signed.message.run_id}, expected {run_id}")
    return signed


def rank_of(raw: bytes | None, *, run_id: str, run_key: bytes) -> Rank:
    """Return the rank of an epoch's envelope; NO_EPOCH when there is none. Raises as `open_epoch`."""
    return NO_EPOCH if raw is None else open_epoch(raw, run_id=run_id, run_key=run_key).message.rank


class HighestEpoch:
    """The highest epoch of a run that this peer has heard of. Only ever moves up.

    Epochs under a key that was succeeded count no more: not even one with the highest number there is.

    Args:
        run_id: the run.
        run_key: its public key.
        persisted: envelopes from this peer's disk; damaged ones are ignored.
        keys: that key and its successors; None for this one alone.

    """

    def __init__(
        self, *, run_id: str, run_key: bytes, persisted: Iterable[bytes] = (), keys: RunKeys | None = None
    ) -> None:
        self.run_id = run_id
        self.keys = keys or RunKeys(run_id, run_key)
        """Shared with all who must know the run's key."""
        self._highest: Signed[Epoch] | None = None
        for raw in persisted:
            try:
                self.hear(raw)
            except PeerFault:
                continue  # Whoever is asked next tells it again.

    @property
    def signed(self) -> Signed[Epoch] | None:
        """The highest; None before any was heard of."""
        highest = self._highest
        return highest if highest is not None and highest.signer == self.keys.key else None

    @property
    def rank(self) -> Rank:
        """Its rank."""
        return NO_EPOCH if (highest := self.signed) is None else highest.message.rank

    def hear(self, raw: bytes | None) -> bool:
        """Take an envelope from anybody. Returns whether it is higher than all before. Raises as `open_epoch`."""
        if raw is None:
            return False
        signed = open_epoch(raw, run_id=self.run_id, run_key=self.keys.key)
        if signed.message.rank <= self.rank:
            return False
        self._highest = signed
        return True

    def refuses(self, rank: Rank, version: int, digest: bytes) -> bool:
        """Say whether a manifest falls to the highest epoch; see `Epoch.refuses`."""
        return (highest := self.signed) is not None and highest.message.refuses(rank, version, digest)
