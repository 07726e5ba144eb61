"""What was measured of each class of peers: those with the same backend and precision. Pure."""

from dataclasses import dataclass, field

from echo_coordinator.state.probe_rules import Gap
from echo_swarm.identity import PeerId

MAX_CLASSES = 64
"""Peers name their backend and precision themselves. Classes beyond this are not listed."""
MAX_PEERS = 256
"""Measured peers of one class at one version that are told apart."""
KEPT_VERSIONS = 16

ClassKey = tuple[str, str]
"""Backend and precision."""


@dataclass(slots=True)
class ClassRecord:
    """One class."""

    probes: int = 0
    """Answers that fitted, ever."""
    by_version: dict[int, dict[PeerId, Gap]] = field(default_factory=dict[int, dict[PeerId, Gap]])
    """Their gaps."""
    newest: dict[PeerId, Gap] = field(default_factory=dict[PeerId, Gap])
    """Of each peer."""

    def trend(self, versions: int) -> list[tuple[int, float]]:
        """Return (version, mean gap over its peers) of the newest versions measured, oldest first."""
        chosen = sorted(self.by_version)[-versions:]
        return [(v, sum(gap.mean for gap in self.by_version[v].values()) / len(self.by_version[v])) for v in chosen]


class ClassTable:
    """All classes of which an answer fitted."""

    def __init__(self) -> None:
        self.records: dict[ClassKey, ClassRecord] = {}

    def add(self, key: ClassKey, peer: PeerId, version: int, gap: Gap) -> None:
        """Note an answer that fitted."""
        if key not in self.records and len(self.records) >= MAX_CLASSES:
            return
        record = self.records.setdefault(key, ClassRecord())
        record.probes += 1
        for gaps in (record.by_version.setdefault(version, {}), record.newest):
            gaps.pop(peer, None)
            gaps[peer] = gap
            if len(gaps) > MAX_PEERS:
                del gaps[next(iter(gaps))]
        while len(record.by_version) > KEPT_VERSIONS:
            del record.by_version[min(record.by_version)]

    def others(self, key: ClassKey, peer: PeerId) -> list[float]:
        """Return the newest mean gap of each other peer of a class."""
        record = self.records.get(key)
        return [] if record is None else [gap.mean for other, gap in record.newest.items() if other != peer]
