"""The directory seam: announce a signed record under a topic, find the records of a topic.

A topic is a string such as `<run id>/head`. Each peer owns at most one live record a topic. Records are envelopes
signed by the peer they speak of; a directory can withhold them but not forge them.
"""

from typing import Protocol


def head_topic(run_id: str) -> str:
    """Topic of the HeadRecord that the run's key announces."""
    return f"{run_id}/head"


def peers_topic(run_id: str) -> str:
    """Topic of the PeerRecords of a run."""
    return f"{run_id}/peers"


class Directory(Protocol):
    """Finds what peers announced."""

    async def announce(self, topic: str, envelope: bytes, *, ttl_s: float) -> bool:
        """Publish our own record for `ttl_s` seconds (at most an hour), replacing our earlier one.

        Returns:
            Whether any other peer took it. False is normal for the first peer of a network.

        Raises:
            MalformedMessage: the record is larger than RECORD_LIMITS allow or not signed by us.

        """
        ...

    def meet(self, address: str) -> None:
        """Go into the network through this peer, too, from now on."""
        ...

    async def find(self, topic: str) -> list[bytes]:
        """Return the live records of a topic whose signatures fit, at most one a signer, in no order.

        Unreachable peers shorten the list; they raise nothing. Callers unseal what they get.
        """
        ...
