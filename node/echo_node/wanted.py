"""Which of a version's files a backend wants."""

from dataclasses import dataclass

from echo_swarm.manifest import Artifact, ArtifactKind, CheckpointManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a backend can load."""

    kind: ArtifactKind = ArtifactKind.SAFETENSORS
    precisions: tuple[str, ...] = ()
    """The ones it accepts, best first; empty: whatever there is."""
    adapter: ArtifactKind | None = None
    """Of adapters that it can load over a model of that kind; None: none."""

    def choose(self, manifest: CheckpointManifest) -> Artifact | None:
        """Return the best of a version's artifacts, an adapter before a whole model, or None when none will do."""
        adapter = manifest.artifact(self.adapter) if self.adapter else None
        return adapter or self._whole(manifest)

    def choose_base(self, manifest: CheckpointManifest, adapter: Artifact) -> Artifact | None:
        """Return the file of BASE_VERSION's manifest that `adapter` is loaded over, or None.

        An adapter names the safetensors file. A GGUF file of the same version is the same model.
        """
        named = next((artifact for artifact in manifest.artifacts if artifact.digest == adapter.base_digest), None)
        if named is None or named.kind is not ArtifactKind.SAFETENSORS:
            return None
        return named if self.kind is ArtifactKind.SAFETENSORS else self._whole(manifest)

    def _whole(self, manifest: CheckpointManifest) -> Artifact | None:
        for precision in self.precisions or (None,):
            artifact = manifest.artifact(self.kind, precision)
            if artifact is not None:
                return artifact
        return None

    def lacking(self, manifest: CheckpointManifest) -> str:
        """Return in words why `choose` found none."""
        there = ", ".join(f"{artifact.kind.value} {artifact.precision}" for artifact in manifest.artifacts)
        return f"version {manifest.policy_version} has no {self._needed} file, only {there}"

    def lacking_base(self, base: CheckpointManifest, manifest: CheckpointManifest) -> str:
        """Return in words why `choose_base` found none."""
        return (
            f"version {manifest.policy_version} is an adapter, and the model it applies to is not among the files of "
            f"version {base.policy_version} as {self._needed}"
        )

    @property
    def _needed(self) -> str:
        return f"{self.kind.value} {' or '.join(self.precisions)}".strip()
