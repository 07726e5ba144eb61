"""What a seeder says about itself: at joining, at each beat, in the directory, and in its status file."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo_node.activity import Activity
from echo_node.link import Link
from echo_node.liveness import stamp
from echo_node.policy_sync import PolicySync
from echo_node.self_report import MAX_ADDRESSES
from echo_node.status import LocalStatus, key_change
from echo_node.transfer_view import TransferView
from echo_swarm import __version__
from echo_swarm.checkpoint.fetch import Fetcher
from echo_swarm.checkpoint.fetch_report import Origin
from echo_swarm.checkpoint.serve import BlobServer
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.clock import Clock
from echo_swarm.envelope import seal
from echo_swarm.identity import Identity
from echo_swarm.invite import Invite
from echo_swarm.records import PeerRecord
from echo_swarm.succession import RunKeys
from echo_swarm.transport.base import Host
from echo_swarm.work import Beat, Hello, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class SeederReport:
    """Reads the parts of a seeder; changes none."""

    invite: Invite
    keys: RunKeys
    identity: Identity
    host: Host
    clock: Clock
    activity: Activity
    policies: PolicySync
    store: VersionStore
    fetcher: Fetcher
    transfers: TransferView
    blobs: BlobServer
    link: Link
    started_at: float
    """On the wall clock."""
    started_up_s: float
    """The same moment on the monotonic one."""
    instance: bytes = field(default_factory=lambda: os.urandom(16))

    @property
    def _addresses(self) -> tuple[str, ...]:
        return self.host.addresses[:MAX_ADDRESSES]

    def hello(self) -> Hello:
        """Return the introduction: no backend, so no work."""
        return Hello(
            run_id=self.invite.run,
            software=f"echo-node {__version__}",
            role=Role.SEEDER,
            instance=self.instance,
            wall_s=self.clock.wall_s(),
            backend=None,
            addresses=self._addresses,
        )

    def beat(self) -> Beat:
        """Return what it holds and does now."""
        return Beat(
            lease_ids=(),
            held_version=self.policies.newest,
            state=self.activity.headline,
            tokens_per_s=0.0,
            bytes_served=self.blobs.bytes_served,
            bytes_fetched_peers=self._fetched_from_peers,
            transfers=self.transfers.log.said(self.keys.coordinator),
        )

    def peer_record(self) -> bytes:
        """Return the sealed record for the directory."""
        record = PeerRecord(
            run_id=self.invite.run,
            role=Role.SEEDER,
            addresses=self._addresses,
            held_version=self.policies.newest,
            artifact_digests=tuple(self.store.complete_digests()),
            issued_at=self.clock.wall_s(),
        )
        return seal(self.identity, record)

    def held_versions(self) -> Sequence[int]:
        """Return the versions of which something whole is here, ascending."""
        return [
            version
            for version in self.store.versions()
            if (signed := self.store.manifest(version)) is not None
            and any(self.store.artifact_path(version, a.kind, a.precision) for a in signed.message.artifacts)
        ]

    def status(self, *, beat_s: float, standing: str = "", ending: str = "") -> LocalStatus:
        """Return the content of the status file; `ending` says how it ended, empty while it runs."""
        run = self.policies.run_manifest
        return LocalStatus(
            run_id=self.invite.run,
            run_name=run.name if run else "",
            role=Role.SEEDER.value,
            peer_id=self.identity.peer_id,
            pid=os.getpid(),
            **stamp(self.clock),
            started_at=self.started_at,
            up_s=self.clock.monotonic_s() - self.started_up_s,
            beat_s=beat_s,
            running=not ending,
            state=ending or self.activity.headline,
            standing=standing,
            head_version=self.policies.known_head,
            held_version=self.policies.newest,
            bytes_sent=self.link.bytes_out,
            bytes_received=self.link.bytes_in,
            bytes_served=self.blobs.bytes_served,
            bytes_fetched_coordinator=self.fetcher.bytes_by_source.get(self.keys.coordinator, 0),
            bytes_fetched_peers=self._fetched_from_peers,
            bytes_fetched_mirrors=self.fetcher.bytes_from(Origin.MIRROR),
            key_changes=len(self.keys.chain.links),
            key_change=key_change(self.keys),
            held_versions=tuple(self.held_versions()),
            held_bytes=self.store.used_bytes(),
        )

    @property
    def _fetched_from_peers(self) -> int:
        return self.fetcher.bytes_from(Origin.PEER)
