"""From a trained checkpoint to a version that nodes can fetch: convert, publish, note in the database, announce."""

import logging
from pathlib import Path

import anyio
import anyio.to_thread

from echo_coordinator.epochs import Fence
from echo_coordinator.publisher import Published, Publisher, WeightsFile, head_record
from echo_coordinator.publisher.contents import Contents
from echo_coordinator.state.counters import WORK
from echo_coordinator.state.run_state import RunState
from echo_swarm.clock import Clock
from echo_swarm.directory.announce import keep_announced
from echo_swarm.directory.base import Directory, head_topic, peers_topic
from echo_swarm.envelope import seal
from echo_swarm.errors import StorageFull
from echo_swarm.identity import Identity
from echo_swarm.manifest import ArtifactKind
from echo_swarm.records import PeerRecord
from echo_swarm.transport.base import Host
from echo_swarm.work import Role

log = logging.getLogger(__name__)

ANNOUNCE_EVERY_S = 60.0


class Publishing:
    """The newest version, and telling everybody about it."""

    def __init__(
        self,
        *,
        state: RunState,
        publisher: Publisher,
        identity: Identity,
        clock: Clock,
        contents: Contents,
        fence: Fence | None = None,
    ) -> None:
        self._state = state
        self._publisher = publisher
        self._identity = identity
        self._clock = clock
        self._contents = contents
        self._fence = fence
        self._missed: tuple[int, list[str]] = (-1, [])
        """A version, and what it was published without, with the reason."""
        self._changed = anyio.Event()
        for kept in publisher.kept():
            state.core.transfers.published(kept.message, None)

    @property
    def head(self) -> Published | None:
        """The newest published version."""
        return self._publisher.head

    @property
    def warnings(self) -> list[str]:
        """What the newest version lacks of what the settings ask for; why, as far as this process knows."""
        head = self.head
        if head is None:
            return []
        version, missed = self._missed
        if version != head.message.policy_version:
            missed = self._contents.lacking(head.message)
        return [f"version {head.message.policy_version} is published without {what}" for what in missed]

    def weights_path(self, version: int) -> Path | None:
        """Return the published weights that nodes load at a version (an adapter in a LoRA run), if they are kept."""
        return self._publisher.weights_path(version)

    async def publish(self, version: int, weights: Path) -> Published:
        """Make a version fetchable. Made again with the same weights after a crash, it changes nothing."""
        needed = await self._contents.needed(version, weights)
        existed = self._publisher.exists(version)
        if existed:
            published = await self._publish(version, needed)
        else:
            published = await self._publish_all(version, needed)
        digests = [a.digest for a in published.message.artifacts if a.kind is not ArtifactKind.DELTA]
        core = self._state.core
        # Before anybody is told of it.
        core.transfers.published(
            published.message, None if existed else core.clock.monotonic_s(), core.roster.live_peers()
        )
        await self._state.updates.publish(version, digests)
        event, self._changed = self._changed, anyio.Event()
        event.set()
        return published

    async def _publish(self, version: int, files: list[WeightsFile]) -> Published:
        # A version that is still being evaluated stays fetchable, however far behind it is.
        return await self._publisher.publish(version, files, in_use=self._state.evaluations.under_way())

    async def _publish_all(self, version: int, needed: list[WeightsFile]) -> Published:
        """Publish with what can be had for llama.cpp; whatever fails there, the version itself goes out."""
        converted = await self._contents.converted(needed)
        failures = list(converted.failures)
        try:
            try:
                published = await self._publish(version, [*needed, *converted.files])
            except StorageFull as e:
                if not converted.files:
                    raise
                failures = [f"gguf: {e}"]
                published = await self._publish(version, needed)
        finally:
            await anyio.to_thread.run_sync(self._contents.clean)
        self._missed = version, failures
        for warning in self.warnings:
            log.error("%s", warning)
            self._state.core.counters.add(WORK, "failed_conversions")
            await self._state.core.record_event("publish", warning)
        return published

    async def announce(self, host: Host, directory: Directory, run_id: str) -> None:
        """Keep the head record and our own peer record in the directory, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._announce_head, directory, run_id)
            tasks.start_soon(self._announce_self, host, directory, run_id)

    def _epoch(self) -> bytes | None:
        """Return what records are signed under. Raises TakenOver once they may not be."""
        if self._fence is None:
            return None
        self._fence.require()
        return self._fence.raw

    async def _announce_head(self, directory: Directory, run_id: str) -> None:
        while self.head is None:
            await self._changed.wait()

        def record() -> bytes:
            assert self.head is not None
            epoch = self._epoch()
            return seal(self._identity, head_record(self.head, issued_at=self._clock.wall_s(), epoch=epoch))

        await keep_announced(
            directory, head_topic(run_id), record, every_s=ANNOUNCE_EVERY_S, changed=lambda: self._changed
        )

    async def _announce_self(self, host: Host, directory: Directory, run_id: str) -> None:
        def record() -> bytes:
            head = self.head
            return seal(
                self._identity,
                PeerRecord(
                    run_id=run_id,
                    role=Role.COORDINATOR,
                    addresses=host.addresses[:16],
                    held_version=head.message.policy_version if head else None,
                    artifact_digests=tuple(a.digest for a in head.message.artifacts) if head else (),
                    issued_at=self._clock.wall_s(),
                    epoch=self._epoch(),
                ),
            )

        await keep_announced(
            directory, peers_topic(run_id), record, every_s=ANNOUNCE_EVERY_S, changed=lambda: self._changed
        )
