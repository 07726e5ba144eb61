"""Conversion of a version's weights, in a child process: one for each version, gone when it is done.

    publish ─► convert ─► child: read weights, write GGUF ─► frames ─► files to publish, and what failed and why

A failure is a value: the version is published without that file, and peers that need it stay on an older one.
"""

import importlib.util
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from echo_coordinator.publisher.gguf.shape import NotConvertible, read_shape
from echo_coordinator.publisher.publish import WeightsFile
from echo_swarm.checkpoint.files import explained
from echo_swarm.children import start_child
from echo_swarm.errors import BackendFailed, LocalFault, UsageError
from echo_swarm.manifest import ArtifactKind

log = logging.getLogger(__name__)

DEADLINE_S = 3600.0
"""For one file. SmolLM2-135M takes 2 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What became of one version's weights."""

    files: tuple[WeightsFile, ...]
    failures: tuple[str, ...]
    """One sentence each, such as `gguf q8_0: tensor 'x' holds numbers that are not finite`."""


class GgufConverter:
    """Writes the GGUF files that a run's settings ask for.

    Args:
        precisions: of `manifest.GGUF_PRECISIONS`, each once; empty: `convert` has nothing to do.
        config: the model's config.json.
        folder: for files under way; made and removed as needed.
        log_path: for what the child prints.

    """

    def __init__(self, *, precisions: Sequence[str], config: Path, folder: Path, log_path: Path) -> None:
        self.precisions = tuple(precisions)
        self.config = config
        self.folder = folder
        self._log_path = log_path

    def check(self) -> None:
        """Find out at the start what could never work.

        Raises:
            UsageError: the model cannot be written as GGUF, or the package is missing; says what to change.

        """
        if not self.precisions:
            return
        if importlib.util.find_spec("gguf") is None:
            raise UsageError("publish.gguf needs the package gguf; run: pip install gguf, or remove the setting")
        try:
            read_shape(self.config.read_text(encoding="utf-8"))
        except NotConvertible as e:
            raise UsageError(f"publish.gguf cannot be had for this model: {e}; remove the setting") from e

    async def convert(self, weights: Path) -> Converted:
        """Convert a safetensors file. Call `clean` once the files are published."""
        if not self.precisions:
            return Converted(files=(), failures=())
        reasons = dict.fromkeys(self.precisions, "not converted")
        try:
            with explained(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
            await self._run(weights, reasons)
        except LocalFault as e:
            reasons = {precision: reason and str(e) for precision, reason in reasons.items()}
        files = [
            WeightsFile(path=self.folder / f"{precision}.gguf", kind=ArtifactKind.GGUF, precision=precision)
            for precision, reason in reasons.items()
            if not reason
        ]
        failures = [f"gguf {precision}: {reason}" for precision, reason in reasons.items() if reason]
        return Converted(files=tuple(files), failures=tuple(failures))

    def clean(self) -> None:
        """Remove what `convert` wrote."""
        shutil.rmtree(self.folder, ignore_errors=True)

    async def _run(self, weights: Path, reasons: dict[str, str]) -> None:
        """Fill in `reasons`: empty for what was written. Raises BackendFailed for what is then left."""
        arguments = [str(weights), str(self.config), str(self.folder), *self.precisions]
        async with start_child(
            "echo_coordinator.publisher.gguf.child",
            arguments,
            name="the conversion to GGUF",
            log_path=self._log_path,
            grace_s=1.0,
        ) as child:
            for precision in self.precisions:
                frame = await child.receive(timeout_s=DEADLINE_S)
                if frame.get("precision") != precision:
                    raise BackendFailed(f"the conversion to GGUF answered out of turn; see {self._log_path}")
                reasons[precision] = str(frame.get("reason"))
                log.info("gguf %s took %.1f s %s", precision, frame.get("seconds", 0.0), reasons[precision])
