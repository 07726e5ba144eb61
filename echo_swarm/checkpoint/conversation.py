"""What a download knows of one source that it is talking to."""

import anyio

from echo_swarm.checkpoint.blob import BlobClient
from echo_swarm.errors import EchoError

MAX_BUSY = 20
"""Times in a row that a source may say that it is busy."""
_MAX_BUSY_DOUBLINGS = 4


class Conversation:
    """What is going on with one source."""

    def __init__(self, client: BlobClient) -> None:
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
        self.choosing = False
        """Whether it is being asked to choose."""

    def rest(self, pause_s: float) -> None:
        """Ask a busy source for nothing for a while: longer each time."""
        self.busy_until_s = anyio.current_time() + pause_s * 2 ** min(self.busy, _MAX_BUSY_DOUBLINGS)
        self.busy += 1

    def end(self, fault: EchoError) -> None:
        """Stop talking, for this reason."""
        self.fault = self.fault or fault
        self.scope.cancel()
