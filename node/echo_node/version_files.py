"""From a trusted manifest to files on this disk that a backend can load.

    whole model      artifact ───────────────► PolicyFiles(artifact)
    adapter          base of version 0, once ─► adapter ─► PolicyFiles(artifact=adapter, base=...)

The base stays in the store: `VersionStore` deletes no model that an adapter here applies to.
"""

from collections.abc import Sequence
from pathlib import Path

import anyio
from anyio import to_thread

from echo_node.activity import Activity
from echo_node.backends.base import PolicyFiles
from echo_node.mirrors import SourceNews
from echo_node.peers import Peers
from echo_node.swaps import Swaps
from echo_node.transfer_view import TransferView
from echo_node.wanted import Wanted
from echo_swarm.checkpoint.adapter_file import read_adapter
from echo_swarm.checkpoint.delta.obtain import ByDelta
from echo_swarm.checkpoint.delta.route import ManifestOf
from echo_swarm.checkpoint.fetch import Fetcher, Progress
from echo_swarm.checkpoint.fetch_report import FetchReport, SourcesExhausted
from echo_swarm.checkpoint.gguf_file import check_gguf, check_gguf_adapter
from echo_swarm.checkpoint.safetensors_file import check_layout
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.envelope import Signed
from echo_swarm.errors import EchoError, MalformedMessage
from echo_swarm.identity import PeerId
from echo_swarm.manifest import BASE_VERSION, Artifact, ArtifactKind, CheckpointManifest, RunManifest
from echo_swarm.words import size


class NotUsable(EchoError):
    """This node's backend can never use this version: a version does not change."""


class VersionFiles:
    """Fetches and checks. What is there already is not fetched again."""

    def __init__(
        self,
        *,
        fetcher: Fetcher,
        store: VersionStore,
        peers: Peers,
        activity: Activity,
        swaps: Swaps,
        transfers: TransferView,
        wanted: Wanted,
    ) -> None:
        self._fetcher = fetcher
        self._store = store
        self._peers = peers
        self._activity = activity
        self._news = SourceNews(activity)
        self._swaps = swaps
        self._transfers = transfers
        self._wanted = wanted

    async def obtain(
        self, signed: Signed[CheckpointManifest], run: RunManifest, manifest_of: ManifestOf
    ) -> PolicyFiles:
        """Return a version's files once they are whole, verified and checked.

        Raises:
            NotUsable: there are none for this backend, or they are not handed to it; says why.
            PeerFault, Unavailable, LocalFault: not now; what was fetched stays.

        """
        artifact = self._wanted.choose(signed.message)
        self._swaps.fetching(signed.message.policy_version)
        if artifact is None:
            raise NotUsable(self._wanted.lacking(signed.message))
        base: tuple[Path, bytes] | None = None
        if artifact.base_digest is not None:
            base = await self._base(signed, artifact, manifest_of)
        version = signed.message.policy_version
        path = await self._file(signed, artifact, f"version {version}", version, manifest_of)
        self._swaps.usable(version)
        return PolicyFiles(
            policy_version=version,
            artifact=path,
            artifact_digest=artifact.digest,
            base=base[0] if base else None,
            base_digest=base[1] if base else b"",
            model_config_json=run.model_config_json,
            end_token_ids=run.end_token_ids,
            vocabulary_size=run.vocabulary_size,
            max_prompt_tokens=run.max_prompt_tokens,
            max_completion_tokens=run.max_completion_tokens,
        )

    async def _base(
        self, signed: Signed[CheckpointManifest], adapter: Artifact, manifest_of: ManifestOf
    ) -> tuple[Path, bytes]:
        """Return path and digest of the model that an adapter applies to."""
        is_first = signed.message.policy_version == BASE_VERSION
        first = signed if is_first else await manifest_of(BASE_VERSION)
        base = self._wanted.choose_base(first.message, adapter)
        if base is None:
            raise NotUsable(self._wanted.lacking_base(first.message, signed.message))
        version = signed.message.policy_version
        return await self._file(first, base, "the base model", version, manifest_of), base.digest

    async def _file(
        self,
        signed: Signed[CheckpointManifest],
        artifact: Artifact,
        name: str,
        wanted_for: int,
        manifest_of: ManifestOf,
    ) -> Path:
        async def providers() -> Sequence[PeerId]:
            return await self._peers.providers(artifact.digest)

        watch = self._transfers.begin(name)
        by_delta = ByDelta(
            self._fetcher,
            self._store,
            providers_of=self._peers.providers,
            manifest_of=manifest_of,
            progress=self._progress(f"the changes that make {name}"),
            watch=watch,
        )
        try:
            report = await self._fetcher.fetch(
                signed, artifact, providers, progress=self._progress(name), fill=by_delta.fill, watch=watch
            )
        except SourcesExhausted as e:
            # What came is kept, and the next try does not count it.
            self._swaps.fetched(wanted_for, size_bytes=_came_bytes(e.report), verify_s=e.report.verify_s)
            self._news.tell(e.report, name)
            raise
        finally:
            self._transfers.end(watch, artifact.digest)
        if report.delta_fault:
            self._activity.say(f"{name} came whole, not as its changes ({report.delta_fault})")
        self._news.tell(report, name)
        assert report.path is not None
        came_s = anyio.current_time()
        await to_thread.run_sync(_check, report.path, artifact, name)
        verify_s = report.verify_s + anyio.current_time() - came_s
        self._swaps.fetched(wanted_for, size_bytes=_came_bytes(report), verify_s=verify_s)
        return report.path

    def _progress(self, name: str) -> Progress:
        def told(done: int, total: int) -> None:
            self._activity.progress(f"fetching {name}: {done / total:.0%} of {size(total)}")

        return told


def _came_bytes(report: FetchReport) -> int:
    return sum(report.bytes_by_source.values()) + report.delta_bytes


def _check(path: Path, artifact: Artifact, name: str) -> None:
    """Check a file's header before any library sees it. Raises MalformedMessage, NotUsable."""
    if artifact.kind is ArtifactKind.SAFETENSORS:
        check_layout(path, artifact.layout_digest)
        return
    checks = {
        ArtifactKind.GGUF: check_gguf,
        ArtifactKind.LORA: read_adapter,
        ArtifactKind.LORA_GGUF: check_gguf_adapter,
    }
    try:
        checks[artifact.kind](path)
    except MalformedMessage as e:
        # The bytes are the signed ones: nobody has others.
        raise NotUsable(f"the file of {name} is not handed to the backend ({e})") from e
