"""What a download knows of one source that it is talking to."""

from collections.abc import Awaitable, Iterable
from typing import TypeVar

import anyio

from echo_swarm.checkpoint.blob import BlobClient
from echo_swarm.checkpoint.fetch_report import FetchReport, Grudges
from echo_swarm.checkpoint.mirror import MirrorClient
from echo_swarm.checkpoint.mirror_http import MirrorFault, MirrorGone
from echo_swarm.checkpoint.partial import WrongPiece
from echo_swarm.errors import EchoError, MalformedMessage, PeerFault, PeerUnreachable, RemoteError, Unanswered
from echo_swarm.identity import PeerId
from echo_swarm.transfers import FaultReason

SILENT_S = 3.0
"""A peer that leaves a question open for so long, answering nothing else, is named when the fetch ends."""

Answer = TypeVar("Answer")

MAX_BUSY = 20
"""Times in a row that a source may say that it is busy."""
_MAX_BUSY_DOUBLINGS = 4


class BrokenPromise(MalformedMessage):
    """A source says that it has pieces which it then does not give."""


class MadeRoom(PeerUnreachable):
    """A source that gave nothing lately was left for another: no fault."""


class Conversation:
    """What is going on with one source."""

    def __init__(self, client: BlobClient | MirrorClient) -> None:
        self.client = client
        self.peer = client.peer
        self.scope = anyio.CancelScope()
        self.fault: EchoError | None = None
        self.strikes = 0
        self.busy = 0
        self.busy_until_s = 0.0
        self.held = 0
        """Pieces that it was last known to have."""
        self.complete = False
        """Whether these are all."""
        self.offers = False
        """Whether it chooses the pieces that we ask it for."""
        self.offered: list[int] = []
        """What it chose, not asked for yet."""
        self.asking = 0
        """Questions that are not answered yet, other than those for news."""
        self.quiet_since_s = anyio.current_time()
        """When it last answered one, or began."""
        self.choosing = False
        """Whether it is being asked to choose."""

    def rest(self, pause_s: float) -> None:
        """Ask a busy source for nothing for a while: longer each time."""
        self.busy_until_s = anyio.current_time() + pause_s * 2 ** min(self.busy, _MAX_BUSY_DOUBLINGS)
        self.busy += 1

    async def answer(self, question: Awaitable[Answer]) -> Answer:
        """Await what it answers."""
        if not self.asking:
            self.quiet_since_s = anyio.current_time()
        self.asking += 1
        try:
            answer = await question
            self.heard()
            return answer
        finally:
            self.asking -= 1

    def heard(self) -> None:
        """Note that something came."""
        self.quiet_since_s = anyio.current_time()

    @property
    def silence(self) -> str:
        """Say that it leaves a question open for long, or nothing."""
        quiet_s = anyio.current_time() - self.quiet_since_s
        return f"gave no answer for {quiet_s:.0f} s" if self.asking and quiet_s >= SILENT_S else ""

    def end(self, fault: EchoError) -> None:
        """Stop talking, for this reason."""
        self.fault = self.fault or fault
        self.scope.cancel()


def note_silent(
    talks: Iterable[Conversation], report: FetchReport, grudges: Grudges, coordinator: PeerId | None
) -> None:
    """Name the sources that left questions open at the end; those that gave nothing are avoided for a while."""
    for talk in talks:
        if reason := talk.silence:
            report.failures[talk.peer] = reason
            report.blame(talk.peer, FaultReason.SILENT)
            if talk.peer != coordinator and talk.peer not in report.bytes_by_source:
                grudges.add(talk.peer, reason, anyio.current_time(), lied=False)


def fault_reason(error: EchoError, *, met: bool) -> FaultReason | None:
    """Return what kind of fault ended an exchange; None for none that a source is to be named for.

    Args:
        error: what ended it.
        met: whether the source had said before that it has pieces.

    """
    match error:
        case WrongPiece():
            return FaultReason.WRONG_BYTES
        case BrokenPromise():
            return FaultReason.BROKEN_PROMISE
        case MadeRoom() | RemoteError():
            return None  # An error is an answer.
        case PeerFault():
            return FaultReason.MALFORMED
        case MirrorFault() if error.again:
            return None  # It was named when it did it.
        case Unanswered():
            return FaultReason.SILENT
        case MirrorFault() if not (met and isinstance(error, MirrorGone)):
            return None if error.of_file else FaultReason.BAD_SERVER
        case PeerUnreachable() if met:
            return FaultReason.HUNG_UP
        case _:
            return None
