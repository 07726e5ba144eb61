"""What a reader makes of the records it finds. The newest signed one wins: not expiry, not order of arrival. No IO."""

from collections.abc import Iterable

from echo_swarm.directory.rules import Record, read_record
from echo_swarm.envelope import Signed
from echo_swarm.errors import PeerFault
from echo_swarm.identity import PeerId
from echo_swarm.records import HeadRecord, PeerRecord


def newest_head(envelopes: Iterable[bytes], *, run_id: str, run_key: bytes) -> HeadRecord | None:
    """Return the head with the highest version, then issue time, that the run's key signed; None without any."""
    heads = [
        signed.message
        for signed in _readable(envelopes)
        if isinstance(signed.message, HeadRecord) and signed.signer == run_key and signed.message.run_id == run_id
    ]
    return max(heads, key=lambda head: (head.policy_version, head.issued_at), default=None)


def newest_peers(envelopes: Iterable[bytes], *, run_id: str) -> dict[PeerId, PeerRecord]:
    """Return the record that each peer of a run issued last."""
    newest: dict[PeerId, PeerRecord] = {}
    for signed in _readable(envelopes):
        record = signed.message
        if not isinstance(record, PeerRecord) or record.run_id != run_id:
            continue
        known = newest.get(signed.peer_id)
        if known is None or record.issued_at > known.issued_at:
            newest[signed.peer_id] = record
    return newest


def _readable(envelopes: Iterable[bytes]) -> list[Signed[Record]]:
    found: list[Signed[Record]] = []
    for raw in envelopes:
        try:
            found.append(read_record(raw))
        except PeerFault:
            continue  # Anybody can announce anything; what cannot be read does not count.
    return found
