"""What a download knows of one source that it is talking to."""

import anyio

from echo_swarm.checkpoint.blob import BlobClient
from echo_swarm.errors import EchoError


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

    def end(self, fault: EchoError) -> None:
        """Stop talking, for this reason."""
        self.fault = self.fault or fault
        self.scope.cancel()
