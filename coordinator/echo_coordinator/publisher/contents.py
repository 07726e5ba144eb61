"""Which files make up a version: those it cannot do without, and those for llama.cpp, which may fail.

    all weights trained   model.safetensors                                + GGUF files of it
    LoRA, version 0       base: model.safetensors, adapter.safetensors     + GGUF files of the base, adapter.gguf
    LoRA, later           adapter.safetensors                              + adapter.gguf

The base travels once; later adapters name it by its digest.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import anyio.to_thread

from echo_coordinator.config import PublishSection
from echo_coordinator.publisher.gguf.convert import Converted, GgufConverter
from echo_coordinator.publisher.publish import WeightsFile
from echo_coordinator.run_folder import RunFolder
from echo_swarm.checkpoint.files import explained
from echo_swarm.checkpoint.read_back import file_digest
from echo_swarm.errors import EchoError, LocalFault
from echo_swarm.manifest import BASE_VERSION, ArtifactKind, CheckpointManifest


class Contents(Protocol):
    """What `loops.publishing` asks."""

    async def needed(self, version: int, weights: Path) -> list[WeightsFile]:
        """Return the files without which there is no version. `weights` is what the trainer wrote."""
        ...

    async def converted(self, needed: Sequence[WeightsFile]) -> Converted:
        """Make the files for llama.cpp. Call `clean` once they are published."""
        ...

    def clean(self) -> None:
        """Remove what `converted` made. Blocking."""
        ...

    def lacking(self, manifest: CheckpointManifest) -> list[str]:
        """Return what the settings ask for and a published version does not have."""
        ...


class WholeModel:
    """A run that trains all weights."""

    def __init__(self, *, precision: str, converter: GgufConverter) -> None:
        self._precision = precision
        self._converter = converter

    async def needed(self, version: int, weights: Path) -> list[WeightsFile]:
        """Return the weights."""
        del version
        return [WeightsFile(path=weights, kind=ArtifactKind.SAFETENSORS, precision=self._precision)]

    async def converted(self, needed: Sequence[WeightsFile]) -> Converted:
        """Convert the weights."""
        return await self._converter.convert(needed[0].path)

    def clean(self) -> None:
        """Remove the converted files."""
        self._converter.clean()

    def lacking(self, manifest: CheckpointManifest) -> list[str]:
        """Name the precisions that are missing."""
        return _lacking_gguf(self._converter, manifest)


class AdapterOverBase:
    """A LoRA run.

    Args:
        base: the trainer's base file.
        precision: of the base.
        converter: for the base; says whether there are peers with llama.cpp at all.

    """

    def __init__(self, *, base: Path, precision: str, converter: GgufConverter) -> None:
        self._base = base
        self._precision = precision
        self._converter = converter
        self._base_digest: bytes | None = None

    async def needed(self, version: int, weights: Path) -> list[WeightsFile]:
        """Return the adapter, and with the first version the base. Raises LocalFault when the base is gone."""
        if self._base_digest is None:
            try:
                self._base_digest = await anyio.to_thread.run_sync(file_digest, self._base)
            except OSError as e:
                raise LocalFault(f"cannot read {self._base}: {e.strerror}") from e
        adapter = WeightsFile(path=weights, kind=ArtifactKind.LORA, precision="float32", base_digest=self._base_digest)
        if version != BASE_VERSION:
            return [adapter]
        return [WeightsFile(path=self._base, kind=ArtifactKind.SAFETENSORS, precision=self._precision), adapter]

    async def converted(self, needed: Sequence[WeightsFile]) -> Converted:
        """Convert the adapter, and the base where it is among the files."""
        if not self._converter.precisions:
            return Converted(files=(), failures=())
        files: list[WeightsFile] = []
        failures: list[str] = []
        for file in needed:
            if file.kind is ArtifactKind.SAFETENSORS:
                base = await self._converter.convert(file.path)
                files += base.files
                failures += base.failures
            else:
                try:
                    files.append(await anyio.to_thread.run_sync(self._convert_adapter, file))
                except (EchoError, OSError) as e:
                    failures.append(f"lora-gguf: {e}")
        return Converted(files=tuple(files), failures=tuple(failures))

    def clean(self) -> None:
        """Remove the converted files."""
        self._converter.clean()

    def lacking(self, manifest: CheckpointManifest) -> list[str]:
        """Name the precisions of the base that are missing in the first version, or the adapter's file."""
        missing = _lacking_gguf(self._converter, manifest) if manifest.policy_version == BASE_VERSION else []
        asked_for = self._converter.precisions and manifest.artifact(ArtifactKind.LORA_GGUF) is None
        return [*missing, ArtifactKind.LORA_GGUF.value] if asked_for else missing

    def _convert_adapter(self, file: WeightsFile) -> WeightsFile:
        from echo_coordinator.publisher.gguf.adapter import write_adapter

        folder = self._converter.folder
        with explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
        target = folder / ArtifactKind.LORA_GGUF.file_name
        write_adapter(file.path, self._converter.config.read_text(encoding="utf-8"), target)
        return WeightsFile(path=target, kind=ArtifactKind.LORA_GGUF, precision="f32", base_digest=file.base_digest)


def contents_of(folder: RunFolder, publish: PublishSection, *, lora: bool) -> Contents:
    """Return what the settings ask for. Raises UsageError when the model cannot be written as GGUF."""
    converter = GgufConverter(
        precisions=publish.gguf,
        config=folder.model / "config.json",
        folder=folder.root / "gguf",
        log_path=folder.logs / "gguf.log",
    )
    converter.check()
    if lora:
        return AdapterOverBase(base=folder.base, precision=publish.precision, converter=converter)
    return WholeModel(precision=publish.precision, converter=converter)


def _lacking_gguf(converter: GgufConverter, manifest: CheckpointManifest) -> list[str]:
    there = {artifact.precision for artifact in manifest.artifacts if artifact.kind is ArtifactKind.GGUF}
    return [f"gguf {precision}" for precision in converter.precisions if precision not in there]
