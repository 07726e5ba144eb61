"""Filling an artifact from an older version and the deltas since, before anybody is asked for its own pieces.

missing pieces ─► route ─► fetch its deltas ─► verify the base ─► apply ─► what is still missing: from peers
                   └ none, or not cheaper ──────────────────────────────────────▲
                     any fault but this disk's, or its time is over ────────────┘

The deltas have half of the time that the whole file would take: peers that claim to have one and give nothing hold
nobody up for long, however many they are. What came of a delta stays on disk for the next try.
"""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from echo_swarm.checkpoint.delta.route import ManifestOf, Route, Step, find_route
from echo_swarm.checkpoint.fetch import Fetcher, Progress
from echo_swarm.checkpoint.fetch_report import FetchReport, SourcesExhausted
from echo_swarm.checkpoint.partial import PartialArtifact
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.checkpoint.watch import FetchWatch, Stage
from echo_swarm.envelope import Signed
from echo_swarm.errors import LocalFault, PeerFault, StorageFull, Unavailable
from echo_swarm.identity import PeerId
from echo_swarm.manifest import CheckpointManifest

if TYPE_CHECKING:
    from echo_swarm.checkpoint.delta.apply import DeltaChain

STARVE_S = 3.0
"""How long a delta is looked for once nobody who was asked has it. There is another way."""
LEAST_S = 8.0
"""The least time that the deltas have; longer than it takes to find that nobody has them."""
USUAL_BYTES_PER_S = 2 << 20
"""How fast files are taken to come before one came."""

ProvidersOf = Callable[[bytes], Awaitable[Sequence[PeerId]]]
"""Returns the peers that have the artifact with a digest, or part of it."""


class ByDelta:
    """The way of one peer. Pass `fill` to `Fetcher.fetch`.

    Args:
        fetcher: fetches the deltas.
        store: has the bases; keeps the deltas, so that others can be served.
        providers_of: who has an artifact.
        manifest_of: the trusted manifest of a version.
        progress: told of each piece of a delta.
        watch: kept up to date, as by `Fetcher.fetch`.

    """

    def __init__(
        self,
        fetcher: Fetcher,
        store: VersionStore,
        *,
        providers_of: ProvidersOf,
        manifest_of: ManifestOf,
        progress: Progress | None = None,
        watch: FetchWatch | None = None,
    ) -> None:
        self._fetcher = fetcher
        self._store = store
        self._providers_of = providers_of
        self._manifest_of = manifest_of
        self._progress = progress
        self._watch = watch or FetchWatch()

    async def fill(self, signed: Signed[CheckpointManifest], partial: PartialArtifact, report: FetchReport) -> None:
        """Write what can be made of the artifact; `report.delta_fault` says what went wrong, if anything did.

        Raises:
            StorageFull: the disk cannot take the artifact.

        """
        route = await find_route(
            signed,
            partial.artifact,
            budget_bytes=partial.artifact.size_bytes - partial.done_bytes,
            is_whole=lambda artifact: self._store.whole(artifact.digest) is not None,
            manifest_of=self._manifest_of,
        )
        if route is None:
            return
        try:
            await self._fetch_all(route, partial, report)
        except (PeerFault, Unavailable, LocalFault) as e:
            report.delta_fault = str(e)
            return
        finally:
            self._watch.change = 0
        try:
            report.made_bytes += await self._apply(route, partial)
        except StorageFull:
            raise
        except (PeerFault, LocalFault) as e:
            report.delta_fault = str(e)

    async def _fetch_all(self, route: Route, partial: PartialArtifact, report: FetchReport) -> None:
        limit_s = time_for_deltas(
            partial.missing_bytes, self._fetcher.bytes_per_s, self._fetcher.settings.max_bytes_per_s
        )
        with anyio.move_on_after(limit_s) as scope:
            for number, step in enumerate(route.steps, 1):
                self._watch.change, self._watch.changes = number, len(route.steps)
                await self._fetch(step, report, _Extension(scope, limit_s))
        if scope.cancelled_caught:
            raise Unavailable(f"the changes did not come within {limit_s:.0f} s")

    async def _fetch(self, step: Step, report: FetchReport, extension: "_Extension") -> None:
        async def providers() -> Sequence[PeerId]:
            return await self._providers_of(step.delta.digest)

        def told(done: int, total: int) -> None:
            extension.told(done, total)
            if self._progress is not None:
                self._progress(done, total)

        try:
            came = await self._fetcher.fetch(
                step.signed, step.delta, providers, progress=told, starve_s=STARVE_S, watch=self._watch
            )
        except SourcesExhausted as e:
            report.add_delta(e.report)
            raise
        report.add_delta(came)

    async def _apply(self, route: Route, partial: PartialArtifact) -> int:
        watch = self._watch
        watch.enter(Stage.CHECKING, route.base.size_bytes)
        base = await anyio.to_thread.run_sync(self._store.verify_digest, route.base.digest, watch.advance)
        if base is None:
            raise LocalFault(f"version {route.base_version} on this disk is damaged")
        chain = await anyio.to_thread.run_sync(self._chain, base, route, partial)
        watch.enter(Stage.APPLYING, partial.artifact.size_bytes - partial.done_bytes)
        return await chain.run(watch.advance)

    def _chain(self, base: Path, route: Route, partial: PartialArtifact) -> "DeltaChain":
        # Here, since they bring numpy, which no node needs before it has a delta.
        from echo_swarm.checkpoint.delta.apply import DeltaChain
        from echo_swarm.checkpoint.delta.delta_file import DeltaFile

        deltas: list[DeltaFile] = []
        for step in route.steps:
            path = self._store.whole(step.delta.digest)
            if path is None:
                raise LocalFault(f"the delta of version {step.signed.message.policy_version} is gone")
            deltas.append(DeltaFile(path, step.delta))
        return DeltaChain(base, deltas, partial)


class _Extension:
    """Gives a delta of which more than half came as much time again, once."""

    def __init__(self, scope: anyio.CancelScope, limit_s: float) -> None:
        self._scope = scope
        self._left_s = limit_s

    def told(self, done: int, total: int) -> None:
        """Hear of a piece."""
        if 2 * done > total:
            self._scope.deadline += self._left_s
            self._left_s = 0.0


def time_for_deltas(whole_bytes: int, bytes_per_s: float | None, limit_bytes_per_s: float | None) -> float:
    """Return how long deltas are waited for: half of what the missing bytes of the whole file would take.

    Args:
        whole_bytes: missing of the whole file.
        bytes_per_s: how fast one came before; None when none did.
        limit_bytes_per_s: what this peer allows itself; None for no limit.

    """
    rate = min(bytes_per_s or USUAL_BYTES_PER_S, limit_bytes_per_s or float("inf"))
    return max(LEAST_S, whole_bytes / rate / 2)
