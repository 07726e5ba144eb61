"""Which versions a modelled node holds, and how it comes by them."""

import random
from collections.abc import Callable

from echo_coordinator.simulate.crew import Crew


class Held:
    """Fetches one version at a time, the newest first, then what leases ask for."""

    def __init__(self, *, fetch_s: float, keep: int, draws: random.Random, crew: Crew) -> None:
        """Describe it.

        Args:
            fetch_s: mean time from hearing of a version to holding it.
            keep: versions kept.
            draws: for those times.
            crew: of the process.

        """
        self._fetch_s = fetch_s
        self._keep = keep
        self._draws = draws
        self._crew = crew
        self._fetching = False
        self.versions: set[int] = set()
        self.head: int | None = None
        """The newest that it has heard of."""
        self.missing: Callable[[], set[int]] = set
        """Versions that leases ask for and that are not held."""
        self.arrived: Callable[[], None] = lambda: None

    @property
    def newest(self) -> int | None:
        """None before the first."""
        return max(self.versions, default=None)

    def hear(self, head: int | None) -> None:
        """Take in what the coordinator says is the newest version."""
        if head is not None and (self.head is None or head > self.head):
            self.head = head
            self.fetch()

    def fetch(self) -> None:
        """Begin to fetch what is wanted, unless something is being fetched."""
        if self._fetching or self.head is None:
            return
        head, newest = self.head, self.newest
        asked = sorted(version for version in self.missing() if version <= head)
        if newest is None or head > newest:
            self._begin(head)
        elif asked:
            self._begin(asked[0])

    def _begin(self, version: int) -> None:
        self._fetching = True
        self._crew.later(self._fetch_s * (0.5 + self._draws.random()), lambda: self._fetched(version))

    def _fetched(self, version: int) -> None:
        self._fetching = False
        self.versions.add(version)
        wanted = self.missing() & self.versions
        self.versions = set(sorted(self.versions)[-self._keep :]) | {version} | wanted
        self.fetch()
        self.arrived()
