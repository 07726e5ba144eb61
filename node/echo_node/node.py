"""The node's wiring: which part feeds which, who waits for whom, and what bounds each queue.

                        coordinator                                            other nodes
       hello ▲  beat ▲   lease ▲ │    push ▲  release ▲                      pieces ▲ │ pieces
             │       │         │ ▼         │          │                             │ ▼
           Link   Heartbeat   Worker ◄── Pusher ── Worker                   BlobServer · Fetcher
             │       │         │ │         ▲                                        ▲ │
             │       └─ heard ─┼─┼─────────┼──────────► PolicySync ◄─── VersionStore ┘ ▼
             └─ joined ────────┼─┼─────────┼──────────►     │ changed          VersionStore
                               │ ▼         │                ▼
                         LeaseBook ──► Sampler ──► backend child
                                          │ completions
                                          ▼
                                       Harvest ──► Outbox (disk)

    who waits                  for                                 bounded by
    ─────────────────────────  ──────────────────────────────────  ─────────────────────────────────────────────
    everything that calls      Link.ready                          nothing: told to people, with back-off
    Worker asking for leases   a loaded version, a free place      LeaseBook: one and a half batches
    Sampler                    leases, versions, places            unanswered requests: batch + a quarter
    Pusher                     the outbox; room at coordinator     Outbox: max_outbox_bytes, half of it stops asking
    PolicySync                 hints, retries                      one download at a time
    release of a lease         its finished members being pushed   10 s
    leaving                    what runs, verdicts, the release    grace_s twice, then 2 s

Three things end a node: the run is finished, somebody calls `stop`, or a part raises what cannot be repaired here.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import anyio

from echo_node.activity import Activity, Part
from echo_node.allegiance import make_allegiance
from echo_node.backends.restart import RestartPolicy
from echo_node.bare_errors import bare_errors
from echo_node.config import NodeConfig, StatePaths, run_dirs
from echo_node.first_version import hear_of_first_version
from echo_node.harvest import Harvest
from echo_node.heartbeat import Heartbeat
from echo_node.lease_book import LeaseBook
from echo_node.leaving import told_while_leaving
from echo_node.link import Joined, Link
from echo_node.mirrors import mirrors_of
from echo_node.outbox import Outbox
from echo_node.own_record import OwnRecord, keep_status
from echo_node.peers import near_of
from echo_node.policy_sync import PolicySync
from echo_node.prober import Prober
from echo_node.pusher import Pusher
from echo_node.recall import recall_run
from echo_node.self_report import SelfReport
from echo_node.slumber import watch_for_sleep
from echo_node.status import LocalStatus, write_status
from echo_node.swaps import Swaps
from echo_node.transfer_view import TransferView
from echo_node.wanted import Wanted
from echo_node.worker import FAREWELL_S, OpenBackend, Worker
from echo_swarm.checkpoint.fetch import Fetcher, FetchSettings
from echo_swarm.checkpoint.interest import InterestBook
from echo_swarm.checkpoint.rate import bytes_per_s
from echo_swarm.checkpoint.serve import BlobServer
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.clock import Clock
from echo_swarm.directory.base import Directory
from echo_swarm.errors import LocalFault, StorageFull
from echo_swarm.identity import Identity
from echo_swarm.invite import Invite
from echo_swarm.transport.base import Host


class Outcome(StrEnum):
    """Why a node ended well."""

    FINISHED = "finished"
    """The coordinator says that the run is over."""
    STOPPED = "stopped"
    """`stop` was called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeams:
    """What a node stands on; each can be replaced by another implementation."""

    host: Host
    directory: Directory
    identity: Identity
    clock: Clock
    open_backend: OpenBackend
    emit: Callable[[str], None]
    """Prints a line for people."""
    wanted_files: Wanted = field(default_factory=Wanted)
    """What the backend can load."""
    restarts: RestartPolicy = field(default_factory=RestartPolicy)


class Node:
    """One inference peer in one run."""

    def __init__(self, config: NodeConfig, invite: Invite, seams: NodeSeams) -> None:
        """Open the state on disk and connect the parts; nothing runs yet.

        Raises:
            UsageError: the state folder holds something that cannot be read.

        """
        self._config = config
        self._invite = invite
        self._seams = seams
        self._paths = StatePaths(state_dir=config.state_dir, run_id=invite.run)
        self._ending: Outcome | None = None
        self._end = anyio.Event()
        self.final_status: LocalStatus | None = None
        """Set when `run` has ended."""
        self.activity = Activity(seams.clock, seams.emit)
        self.swaps = Swaps(seams.clock, self.activity.say)
        self.transfers = TransferView()
        self.store = VersionStore(run_dirs(config.state_dir), invite.run, quota_bytes=config.max_store_bytes)
        self.outbox = Outbox(self._paths.outbox, max_bytes=config.max_outbox_bytes)
        self._trust = make_allegiance(seams, invite, self._paths, self.store, self.activity, near_of(config, invite))
        self._peers = self._trust.peers
        self.fetcher, self.blobs = self._make_exchange()
        self.policies = self._make_policies()
        self.link = self._make_link()
        self._trust.attach(self.fetcher, self.policies, self.link)
        self.pusher = Pusher(
            outbox=self.outbox,
            link=self.link,
            activity=self.activity,
            heard=self.policies.heard,
            lowest_version=self.policies.lowest_useful,
            settled=lambda: self.worker.wake(),
        )
        self.worker = self._make_worker()
        self.prober = Prober(
            identity=seams.identity,
            run_id=invite.run,
            link=self.link,
            activity=self.activity,
            can_score=lambda: self.worker.loaded is not None,
            score=self.worker.score,
        )
        self.report = self._make_report()
        self._record = OwnRecord(seams.directory, invite.run, self.report.peer_record)
        self.heartbeat = Heartbeat(
            link=self.link,
            clock=seams.clock,
            activity=self.activity,
            compose=self.report.beat,
            heard=self.policies.heard,
            renewed=self.worker.renewed,
            probe_due=self.prober.due,
            run_finished=self._on_finished,
        )

    def _make_exchange(self) -> tuple[Fetcher, BlobServer]:
        """Return what gets pieces and what gives them: who asks the one may be asked by the other."""
        config, host, interest = self._config, self._seams.host, InterestBook()
        fetcher = Fetcher(
            host,
            self.store,
            coordinator=self._trust.keys.coordinator,
            settings=FetchSettings(
                max_bytes_per_s=bytes_per_s(config.max_download_mbit), near=near_of(config, self._invite)
            ),
            interest=interest,
        )
        fetcher.mirrors = mirrors_of(config, self._invite)
        max_upload = bytes_per_s(config.max_upload_mbit)
        return fetcher, BlobServer(host, self.store, interest=interest, max_bytes_per_s=max_upload)

    def _make_policies(self) -> PolicySync:
        return PolicySync(
            store=self.store,
            fetcher=self.fetcher,
            heads=self._trust.heads,
            new_epoch=lambda: self.link.check_epoch(),
            peers=self._peers,
            clock=self._seams.clock,
            activity=self.activity,
            swaps=self.swaps,
            transfers=self.transfers,
            changed=self._on_versions_changed,
            needed=lambda: self.worker.needed_versions(),
            wanted_files=self._seams.wanted_files,
        )

    def _make_link(self) -> Link:
        return Link(
            host=self._seams.host,
            peers=self._peers,
            invite=self._invite,
            clock=self._seams.clock,
            activity=self.activity,
            hello=lambda: self.report.hello(),
            on_join=self._on_join,
            epochs=self._trust.trusted.epochs,
            following=self._trust.following,
            patience_s=self._config.patience(known=self.store.run() is not None),
        )

    def _make_worker(self) -> Worker:
        identity, run_id = self._seams.identity, self._invite.run
        harvest = Harvest(identity=identity, run_id=run_id, outbox=self.outbox, stored=self.pusher.wake)
        return Worker(
            book=LeaseBook(),
            link=self.link,
            policies=self.policies,
            harvest=harvest,
            outbox=self.outbox,
            pusher=self.pusher,
            open_backend=self._seams.open_backend,
            restarts=self._seams.restarts,
            clock=self._seams.clock,
            activity=self.activity,
            swaps=self.swaps,
            heard=self.policies.heard,
            run_finished=self._on_finished,
        )

    def _make_report(self) -> SelfReport:
        return SelfReport(
            invite=self._invite,
            keys=self._trust.keys,
            role=self._config.role,
            identity=self._seams.identity,
            host=self._seams.host,
            clock=self._seams.clock,
            activity=self.activity,
            swaps=self.swaps,
            policies=self.policies,
            worker=self.worker,
            outbox=self.outbox,
            store=self.store,
            fetcher=self.fetcher,
            transfers=self.transfers,
            blobs=self.blobs,
            link=self.link,
        )

    def stop(self) -> None:
        """Leave in an orderly way: `run` ends within about twice its `grace_s`."""
        self._finish(Outcome.STOPPED)

    async def run(self, *, grace_s: float = 4.0) -> Outcome:
        """Take part until the run is over or `stop` is called.

        Args:
            grace_s: when leaving, how long running completions may take, and then how long their verdicts may.

        Raises:
            RunNotFound, PeerUnreachable: see `Link.run`.
            IdentityInUse: another process with this key is live.
            Banned: the run's owner wants no work from this key.
            UsageError: the run takes no work of this backend.
            BackendFailed: the backend cannot be kept alive; with its own last words.
            StorageFull: the node leaves, and finished work cannot be written.
            PeerFault: what the coordinator says about the run does not fit the invite.

        """
        try:
            with bare_errors():
                async with self.blobs, anyio.create_task_group() as tasks:
                    await recall_run(self.store, self._invite, self._trust.keys, self.policies, self.activity)
                    for part in (
                        self.worker.run,
                        self.policies.run,
                        self._connect,
                        self._record.keep_announced,
                        self._note_status,
                    ):
                        tasks.start_soon(part)
                    tasks.start_soon(self._peers.keep_known, self._paths.peers)
                    tasks.start_soon(watch_for_sleep, self._seams.clock, self.link.woken)
                    await self._end.wait()
                    self.activity.doing("leaving")
                    async with told_while_leaving(self.activity.say, self._under_way, limit_s=2 * grace_s + FAREWELL_S):
                        await self.worker.wind_down(grace_s=grace_s)
                        self.heartbeat.be_quiet()
                        await self.worker.farewell()
                    tasks.cancel_scope.cancel()
        finally:
            self.final_status = self.status(running=False)
            with contextlib.suppress(LocalFault):
                write_status(self._paths.status, self.final_status)
            self.outbox.close()
        assert self._ending is not None
        return self._ending

    async def _connect(self) -> None:
        # The hello tells what samples here. A backend that cannot be started ends the node by itself.
        await self.worker.started.wait()
        async with anyio.create_task_group() as tasks:
            for part in (self.link.run, self.heartbeat.run, self.pusher.run, self.prober.run):
                tasks.start_soon(part)
            policies = self.policies
            tasks.start_soon(hear_of_first_version, self.link, lambda: policies.known_head, policies.heard)

    async def _on_join(self, joined: Joined) -> None:
        if not self.link.joins:
            self.activity.say(f"joined {joined.run.name} ({joined.run.mode}, {joined.run.environment})")
        self.heartbeat.beat_s = joined.beat_s
        await self.policies.joined(joined.run, joined.run_envelope, joined.head_manifest, joined.epoch)

    def _on_versions_changed(self) -> None:
        self.worker.wake()
        self._record.change()

    def _under_way(self) -> tuple[int, int]:
        running, unstored = self.worker.under_way
        return running, unstored + self.outbox.pending()

    def _on_finished(self) -> None:
        self._finish(Outcome.FINISHED)

    def _finish(self, outcome: Outcome) -> None:
        self._ending = self._ending or outcome
        self._end.set()

    async def _note_status(self) -> None:
        def failed(error: LocalFault) -> None:
            missing = "room on the disk" if isinstance(error, StorageFull) else "the status file to be written"
            self.activity.waits(Part.DISK, missing, str(error))

        await keep_status(self._paths.status, self.status, lambda: self.heartbeat.beat_s, failed=failed)

    def status(self, *, running: bool = True) -> LocalStatus:
        """Return what the node says about itself now."""
        if self.final_status is not None:
            return self.final_status
        ending = "" if running else f"left ({self._ending or self.link.refused or 'it failed'})"
        return self.report.status(beat_s=self.heartbeat.beat_s, standing=self.heartbeat.standing, ending=ending)
