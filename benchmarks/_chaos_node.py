"""A node of the chaos benchmark: `echo-node join` with the scripted backend, which says what it is in the middle of.

`python -m benchmarks._chaos_node STATE_DIR INVITE QUOTA_BYTES`. Nothing of the node is changed: each wrapped function
is called as ever. What it is about to load is hashed first, and what that gave is said.
"""

import sys
import threading
from pathlib import Path
from typing import Any

from anyio import to_thread
from rich.console import Console

from benchmarks._chaos_phases import Phases
from benchmarks._distribution_lines import Lines, leave
from echo_node.backends.base import LoadTimes, PolicyFiles
from echo_node.backends.renewing import RenewingBackend
from echo_node.config import make_config
from echo_node.join import join
from echo_node.policy_sync import PolicySync
from echo_node.swaps import Swaps
from echo_swarm.checkpoint import shelf
from echo_swarm.checkpoint.delta.apply import DeltaChain
from echo_swarm.checkpoint.fetch import Fetcher, FetchReport
from echo_swarm.checkpoint.partial import PartialArtifact
from echo_swarm.checkpoint.read_back import Told, file_digest, untold
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.envelope import Signed
from echo_swarm.invite import parse
from echo_swarm.manifest import Artifact, CheckpointManifest, RunManifest

PATIENCE_S = 180.0
"""The coordinator may be down while a node starts."""


def watch(phases: Phases) -> None:
    """Let every step of a version's way through this process be said."""
    _watch_fetches(phases)
    _watch_pieces(phases)
    _watch_loads(phases)
    VersionStore.finish_partial = phases.around("verifying", VersionStore.finish_partial)
    shelf.remove_folder = phases.around("pruning", shelf.remove_folder)
    apply, usable, joined = DeltaChain.run, Swaps.usable, PolicySync.joined

    async def told_apply(self: DeltaChain, told: Told = untold) -> int:
        with phases.within("applying"):
            return await apply(self, told)

    def told_usable(self: Swaps, version: int) -> None:
        usable(self, version)
        phases.say("usable", version=version)

    async def told_joined(
        self: PolicySync, run: RunManifest, run_envelope: bytes, head_manifest: bytes | None, epoch: bytes | None = None
    ) -> None:
        await joined(self, run, run_envelope, head_manifest, epoch)
        phases.say("joined")

    DeltaChain.run, Swaps.usable, PolicySync.joined = told_apply, told_usable, told_joined


def _watch_fetches(phases: Phases) -> None:
    fetch = Fetcher.fetch

    async def told(
        self: Fetcher, signed: Signed[CheckpointManifest], artifact: Artifact, *args: Any, **how: Any
    ) -> FetchReport:
        with phases.within("fetching"):
            report = await fetch(self, signed, artifact, *args, **how)
        phases.say(
            "whole",
            version=signed.message.policy_version,
            digest=artifact.digest.hex(),
            resumed_bytes=report.resumed_bytes,
            made_bytes=report.made_bytes,
            from_peers=sum(report.bytes_by_source.values()),
            delta_fault=report.delta_fault,
            liars=list(report.liars.values()),
        )
        return report

    Fetcher.fetch = told


def _watch_pieces(phases: Phases) -> None:
    """Say how much of a file is verified: what a later life of the node finds must not be less."""
    open_partial, write = VersionStore.open_partial, PartialArtifact.write

    def told_open(self: VersionStore, version: int, artifact: Artifact, told: Told = untold) -> PartialArtifact:
        with phases.within("resuming"):
            partial = open_partial(self, version, artifact, told)
        phases.say("opened", digest=artifact.digest.hex(), done=partial.done_bytes, version=version)
        return partial

    def told_write(self: PartialArtifact, index: int, data: bytes) -> int:
        fresh = write(self, index, data)
        if fresh:
            phases.say("verified", digest=self.artifact.digest.hex(), done=self.done_bytes)
        return fresh

    VersionStore.open_partial, PartialArtifact.write = told_open, told_write


def _watch_loads(phases: Phases) -> None:
    load = RenewingBackend.load

    async def told(self: RenewingBackend, policy: PolicyFiles) -> LoadTimes:
        with phases.within("loading"):
            found = await to_thread.run_sync(file_digest, policy.artifact)
            phases.say(
                "loads", version=policy.policy_version, digest=found.hex(), expected=policy.artifact_digest.hex()
            )
            return await load(self, policy)

    RenewingBackend.load = told


def _end_with_benchmark(lines: Lines) -> None:
    for _ in lines.orders():
        pass
    leave()


def main() -> None:
    """Join, until the benchmark kills this process or is gone."""
    lines, invite = Lines(), parse(sys.argv[2])
    watch(Phases(lines))
    threading.Thread(target=_end_with_benchmark, args=(lines,), daemon=True).start()
    config = make_config(
        state_dir=Path(sys.argv[1]),
        backend="scripted:batch=2,mean_s=0.01,length=4",
        listen=("/ip4/127.0.0.1/tcp/0",),
        max_store_bytes=int(sys.argv[3]),
        patience_s=PATIENCE_S,
    )
    join(config, invite, Console(file=sys.stderr))


if __name__ == "__main__":
    main()
