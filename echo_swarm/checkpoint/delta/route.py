"""The cheapest way from what a peer holds to an artifact: a chain of deltas, or the whole file. Pure but for lookups.

held version 3 ──delta of 4──► 4 ──delta of 5──► 5 ──delta of 6──► 6 wanted
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from echo_swarm.envelope import Signed
from echo_swarm.errors import PeerFault, Unavailable
from echo_swarm.manifest import Artifact, ArtifactKind, CheckpointManifest

MAX_STEPS = 16
"""Longest chain: each step costs a manifest to ask for and a file to open."""

ManifestOf = Callable[[int], Awaitable[Signed[CheckpointManifest]]]
"""Returns a version's trusted manifest, or raises PeerFault or Unavailable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One delta of a chain."""

    signed: Signed[CheckpointManifest]
    """The manifest that lists it."""
    delta: Artifact
    target: Artifact
    """What it makes, of the same manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A chain of deltas, in the order in which they are applied."""

    base_version: int
    base: Artifact
    """Whole, on this disk."""
    steps: tuple[Step, ...]
    cost_bytes: int
    """What has yet to be fetched of them."""


def delta_to(manifest: CheckpointManifest, target: Artifact) -> Artifact | None:
    """Return the delta of a version that makes one of its artifacts, if there is one."""
    deltas = (a for a in manifest.artifacts if a.kind is ArtifactKind.DELTA)
    return next((delta for delta in deltas if delta.target_digest == target.digest), None)


async def find_route(
    signed: Signed[CheckpointManifest],
    wanted: Artifact,
    *,
    budget_bytes: int,
    is_whole: Callable[[Artifact], bool],
    manifest_of: ManifestOf,
) -> Route | None:
    """Return the chain that costs less than `budget_bytes`, or None.

    Args:
        signed: the trusted manifest of the version wanted.
        wanted: one of its artifacts.
        budget_bytes: what the other way, the pieces still missing of `wanted`, would cost.
        is_whole: whether an artifact lies here, whole.
        manifest_of: asked for the versions between, until a base is found.

    """
    steps: list[Step] = []
    cost, target = 0, wanted
    while len(steps) < MAX_STEPS:
        delta = delta_to(signed.message, target)
        if delta is None or delta.base_version is None:
            return None
        steps.insert(0, Step(signed=signed, delta=delta, target=target))
        cost += 0 if is_whole(delta) else delta.size_bytes
        if cost >= budget_bytes:
            return None
        try:
            before = await manifest_of(delta.base_version)
        except (PeerFault, Unavailable):
            return None  # Too old for anybody to remember: the whole file it is.
        base = next((a for a in before.message.artifacts if a.digest == delta.base_digest), None)
        if base is None or base.size_bytes != wanted.size_bytes:
            return None
        if is_whole(base):
            return Route(base_version=delta.base_version, base=base, steps=tuple(steps), cost_bytes=cost)
        signed, target = before, base
    return None
