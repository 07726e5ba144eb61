"""What a node says about itself: at joining, at each beat, in the directory, and in its status file."""

import os

from echo_node.activity import Activity
from echo_node.link import Link
from echo_node.liveness import stamp
from echo_node.outbox import Outbox
from echo_node.policy_sync import PolicySync
from echo_node.status import LocalStatus, key_change, split_counters
from echo_node.swaps import Swaps
from echo_node.transfer_view import TransferView
from echo_node.worker import Worker
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

MAX_LEASES_PER_BEAT = 4096
MAX_ADDRESSES = 16


class SelfReport:
    """Reads the parts of a node; changes none."""

    def __init__(
        self,
        *,
        invite: Invite,
        keys: RunKeys,
        role: Role,
        identity: Identity,
        host: Host,
        clock: Clock,
        activity: Activity,
        swaps: Swaps,
        policies: PolicySync,
        worker: Worker,
        outbox: Outbox,
        store: VersionStore,
        fetcher: Fetcher,
        transfers: TransferView,
        blobs: BlobServer,
        link: Link,
    ) -> None:
        self._invite = invite
        self._keys = keys
        self._role = role
        self._identity = identity
        self._host = host
        self._clock = clock
        self._activity = activity
        self._swaps = swaps
        self._policies = policies
        self._worker = worker
        self._outbox = outbox
        self._store = store
        self._fetcher = fetcher
        self._transfers = transfers
        self._blobs = blobs
        self._link = link
        self._instance = os.urandom(16)
        self._started_at = clock.wall_s()
        self._started_up_s = clock.monotonic_s()

    def hello(self) -> Hello:
        """Return the introduction, the same instance for the life of the process."""
        return Hello(
            run_id=self._invite.run,
            software=f"echo-node {__version__}",
            role=self._role,
            instance=self._instance,
            wall_s=self._clock.wall_s(),
            backend=self._worker.report,
            addresses=self._host.addresses[:MAX_ADDRESSES],
        )

    def beat(self) -> Beat:
        """Return what it does now, naming also the leases whose work waits in the outbox."""
        return Beat(
            lease_ids=tuple(sorted(self._worker.held_leases()))[:MAX_LEASES_PER_BEAT],
            held_version=self._policies.newest,
            state=self._activity.headline,
            tokens_per_s=self._worker.tokens_per_s,
            bytes_served=self._blobs.bytes_served,
            bytes_fetched_peers=self._fetched_from_peers,
            transfers=self._transfers.log.said(self._keys.coordinator),
        )

    def peer_record(self) -> bytes:
        """Return the sealed record for the directory."""
        record = PeerRecord(
            run_id=self._invite.run,
            role=self._role,
            addresses=self._host.addresses[:MAX_ADDRESSES],
            held_version=self._policies.newest,
            artifact_digests=tuple(self._store.complete_digests()),
            issued_at=self._clock.wall_s(),
        )
        return seal(self._identity, record)

    def status(self, *, beat_s: float, standing: str = "", ending: str = "") -> LocalStatus:
        """Return the content of the status file; `ending` says how it ended, empty while it runs."""
        accepted, rejected, tokens_accepted = split_counters(self._outbox.counters())
        report = self._worker.report
        run = self._policies.run_manifest
        return LocalStatus(
            run_id=self._invite.run,
            run_name=run.name if run else "",
            peer_id=self._identity.peer_id,
            pid=os.getpid(),
            **stamp(self._clock),
            started_at=self._started_at,
            up_s=self._clock.monotonic_s() - self._started_up_s,
            beat_s=beat_s,
            running=not ending,
            state=ending or self._activity.headline,
            standing=standing,
            backend=report.backend if report else "",
            build=report.build if report else "",
            precision=report.precision if report else "",
            device=report.device if report else "",
            batch=report.batch if report else 0,
            head_version=self._policies.known_head,
            held_version=self._policies.newest,
            loaded_version=self._worker.loaded,
            swaps=tuple(self._swaps.done),
            tokens=self._worker.tokens,
            tokens_per_s=self._worker.tokens_per_s,
            pending=self._outbox.pending(),
            accepted=accepted,
            rejected=rejected,
            tokens_accepted=tokens_accepted,
            bytes_sent=self._link.bytes_out,
            bytes_received=self._link.bytes_in,
            bytes_served=self._blobs.bytes_served,
            bytes_fetched_coordinator=self._fetcher.bytes_by_source.get(self._keys.coordinator, 0),
            bytes_fetched_peers=self._fetched_from_peers,
            bytes_fetched_mirrors=self._fetcher.bytes_from(Origin.MIRROR),
            key_changes=len(self._keys.chain.links),
            key_change=key_change(self._keys),
        )

    @property
    def _fetched_from_peers(self) -> int:
        return self._fetcher.bytes_from(Origin.PEER)
