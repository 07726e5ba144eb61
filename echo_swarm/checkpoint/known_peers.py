"""Addresses of peers that were met, kept on disk: ways back into a run's network when the usual ones are gone.

A JSON list of multiaddresses, those met last first. They are hints: whoever answers there proves who it is. What peers
said of themselves is kept only as far as it may be dialled (see `reach`): no peer can make this one knock at doors of
its own network after the next start.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from echo_swarm.checkpoint.files import read_file, write_atomically
from echo_swarm.checkpoint.reach import Reach, near_enough
from echo_swarm.errors import UsageError
from echo_swarm.identity import public_key_of

MAX_KNOWN = 32
MAX_PER_PEER = 4
_MAX_CHARACTERS = 512
_MAX_BYTES = 64 << 10


def read_known(path: Path) -> tuple[str, ...]:
    """Return the addresses kept at `path`; none when it is missing or damaged."""
    raw = read_file(path, _MAX_BYTES)
    try:
        values: Any = [] if raw is None else json.loads(raw)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(values, list):
        return ()
    return tuple(value for value in values[:MAX_KNOWN] if isinstance(value, str) and _peer_in(value))  # pyright: ignore[reportUnknownVariableType]


def remember(path: Path, met: Iterable[Sequence[str]], own: Sequence[str], near: Reach) -> None:
    """Put peers' addresses in front of those kept at `path`, MAX_KNOWN in all. Raises LocalFault.

    Args:
        path: the file.
        met: the addresses of each peer.
        own: our own addresses, which are left out.
        near: how near an address may be.

    """
    ours = {_peer_in(address) for address in own}
    kept: dict[str, None] = {}
    for addresses in met:
        fitting = [a for a in near_enough(addresses, near) if _peer_in(a) and _peer_in(a) not in ours]
        kept |= dict.fromkeys(fitting[:MAX_PER_PEER])
    before = read_known(path)
    known = tuple(dict.fromkeys([*kept, *before]))[:MAX_KNOWN]
    if known != before:
        write_atomically(path, json.dumps(known, indent=1).encode())


def _peer_in(address: str) -> str:
    """Return the peer id at the end of an address; empty when it is none that can be dialled."""
    peer = address.rpartition("/p2p/")[2]
    try:
        public_key_of(peer)
    except UsageError:
        return ""
    return peer if len(address) <= _MAX_CHARACTERS and address.isascii() and address.isprintable() else ""
