"""What a seeder holds of a version: every file of the kinds that it was told to hold, as far as its quota goes.

    adapters of a LoRA run ──► the files of version 0 first: without the base they are worth nothing
    each wanted kind in turn ─► fetch, by its delta where that is cheaper ─► whole, verified

A file that does not fit is left out and named; a version of which nothing fits is not held. Headers are not looked
into: nothing is loaded here, and whoever loads a file looks at it himself.
"""

from collections.abc import Sequence
from pathlib import Path

from echo_node.activity import Activity
from echo_node.backends.base import PolicyFiles
from echo_node.mirrors import SourceNews
from echo_node.peers import Peers
from echo_node.transfer_view import TransferView
from echo_node.version_files import NotUsable
from echo_swarm.checkpoint.delta.obtain import ByDelta
from echo_swarm.checkpoint.delta.route import ManifestOf
from echo_swarm.checkpoint.fetch import Fetcher, Progress
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.envelope import Signed
from echo_swarm.errors import StorageFull
from echo_swarm.identity import PeerId
from echo_swarm.manifest import ADAPTER_KINDS, BASE_VERSION, Artifact, ArtifactKind, CheckpointManifest, RunManifest
from echo_swarm.words import size

ALL_KINDS = (
    ArtifactKind.LORA,
    ArtifactKind.LORA_GGUF,
    ArtifactKind.DELTA,
    ArtifactKind.SAFETENSORS,
    ArtifactKind.GGUF,
)
"""In the order in which they are fetched: what is small and wanted by many first."""


class SeederFiles:
    """Fetches what a seeder is to hold (see `policy_sync.ObtainsFiles`)."""

    def __init__(
        self,
        *,
        fetcher: Fetcher,
        store: VersionStore,
        peers: Peers,
        activity: Activity,
        kinds: Sequence[ArtifactKind],
        transfers: TransferView,
    ) -> None:
        self._fetcher = fetcher
        self._store = store
        self._peers = peers
        self._activity = activity
        self._transfers = transfers
        self._news = SourceNews(activity)
        self._kinds = tuple(kind for kind in ALL_KINDS if kind in kinds)
        self._told: set[tuple[str, str]] = set()
        """Kind and precision of files that were left out: told once, not with each version."""

    async def obtain(
        self, signed: Signed[CheckpointManifest], run: RunManifest, manifest_of: ManifestOf
    ) -> PolicyFiles:
        """Return once everything of a version that is wanted and fits is here.

        Raises:
            StorageFull: nothing of it fits.
            NotUsable: it has no file of these kinds.
            PeerFault, Unavailable, LocalFault: not now; what was fetched stays.

        """
        version = signed.message.policy_version
        if version != BASE_VERSION and any(a.kind in ADAPTER_KINDS for a in signed.message.artifacts):
            await self._hold(await manifest_of(BASE_VERSION), manifest_of)
        artifact, path = await self._hold(signed, manifest_of)
        return PolicyFiles(
            policy_version=version,
            artifact=path,
            artifact_digest=artifact.digest,
            model_config_json=run.model_config_json,
            end_token_ids=run.end_token_ids,
            vocabulary_size=run.vocabulary_size,
            max_prompt_tokens=run.max_prompt_tokens,
            max_completion_tokens=run.max_completion_tokens,
        )

    async def _hold(self, signed: Signed[CheckpointManifest], manifest_of: ManifestOf) -> tuple[Artifact, Path]:
        """Fetch a version's files; return the last one that fitted."""
        held: tuple[Artifact, Path] | None = None
        full: StorageFull | None = None
        for artifact in self._wanted(signed.message):
            try:
                held = artifact, await self._file(signed, artifact, manifest_of)
            except StorageFull as e:
                full = e
                self._leave_out(artifact, e)
        if held is None:
            kinds = ", ".join(kind.value for kind in self._kinds)
            raise full or NotUsable(f"version {signed.message.policy_version} has no file of the kinds {kinds}")
        return held

    def _wanted(self, manifest: CheckpointManifest) -> list[Artifact]:
        wanted = [artifact for artifact in manifest.artifacts if artifact.kind in self._kinds]
        return sorted(wanted, key=lambda artifact: self._kinds.index(artifact.kind))

    async def _file(self, signed: Signed[CheckpointManifest], artifact: Artifact, manifest_of: ManifestOf) -> Path:
        async def providers() -> Sequence[PeerId]:
            return await self._peers.providers(artifact.digest)

        name = f"{artifact.file_name} of version {signed.message.policy_version}"
        watch = self._transfers.begin(name)
        by_delta = ByDelta(
            self._fetcher,
            self._store,
            providers_of=self._peers.providers,
            manifest_of=manifest_of,
            progress=self._progress(f"the changes that make {name}"),
            watch=watch,
        )
        fill = None if artifact.kind is ArtifactKind.DELTA else by_delta.fill
        try:
            report = await self._fetcher.fetch(
                signed, artifact, providers, progress=self._progress(name), fill=fill, watch=watch
            )
        finally:
            self._transfers.end(watch, artifact.digest)
        self._news.tell(report, name)
        assert report.path is not None
        return report.path

    def _leave_out(self, artifact: Artifact, cause: StorageFull) -> None:
        key = (artifact.kind.value, artifact.precision)
        if key not in self._told:
            self._told.add(key)
            self._activity.say(f"{artifact.kind.value} {artifact.precision} is left out ({cause})")

    def _progress(self, name: str) -> Progress:
        def told(done: int, total: int) -> None:
            self._activity.progress(f"fetching {name}: {done / total:.0%} of {size(total)}")

        return told
