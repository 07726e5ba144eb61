"""Which versions a peer keeps. Pure.

A trajectory may be up to `max_staleness` versions behind, so the training side must be able to name and serve that many
versions besides the newest; and whatever is loaded or being read right now is never deleted, however old it is.
"""

from collections.abc import Collection
from dataclasses import dataclass

from echo_swarm.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldVersion:
    """What retention needs to know about one version's folder."""

    version: int
    complete: bool
    """At least one artifact is whole."""
    size_bytes: int
    """What its folder takes, counting unfinished files at their final length."""
    in_use: bool
    """Loaded by the backend, leased, or being downloaded now."""


def check_retention(*, keep_versions: int, max_staleness: int) -> None:
    """Refuse settings under which a version could vanish while trajectories of it still count.

    Raises:
        SettingsError: keep_versions is below max_staleness + 1; says what to set.

    """
    if keep_versions < max_staleness + 1:
        raise SettingsError(
            f"keep_versions = {keep_versions} is too few for max_staleness = {max_staleness}: "
            f"set it to at least {max_staleness + 1}"
        )


def versions_to_delete(held: Collection[HeldVersion], *, keep_versions: int) -> list[int]:
    """Return the versions to delete, oldest first.

    Kept are the newest `keep_versions` complete ones, the newest one if it is incomplete (a download to resume), and
    what is in use.
    """
    complete = sorted((item.version for item in held if item.complete), reverse=True)
    kept = set(complete[: max(1, keep_versions)])
    if held:
        kept.add(max(item.version for item in held))
    return sorted(item.version for item in held if not item.in_use and item.version not in kept)


def versions_to_evict(
    held: Collection[HeldVersion], *, excess_bytes: int, keep: int, spare_newest: bool = True
) -> list[int]:
    """Return the oldest versions whose deletion frees at least `excess_bytes`; fewer when there are no more.

    `keep` is the version that is about to be written. The newest complete version stays too: a peer that has nothing
    to sample with helps nobody. A peer that only serves does not spare it: it goes last, and none goes in vain.
    """
    newest = max((item.version for item in held if item.complete), default=keep)
    chosen: list[int] = []
    for item in sorted(held, key=lambda item: item.version):
        if excess_bytes <= 0:
            break
        if not item.in_use and item.version != keep and not (spare_newest and item.version == newest):
            chosen.append(item.version)
            excess_bytes -= item.size_bytes
    return chosen if spare_newest or excess_bytes <= 0 else []
