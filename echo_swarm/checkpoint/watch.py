"""How far a fetch is, for somebody who looks at it now and then.

checking ─► (fetching a delta, its check and verification) ─► applying ─► fetching ─► verifying
"""

from dataclasses import dataclass
from enum import StrEnum

from echo_swarm.checkpoint.fetch_report import FetchReport


class Stage(StrEnum):
    """What is being done; each reads through bytes of its own."""

    CHECKING = "checking"
    """Hashing what lies on this disk already."""
    FETCHING = "fetching"
    """From peers, each piece verified as it comes."""
    APPLYING = "applying"
    """Making pieces of an older version and its changes."""
    VERIFYING = "verifying"
    """Flushing the whole file to disk and hashing it."""


@dataclass(slots=True, kw_only=True)
class FetchWatch:
    """The state of one fetch. Written from the event loop and from worker threads, read by whoever shows it.

    Every field is replaced as a whole, so that a reader sees at worst two fields of different moments.
    """

    stage: Stage = Stage.CHECKING
    done_bytes: int = 0
    """Of the stage; of `FETCHING`, verified and on disk."""
    total_bytes: int = 0
    resumed_bytes: int | None = None
    """Verified bytes of an earlier attempt; None while that is not known."""
    sources: int = 0
    """Peers and mirrors that gave pieces of the file that is being fetched."""
    mirrors: int = 0
    """Mirrors among them."""
    change: int = 0
    """Which of the changes since an older version this is about, from 1; 0: the file itself."""
    changes: int = 0
    report: FetchReport | None = None
    """What was done for the file so far; None before it began."""

    def enter(self, stage: Stage, total_bytes: int, done_bytes: int = 0) -> None:
        """Begin a stage."""
        self.done_bytes, self.total_bytes, self.stage = done_bytes, total_bytes, stage

    def advance(self, done_bytes: int) -> None:
        """Tell how far the stage is."""
        self.done_bytes = done_bytes
