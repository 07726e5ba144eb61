"""Fetching an artifact from several peers at once.

    fetch ─► add manifest ─► whole already? ─► open the download ─► copy equal pieces ─► deltas ─► Download ─► finish
                             (hash, return)    (room? resume)       from old versions    (`fill`)  (peers)     (rename)

Nothing is written that was not verified, a kill at any point loses at most the pieces in flight, and a cancelled call
can simply be made again (or for a newer version: equal pieces are copied).
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import anyio
import anyio.to_thread

from echo_swarm.checkpoint.download import Download
from echo_swarm.checkpoint.fetch_report import FetchReport, FetchSettings, Grudges, Origin, SourcesExhausted
from echo_swarm.checkpoint.interest import InterestBook
from echo_swarm.checkpoint.mirror import Mirrors
from echo_swarm.checkpoint.partial import PartialArtifact, WrongPiece
from echo_swarm.checkpoint.pieces import LocalPiece
from echo_swarm.checkpoint.rate import RateLimit
from echo_swarm.checkpoint.reach import is_mirror
from echo_swarm.checkpoint.sources import Providers
from echo_swarm.checkpoint.store import VersionStore, read_range
from echo_swarm.checkpoint.watch import FetchWatch, Stage
from echo_swarm.envelope import Signed
from echo_swarm.errors import EchoError, LocalFault
from echo_swarm.identity import PeerId
from echo_swarm.manifest import Artifact, CheckpointManifest
from echo_swarm.transport.base import Host

__all__ = ["FetchReport", "FetchSettings", "Fetcher", "Fill", "Progress", "Providers", "SourcesExhausted"]

Progress = Callable[[int, int], None]
"""Called with verified bytes and total bytes after each piece."""
Fill = Callable[[Signed[CheckpointManifest], PartialArtifact, FetchReport], Awaitable[None]]
"""Writes pieces that can be had in another way than from peers; raises what ends the fetch."""

_TELLING_BYTES = 1 << 20
"""Fewer say nothing about how fast bytes come."""
_READ_AHEAD_S = 0.1
"""Between two looks at what has come, if the last one found something; longer and longer if not."""
_MOST_READ_AHEAD_S = 0.8
_MAX_ROUNDS = 3
"""Downloads of one call after which a disk that returns other bytes than were written is called broken."""


@dataclass(frozen=True, slots=True)
class _Wishes:
    """What one call of `Fetcher.fetch` asked for."""

    sources: Providers
    progress: Progress | None
    fill: Fill | None
    settings: FetchSettings
    watch: FetchWatch


class Fetcher:
    """Fetches artifacts into a store. Several calls may run at once; two for the same artifact take turns.

    Args:
        host: opens the streams.
        store: where pieces go.
        coordinator: the source whose uplink is spared; asked at once where `sources` takes time to find others.
        settings: limits and deadlines.
        seed: of the order of pieces; None for a random one.
        interest: who asked this peer's `BlobServer`, and so may be asked in turn.

    """

    def __init__(
        self,
        host: Host,
        store: VersionStore,
        *,
        coordinator: PeerId | None = None,
        settings: FetchSettings | None = None,
        seed: int | None = None,
        interest: InterestBook | None = None,
    ) -> None:
        self.settings = settings or FetchSettings()
        self.grudges = Grudges()
        """Peers that lied, avoided for a while."""
        self.bytes_by_source: dict[PeerId, int] = {}
        """Verified piece bytes since the start, all artifacts."""
        self.bytes_per_s: float | None = None
        """How fast the last artifact of some size came, all told."""
        self.mirrors: Mirrors | None = None
        """Asked beside peers."""
        self._host = host
        self._store = store
        self._coordinator = coordinator
        self._random = Random(seed)
        self._interest = interest or InterestBook()
        self._rate = RateLimit(self.settings.max_bytes_per_s)
        self._turns: dict[bytes, anyio.Lock] = {}

    def follow(self, coordinator: PeerId) -> None:
        """Spare another one's uplink from now on: the run's key was succeeded. What came from the two counts as one."""
        before, self._coordinator = self._coordinator, coordinator
        if before is not None and before != coordinator and before in self.bytes_by_source:
            moved = self.bytes_by_source.pop(before)
            self.bytes_by_source[coordinator] = self.bytes_by_source.get(coordinator, 0) + moved

    def bytes_from(self, origin: Origin) -> int:
        """Return the verified piece bytes that came from one kind of source."""
        return sum(size for peer, size in self.bytes_by_source.items() if Origin.of(peer, self._coordinator) is origin)

    async def fetch(
        self,
        signed: Signed[CheckpointManifest],
        artifact: Artifact,
        sources: Providers,
        *,
        progress: Progress | None = None,
        fill: Fill | None = None,
        starve_s: float | None = None,
        watch: FetchWatch | None = None,
    ) -> FetchReport:
        """Return once the artifact is whole, verified and has its final name (`FetchReport.path`).

        Args:
            signed: a trusted manifest (from `TrustedHead`).
            artifact: one of its artifacts.
            sources: peers to ask; or an async callable that returns the peers known now, asked again and again.
            progress: told after each piece.
            fill: asked for what is missing before peers are.
            starve_s: in place of the settings', see there.
            watch: kept up to date, for whoever shows how far it is.

        Raises:
            SourcesExhausted: nobody is left to ask; names each and why. What is verified stays; call again later.
            StorageFull: no room, before the first byte or half-way.
            LocalFault: this disk cannot do it (now).
            MalformedMessage: the manifest contradicts itself.

        """
        if artifact not in signed.message.artifacts:
            raise ValueError("the artifact is none of the manifest's")
        turn = self._turns.setdefault(artifact.digest, anyio.Lock())
        try:
            async with turn:
                settings = self.settings if starve_s is None else replace(self.settings, starve_s=starve_s)
                return await self._fetch(
                    signed, artifact, _Wishes(sources, progress, fill, settings, watch or FetchWatch())
                )
        finally:
            if turn.statistics().tasks_waiting == 0 and not turn.locked():
                self._turns.pop(artifact.digest, None)

    async def _fetch(
        self,
        signed: Signed[CheckpointManifest],
        artifact: Artifact,
        wishes: "_Wishes",
    ) -> FetchReport:
        version, watch = signed.message.policy_version, wishes.watch
        started_s = anyio.current_time()
        report = FetchReport(policy_version=version, size_bytes=artifact.size_bytes)
        watch.report = watch.report or report  # A delta's own fetch has the watch of the file that it is for.
        await anyio.to_thread.run_sync(self._store.add, signed)
        watch.enter(Stage.CHECKING, artifact.size_bytes)
        kind, precision = artifact.kind, artifact.precision
        path = await anyio.to_thread.run_sync(self._store.verify, version, kind, precision, watch.advance)
        report.verify_s = anyio.current_time() - started_s
        try:
            report.path = await self._download(signed, artifact, wishes, report) if path is None else path
        finally:
            report.seconds = anyio.current_time() - started_s
        came = sum(report.bytes_by_source.values())
        if came >= _TELLING_BYTES:
            self.bytes_per_s = came / max(report.seconds, 1e-3)
        return report

    async def _download(
        self,
        signed: Signed[CheckpointManifest],
        artifact: Artifact,
        wishes: "_Wishes",
        report: FetchReport,
    ) -> Path:
        version, watch = signed.message.policy_version, wishes.watch
        partial = await anyio.to_thread.run_sync(self._store.open_partial, version, artifact, watch.advance)
        try:
            report.resumed_bytes = partial.done_bytes
            await self._copy_local(partial, report)
            if wishes.fill is not None and not partial.have.complete:
                async with _read_ahead(partial):
                    await wishes.fill(signed, partial, report)
            watch.resumed_bytes, watch.sources = report.resumed_bytes, 0
            for _ in range(_MAX_ROUNDS):
                watch.enter(Stage.FETCHING, artifact.size_bytes, partial.done_bytes)
                download = Download(
                    host=self._host,
                    partial=partial,
                    sources=wishes.sources,
                    coordinator=self._coordinator,
                    settings=wishes.settings,
                    grudges=self.grudges,
                    random=Random(self._random.random()),
                    report=report,
                    interest=self._interest,
                    rate=self._rate,
                    mirrors=self.mirrors,
                    on_piece=lambda peer, size: self._count(partial, peer, size, report, wishes),
                )
                async with _read_ahead(partial):
                    await download.run()
                came_s = anyio.current_time()
                watch.enter(Stage.VERIFYING, artifact.size_bytes)
                path = await anyio.to_thread.run_sync(self._store.finish_partial, partial, watch.advance)
                report.verify_s += anyio.current_time() - came_s
                if path is not None:
                    return path
            raise LocalFault(f"{partial.part_path} reads back other bytes than were written; check the disk")
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._store.close_partial, partial)

    async def _copy_local(self, partial: PartialArtifact, report: FetchReport) -> None:
        pieces = await anyio.to_thread.run_sync(self._store.local_pieces, partial.artifact, partial.have)
        for piece in pieces:
            # One piece a thread call: a cancelled fetch ends between two of them.
            report.copied_bytes += await anyio.to_thread.run_sync(_copy_piece, partial, piece)

    def _count(
        self, partial: PartialArtifact, peer: PeerId, size_bytes: int, report: FetchReport, wishes: _Wishes
    ) -> None:
        self.bytes_by_source[peer] = self.bytes_by_source.get(peer, 0) + size_bytes
        self._interest.grew(partial.artifact.digest)
        wishes.watch.sources = len(report.bytes_by_source)
        wishes.watch.mirrors = sum(map(is_mirror, report.bytes_by_source))
        wishes.watch.advance(partial.done_bytes)
        if wishes.progress is not None:
            wishes.progress(partial.done_bytes, partial.artifact.size_bytes)


@asynccontextmanager
async def _read_ahead(partial: PartialArtifact) -> AsyncGenerator[None]:
    """Read back what came while the rest is coming. What the block raises comes out as it is."""
    fault: EchoError | None = None

    async def follow() -> None:
        # What the disk cannot do is kept: the next write, or `finish`, raises it.
        with suppress(LocalFault):
            pause_s = _READ_AHEAD_S
            while True:
                await anyio.sleep(pause_s)
                pause_s = min(_MOST_READ_AHEAD_S, 2 * pause_s)
                if partial.lags:
                    pause_s = _READ_AHEAD_S
                    await anyio.to_thread.run_sync(partial.read_ahead)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        try:
            yield
        except EchoError as e:
            fault = e
        tasks.cancel_scope.cancel()
    if fault is not None:
        raise fault


def _copy_piece(partial: PartialArtifact, piece: LocalPiece) -> int:
    wanted = [index for index in piece.wanted if index not in partial.have]
    data = read_range(piece.path, piece.offset, piece.length) if wanted else None
    if data is None:
        return 0
    try:
        return sum(len(data) for index in wanted if partial.write(index, data))
    except WrongPiece:
        return 0  # A hole of an unfinished file.
