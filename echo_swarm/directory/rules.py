"""What a directory takes from a peer it does not trust. No IO; time is passed in.

In this order: size, form and signature (`read_record`), time to live, then what one signer, one topic and all
together may hold (`RecordQuota`). Identities cost nothing, so the last bound protects memory, not fairness: a flood
of fresh keys can keep newcomers out of a peer's directory until its records expire, and the coordinator's own gateway
has to serve them.
"""

from collections import Counter
from enum import StrEnum

from echo_swarm.envelope import OVERHEAD_BYTES, Signed, unseal
from echo_swarm.errors import BadSignature, MalformedMessage
from echo_swarm.identity import Identity
from echo_swarm.records import RECORD_LIMITS, HeadRecord, PeerRecord

Record = HeadRecord | PeerRecord

MAX_TTL_S = 3600.0
MAX_ENVELOPE_BYTES = RECORD_LIMITS.max_bytes + OVERHEAD_BYTES
MAX_TOPICS_PER_SIGNER = 64
MAX_BYTES_PER_SIGNER = 64 * 1024
MAX_BYTES_PER_TOPIC = 2 << 20
"""A topic travels as one message of the hivemind DHT, which takes 4 MiB and breaks above it."""
MAX_BYTES = 3 << 20
"""All together: a newcomer to the hivemind DHT is handed all it should hold in one message, too."""
_SWEEP_EVERY_S = 1.0


class Refusal(StrEnum):
    """Why a record was not stored."""

    EXPIRED = "expired"
    TOO_LARGE = "too_large"
    SIGNER_FULL = "signer_full"
    TOPIC_FULL = "topic_full"
    FULL = "full"


def read_record(raw: bytes) -> Signed[Record]:
    """Unseal a record of either type. Raises MalformedMessage or BadSignature."""
    if len(raw) > MAX_ENVELOPE_BYTES:
        raise MalformedMessage(f"record of {len(raw)} bytes, limit {MAX_ENVELOPE_BYTES}")
    try:
        head = unseal(raw, HeadRecord, RECORD_LIMITS)
    except MalformedMessage:
        peer = unseal(raw, PeerRecord, RECORD_LIMITS)
        return Signed(message=peer.message, signer=peer.signer, digest=peer.digest, raw=raw)
    return Signed(message=head.message, signer=head.signer, digest=head.digest, raw=raw)


def check_own(identity: Identity, envelope: bytes) -> None:
    """Raise MalformedMessage unless `envelope` is a record signed by `identity`."""
    try:
        signer = read_record(envelope).signer
    except BadSignature as e:
        raise MalformedMessage(str(e)) from e
    if signer != identity.public_key:
        raise MalformedMessage("a record can be announced only by the peer that signed it")


def clamp_ttl(ttl_s: float) -> float:
    """Return the time to live that is granted; nan, negative and infinite requests included."""
    return min(ttl_s, MAX_TTL_S) if ttl_s > 0 else 0.0


class RecordQuota:
    """Counts what is stored by (topic, signer) and says whether one more fits."""

    def __init__(self) -> None:
        self._held: dict[tuple[bytes, bytes], tuple[int, float]] = {}
        self._topics: Counter[bytes] = Counter()
        self._signers: Counter[bytes] = Counter()
        self._records: Counter[bytes] = Counter()
        self._total = 0
        self._swept_at = float("-inf")

    def __len__(self) -> int:
        return len(self._held)

    def refusal(self, topic: bytes, signer: bytes, size: int, expires_at: float, now: float) -> Refusal | None:
        """Say why a record may not be stored; None if it may."""
        if size > MAX_BYTES_PER_SIGNER:
            return Refusal.TOO_LARGE
        if not expires_at > now:
            return Refusal.EXPIRED
        found = self._over(topic, signer, size)
        if found is not None and now - self._swept_at >= _SWEEP_EVERY_S:
            self._sweep(now)
            found = self._over(topic, signer, size)
        return found

    def note(self, topic: bytes, signer: bytes, size: int, expires_at: float) -> None:
        """Count a record that was stored, in place of this signer's earlier one."""
        self._drop((topic, signer))
        self._held[topic, signer] = (size, expires_at)
        self._topics[topic] += size
        self._signers[signer] += size
        self._records[signer] += 1
        self._total += size

    def _over(self, topic: bytes, signer: bytes, size: int) -> Refusal | None:
        earlier = self._held.get((topic, signer), (0, 0.0))[0]
        grows = size - earlier
        if self._records[signer] + (earlier == 0) > MAX_TOPICS_PER_SIGNER:
            return Refusal.SIGNER_FULL
        if self._signers[signer] + grows > MAX_BYTES_PER_SIGNER:
            return Refusal.SIGNER_FULL
        if self._topics[topic] + grows > MAX_BYTES_PER_TOPIC:
            return Refusal.TOPIC_FULL
        return Refusal.FULL if self._total + grows > MAX_BYTES else None

    def _sweep(self, now: float) -> None:
        self._swept_at = now
        for key in [key for key, (_, expires_at) in self._held.items() if expires_at <= now]:
            self._drop(key)

    def _drop(self, key: tuple[bytes, bytes]) -> None:
        size, _ = self._held.pop(key, (0, 0.0))
        if size == 0:
            return
        topic, signer = key
        self._total -= size
        for counter, name, amount in ((self._topics, topic, size), (self._signers, signer, size)):
            counter[name] -= amount
            if counter[name] == 0:
                del counter[name]
        self._records[signer] -= 1
        if self._records[signer] == 0:
            del self._records[signer]
