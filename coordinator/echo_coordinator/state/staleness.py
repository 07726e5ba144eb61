"""Staleness: how old a sample is, counted in versions, and how much work that allows to be under way.

staleness = version of the policy being updated - oldest policy version in the trajectory

Three guards keep it at most `max_staleness`: admission (`group_capacity`), the check on arrival and the hard check at
consumption (both `is_fresh`). The table that the tests walk through, as (current, sample, limit): (5, 5, 0) in,
(5, 4, 0) out, (5, 4, 1) in, (5, 3, 1) out, (5, 6, any) out: a version from the future.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Where the run stands."""

    trained: int
    """Version of the policy being updated: of the newest committed update, 0 before the first."""
    published: int | None
    """Newest version that nodes can fetch; None before version 0. Lags `trained` while an update is being published."""

    @property
    def lag(self) -> int:
        """Updates that are not published yet."""
        return 0 if self.published is None else self.trained - self.published


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionWindow:
    """Which versions a lease may be sampled with."""

    trained: int
    published: int
    max_staleness: int
    floor: int = 0
    """Versions before this one were rolled back; 0 when none were."""

    @property
    def newest(self) -> int | None:
        """None: any newer one than `oldest`."""
        return max(self.floor, self.published) if self.max_staleness == 0 else None

    def oldest(self, updates_before: int = 0) -> int:
        """Return the oldest version that is still fresh enough after `updates_before` more updates.

        A group that waits behind others is consumed later, when the policy is that much newer; sampled with an older
        version than this it would be dropped then. What a node holds is good enough while it is inside the bound.
        """
        if self.max_staleness == 0:
            return max(self.floor, self.published)
        return max(self.floor, min(self.published, self.trained + updates_before - self.max_staleness))


def staleness(current: int, oldest: int) -> int:
    """Return the age of a sample in versions; negative for one from the future."""
    return current - oldest


def is_fresh(current: int, oldest: int, max_staleness: int) -> bool:
    """Whether a sample may be trained on."""
    return 0 <= staleness(current, oldest) <= max_staleness


def group_capacity(max_staleness: int, groups_per_update: int, publication_lag: int) -> int:
    """Return how many training groups may be under way: being sampled, scored, waiting, or in training.

    A group admitted now has fewer than (max_staleness + 1) x groups_per_update others before it, so it is consumed
    at most `max_staleness` updates from now. A version that is trained but not yet published has used up one of those
    already: what is sampled meanwhile comes from the version before it.
    """
    return max(0, max_staleness + 1 - publication_lag) * groups_per_update


def version_window(max_staleness: int, versions: Versions, floor: int = 0) -> VersionWindow | None:
    """Return the versions that training leases ask for now; None while there is nothing to sample with."""
    if versions.published is None:
        return None
    return VersionWindow(
        trained=versions.trained, published=versions.published, max_staleness=max_staleness, floor=floor
    )
