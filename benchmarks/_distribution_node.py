"""A node of the distribution benchmark: `echo-node join` with the scripted backend, whose fetches are timed.

`python -m benchmarks._distribution_node STATE_DIR ADDRESS INVITE`. Told `{"do": "star", "on": true}`, it asks
nobody but the coordinator for the versions that follow.
"""

import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks._distribution_lines import Lines, Marks, leave
from echo_node.config import make_config
from echo_node.join import join
from echo_swarm.checkpoint.fetch import Fetcher, FetchReport, FetchSettings, Progress, Providers
from echo_swarm.envelope import Signed
from echo_swarm.errors import EchoError
from echo_swarm.identity import PeerId
from echo_swarm.invite import parse
from echo_swarm.manifest import Artifact, ArtifactKind, CheckpointManifest


def measure_fetches(lines: Lines, coordinator: PeerId, star: threading.Event) -> None:
    """Let every fetch of this process say when it has how much of a version."""
    fetch, usual = Fetcher.fetch, FetchSettings().max_sources

    async def measured(
        self: Fetcher,
        signed: Signed[CheckpointManifest],
        artifact: Artifact,
        sources: Providers,
        *,
        progress: Progress | None = None,
        **how: Any,
    ) -> FetchReport:
        # Of one source it is the first, and so stays alone, whoever else is named to it.
        self.settings = replace(self.settings, max_sources=1 if star.is_set() else usual)
        if star.is_set():
            sources = [coordinator]
        if artifact.kind is not ArtifactKind.SAFETENSORS:
            return await fetch(self, signed, artifact, sources, progress=progress, **how)
        about = {"version": signed.message.policy_version}
        marks = Marks(lines, **about)

        def told(done: int, total: int) -> None:
            marks.reached(done / total)
            if progress is not None:
                progress(done, total)

        lines.say("fetching", **about)
        try:
            report = await fetch(self, signed, artifact, sources, progress=told, **how)
        except EchoError as e:
            lines.say("gave_up", reason=str(e)[:2000], **about)
            raise
        marks.reached(1.0)
        lines.say("whole", **about, **_figures(report, coordinator))
        return report

    # The one place where the node is looked into; the rest of it is as from the command line.
    Fetcher.fetch = measured


def _figures(report: FetchReport, coordinator: PeerId) -> dict[str, Any]:
    by_source = dict(report.bytes_by_source)
    direct = by_source.pop(coordinator, 0)
    return {
        "seconds": report.seconds,
        "verify_s": report.verify_s,
        "from_coordinator": direct,
        "from_peers": sum(by_source.values()),
        "peers_used": len(by_source),
        "delta_bytes": report.delta_bytes,
        "copied_bytes": report.copied_bytes,
        "wasted_bytes": report.wasted_bytes,
        "retries": report.retries,
        "failures": [str(reason) for reason in report.failures.values()][:8],
        "liars": [str(reason) for reason in report.liars.values()][:8],
    }


def _obey(lines: Lines, star: threading.Event) -> None:
    for order in lines.orders():
        star.set() if order["on"] else star.clear()
        lines.say("told")
    leave()


def main() -> None:
    """Join, until the benchmark is gone."""
    lines, star, invite = Lines(), threading.Event(), parse(sys.argv[3])
    began = time.time()
    measure_fetches(lines, invite.coordinator, star)
    threading.Thread(target=_obey, args=(lines, star), daemon=True).start()
    config = make_config(
        state_dir=Path(sys.argv[1]),
        backend="scripted:batch=2,mean_s=0.01,length=4",
        listen=(f"/ip4/{sys.argv[2]}/tcp/0",),
    )
    lines.say("started", since=began)
    join(config, invite, Console(file=sys.stderr))


if __name__ == "__main__":
    main()
