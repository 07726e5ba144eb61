"""What a reader makes of the records it finds. The newest signed one wins: not expiry, not order of arrival. No IO.

Of a run's key, which several coordinators may hold by mistake, the highest epoch comes before that.
"""

from collections.abc import Iterable

from echo_swarm.directory.rules import Record, read_record
from echo_swarm.envelope import Signed
from echo_swarm.epoch import NO_EPOCH, Rank, rank_of
from echo_swarm.errors import PeerFault
from echo_swarm.identity import PeerId
from echo_swarm.records import HeadRecord, PeerRecord
from echo_swarm.succession import RunKeys, Succession

SUCCESSION_SLACK_S = 60.0
"""The last records under an old key may have been signed until then, if clocks differ."""


def newest_head(
    envelopes: Iterable[bytes], *, run_id: str, run_key: bytes, at_least: Rank = NO_EPOCH
) -> HeadRecord | None:
    """Return the head of the highest epoch, version, issue time that the run's key signed; None without any.

    Those of an epoch below `at_least` do not count.
    """
    heads = [
        signed
        for signed in _readable(envelopes)
        if isinstance(signed.message, HeadRecord) and signed.signer == run_key and signed.message.run_id == run_id
    ]
    newest = max((head for head in heads if record_rank(head) >= at_least), key=_head_order, default=None)
    return None if newest is None or not isinstance(newest.message, HeadRecord) else newest.message


def epochs_in(envelopes: Iterable[bytes], *, run_id: str, run_key: bytes) -> list[bytes]:
    """Return the epochs' envelopes in records that the run's key signed, not yet checked."""
    return [
        signed.message.epoch
        for signed in _readable(envelopes)
        if signed.signer == run_key and signed.message.run_id == run_id and signed.message.epoch is not None
    ]


def signed_by_earlier_key(envelopes: Iterable[bytes], keys: RunKeys) -> list[tuple[bytes, Succession]]:
    """Return (key, its succession) for records that a key signed well after it was succeeded, by its signer's clock."""
    found: list[tuple[bytes, Succession]] = []
    for signed in _readable(envelopes):
        gone = keys.after(signed.signer) if signed.message.run_id == keys.run_id else None
        if gone is not None and signed.message.issued_at > gone.made_at + SUCCESSION_SLACK_S:
            found.append((signed.signer, gone))
    return found


def newest_peers(envelopes: Iterable[bytes], *, run_id: str) -> dict[PeerId, PeerRecord]:
    """Return the record that each peer of a run issued last."""
    newest: dict[PeerId, PeerRecord] = {}
    orders: dict[PeerId, tuple[Rank, float]] = {}
    for signed in _readable(envelopes):
        record = signed.message
        if not isinstance(record, PeerRecord) or record.run_id != run_id:
            continue
        order = record_rank(signed), record.issued_at
        if signed.peer_id not in newest or order > orders[signed.peer_id]:
            newest[signed.peer_id], orders[signed.peer_id] = record, order
    return newest


def record_rank(signed: Signed[Record]) -> Rank:
    """Return the rank of a record's epoch; that of none when it is not a good one."""
    try:
        return rank_of(signed.message.epoch, run_id=signed.message.run_id, run_key=signed.signer)
    except PeerFault:
        return NO_EPOCH


def _head_order(signed: Signed[Record]) -> tuple[Rank, int, float]:
    version = signed.message.policy_version if isinstance(signed.message, HeadRecord) else 0
    return record_rank(signed), version, signed.message.issued_at


def _readable(envelopes: Iterable[bytes]) -> list[Signed[Record]]:
    found: list[Signed[Record]] = []
    for raw in envelopes:
        try:
            found.append(read_record(raw))
        except PeerFault:
            continue  # Anybody can announce anything; what cannot be read does not count.
    return found
