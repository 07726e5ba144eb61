"""What has changed in memory and is not on disk yet; written inside each transaction of the committer."""

from sqlite3 import Connection

from echo_coordinator.state import rows
from echo_coordinator.state.counters import Counters
from echo_coordinator.state.groups import Group, GroupTable
from echo_coordinator.state.leases import LeaseBook, LiveLease


class Unsaved:
    """Moves the dirty marks of groups, leases and counters through a transaction, and back if it fails."""

    def __init__(self, groups: GroupTable, leases: LeaseBook, counters: Counters) -> None:
        self._groups = groups
        self._leases = leases
        self._counters = counters
        self._in_transit: tuple[dict[int, Group], dict[bytes, LiveLease], set[tuple[str, str]]] = ({}, {}, set())
        self.update_no = 0
        """Of the newest update; drops are dated by it."""

    def write(self, db: Connection) -> None:
        """Write everything dirty. What changes from now on belongs to the next transaction."""
        groups, leases, counters = self._groups.dirty, self._leases.dirty, self._counters.dirty
        self._in_transit = (groups, leases, counters)
        self._groups.dirty, self._leases.dirty, self._counters.dirty = {}, {}, set()
        if groups:
            rows.update_groups(db, groups.values(), self.update_no)
        if leases:
            rows.write_leases(db, leases.values())
        if counters:
            rows.write_counters(db, [(scope, name, self._counters.get(scope, name)) for scope, name in counters])

    def written(self, on_disk: bool) -> None:
        """Forget the marks, or take them back."""
        groups, leases, counters = self._in_transit
        self._in_transit = ({}, {}, set())
        if not on_disk:
            self._groups.dirty = groups | self._groups.dirty
            self._leases.dirty = leases | self._leases.dirty
            self._counters.dirty |= counters

    @property
    def is_empty(self) -> bool:
        """Whether the disk knows everything."""
        return not (self._groups.dirty or self._leases.dirty or self._counters.dirty)
