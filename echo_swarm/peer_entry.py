"""One peer as the run's owner sees it: `echo-coordinator peers`. Also which peer a shortened name means."""

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict, Field

from echo_swarm.errors import UsageError
from echo_swarm.identity import PeerId, public_key_of
from echo_swarm.render import short_peer

LEAST_CHARACTERS = 6
"""Of the beginning or the end of a peer id that names a peer."""


class PeerEntry(BaseModel):
    """All that a run knows of one peer. Fields may be added; readers ignore what they do not know."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    peer_id: str
    role: str = ""
    """Empty: it never said hello; it was banned before."""
    backend: str = ""
    precision: str = ""
    standing: str = "new"
    """`new`, `proven`, `probation` (one completion at a time), `suspended` (no work) or `banned` (no answer)."""
    detail: str = ""
    """Why it is banned, else what its last failed audit showed."""
    suspended_s: float = 0.0
    """Until it may have work again, as far as its audits go."""
    banned_at: float | None = None
    """Seconds since 1970; a ban has no end."""
    set_aside: bool = False
    """It gets no work until a probe fits."""
    accepted: int = 0
    rejected: dict[str, int] = Field(default_factory=dict[str, int])
    """By reason code."""
    audits_clean: int = 0
    """In a row."""
    audits_failed: int = 0
    """Ever, until pardoned."""
    in_flight: int = 0
    """Completions leased to it now."""
    limit: int | None = None
    """Most that it may hold while others could take them too. None: no coordinator runs, or it is no sampler."""
    live: bool = False
    last_seen_s: float | None = None
    """Seconds since it was last heard from; while no coordinator runs, since its last hello. None: never."""


def resolve_peer(name: str, known: Iterable[str]) -> PeerId:
    """Return the peer that is meant by a whole peer id (known or not), or by the beginning or end of a known one.

    A short end is no name: whoever makes keys can have one that ends like another peer's.

    Raises:
        UsageError: nobody is meant, or several are, or too little of the id is given.

    """
    wanted = name.strip().removeprefix("…")
    try:
        public_key_of(wanted)
        return PeerId(wanted)
    except UsageError:
        pass  # Not a whole one.
    if len(wanted) < LEAST_CHARACTERS:
        raise UsageError(f"{name!r} is too short for a peer; give {LEAST_CHARACTERS} characters of its id or more")
    found = sorted({peer for peer in known if wanted and (peer.startswith(wanted) or peer.endswith(wanted))})
    if len(found) == 1:
        return PeerId(found[0])
    if not found:
        raise UsageError(f"no peer of this run is called {name!r}; `echo-coordinator peers` lists them")
    alike = len({short_peer(peer) for peer in found[:4]}) < len(found[:4])
    listed = ", ".join(peer if alike else short_peer(peer) for peer in found[:4]) + (", …" if len(found) > 4 else "")
    raise UsageError(f"{name!r} may be any of {len(found)} peers ({listed}); give more of its id")
