"""A directory inside one process, under the same rules as the real one."""

import anyio.lowlevel

from echo_swarm.clock import Clock
from echo_swarm.directory.rules import RecordQuota, Refusal, check_own, clamp_ttl
from echo_swarm.identity import Identity


class DirectoryStore:
    """The records of a whole network."""

    def __init__(self) -> None:
        self.refused: dict[Refusal, int] = {}
        self._records: dict[str, dict[bytes, tuple[bytes, float]]] = {}
        self._quota = RecordQuota()

    def __len__(self) -> int:
        return sum(len(records) for records in self._records.values())

    def put(self, topic: str, signer: bytes, envelope: bytes, *, expires_at: float, now: float) -> bool:
        """Store a record in place of its signer's earlier one. Returns whether it was taken."""
        refusal = self._quota.refusal(topic.encode(), signer, len(envelope), expires_at, now)
        if refusal is not None:
            self.refused[refusal] = self.refused.get(refusal, 0) + 1
            return False
        self._quota.note(topic.encode(), signer, len(envelope), expires_at)
        self._records.setdefault(topic, {})[signer] = (envelope, expires_at)
        return True

    def get(self, topic: str, *, now: float) -> list[bytes]:
        """Return the live records of a topic."""
        records = self._records.get(topic, {})
        for signer in [signer for signer, (_, expires_at) in records.items() if expires_at <= now]:
            del records[signer]
        if not records:
            self._records.pop(topic, None)
        return [envelope for envelope, _ in records.values()]


class MemoryDirectory:
    """One peer's view of a DirectoryStore. Implements `directory.base.Directory`."""

    def __init__(self, store: DirectoryStore, identity: Identity, clock: Clock) -> None:
        self._store = store
        self._identity = identity
        self._clock = clock
        self.reachable = True
        """False: nothing is stored or found, as when every other peer is gone."""

    async def announce(self, topic: str, envelope: bytes, *, ttl_s: float) -> bool:
        """Publish our own record; see the seam. Raises MalformedMessage."""
        await anyio.lowlevel.checkpoint()
        check_own(self._identity, envelope)
        now = self._clock.wall_s()
        expires_at = now + clamp_ttl(ttl_s)
        if not self.reachable:
            return False
        return self._store.put(topic, self._identity.public_key, envelope, expires_at=expires_at, now=now)

    def meet(self, address: str) -> None:
        """Need no way into the network: there is none."""

    async def find(self, topic: str) -> list[bytes]:
        """Return the live records of a topic."""
        await anyio.lowlevel.checkpoint()
        return self._store.get(topic, now=self._clock.wall_s()) if self.reachable else []
