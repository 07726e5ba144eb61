"""Which of a version's files a backend wants."""

from dataclasses import dataclass

from echo_swarm.manifest import Artifact, ArtifactKind, CheckpointManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a backend can load."""

    kind: ArtifactKind = ArtifactKind.SAFETENSORS
    precisions: tuple[str, ...] = ()
    """The ones it accepts, best first; empty: whatever there is."""

    def choose(self, manifest: CheckpointManifest) -> Artifact | None:
        """Return the best of a version's artifacts, or None when none will do."""
        for precision in self.precisions or (None,):
            artifact = manifest.artifact(self.kind, precision)
            if artifact is not None:
                return artifact
        return None

    def lacking(self, manifest: CheckpointManifest) -> str:
        """Return in words why `choose` found none."""
        there = ", ".join(f"{artifact.kind.value} {artifact.precision}" for artifact in manifest.artifacts)
        needed = f"{self.kind.value} {' or '.join(self.precisions)}".strip()
        return f"version {manifest.policy_version} has no {needed} file, only {there}"
