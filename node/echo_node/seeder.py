"""The wiring of a seeder: a peer that stores and serves versions, and neither samples nor asks for work.

                coordinator                                           other nodes, who also find it in the DHT
        hello ▲   beat ▲ │ head                                             pieces ▲ │ pieces
              │        │ ▼                                                         │ ▼
             Link   Heartbeat ── heard ──► PolicySync ◄── VersionStore ◄── BlobServer · Fetcher
              └──────── joined ──────────►     └─ SeederFiles: all files of each version, within the quota

    who waits        for                                 bounded by
    ───────────────  ──────────────────────────────────  ─────────────────────────────────────────────
    Link, Heartbeat  the coordinator                     nothing once the run is known: told, with back-off
    PolicySync       hints, retries                      one download at a time
    leaving          the goodbye                         FAREWELL_S

A seeder that was here before begins to serve at once, whether or not the coordinator answers: what it needs to know of
the run lies in its store. It ends when the run is finished or somebody calls `stop`.
"""

import contextlib
from dataclasses import dataclass

import anyio

from echo_node.activity import Activity, Emit, Part
from echo_node.allegiance import make_allegiance
from echo_node.bare_errors import bare_errors
from echo_node.config import NodeConfig, StatePaths, run_dirs
from echo_node.heartbeat import Heartbeat
from echo_node.link import Joined, Link
from echo_node.mirrors import mirrors_of
from echo_node.node import Outcome
from echo_node.own_record import OwnRecord, keep_status
from echo_node.peers import near_of
from echo_node.policy_sync import PolicySync
from echo_node.recall import recall_run
from echo_node.seeder_files import ALL_KINDS, SeederFiles
from echo_node.seeder_report import SeederReport
from echo_node.slumber import watch_for_sleep
from echo_node.status import LocalStatus, write_status
from echo_node.swaps import Swaps
from echo_node.transfer_view import TransferView
from echo_swarm.checkpoint.fetch import Fetcher, FetchSettings
from echo_swarm.checkpoint.interest import InterestBook
from echo_swarm.checkpoint.rate import bytes_per_s
from echo_swarm.checkpoint.serve import BlobServer
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.clock import Clock
from echo_swarm.directory.base import Directory
from echo_swarm.errors import LocalFault, MalformedMessage, PeerUnreachable, RemoteError
from echo_swarm.identity import Identity
from echo_swarm.invite import Invite
from echo_swarm.transport.base import Host
from echo_swarm.work import Release, Released

FAREWELL_S = 2.0
MAX_UPLOADS = 32
"""Pieces at the same time: serving is all that it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeederSeams:
    """What a seeder stands on."""

    host: Host
    directory: Directory
    identity: Identity
    clock: Clock
    emit: Emit


class Seeder:
    """One seeder in one run."""

    def __init__(self, config: NodeConfig, invite: Invite, seams: SeederSeams) -> None:
        self._config = config
        self._invite = invite
        self._seams = seams
        self._paths = StatePaths(state_dir=config.state_dir, run_id=invite.run)
        self._ending: Outcome | None = None
        self._end = anyio.Event()
        self.final_status: LocalStatus | None = None
        """Set when `run` has ended."""
        self.activity = Activity(seams.clock, seams.emit)
        self.transfers = TransferView()
        self.store = VersionStore(
            run_dirs(config.state_dir), invite.run, quota_bytes=config.max_store_bytes, spare_newest=False
        )
        near = near_of(config, invite)
        self._trust = make_allegiance(seams, invite, self._paths, self.store, self.activity, near)
        self._peers = self._trust.peers
        interest = InterestBook()
        self.fetcher = Fetcher(
            seams.host,
            self.store,
            coordinator=self._trust.keys.coordinator,
            settings=FetchSettings(max_bytes_per_s=bytes_per_s(config.max_download_mbit), near=near),
            interest=interest,
        )
        self.fetcher.mirrors = mirrors_of(config, invite)
        self.blobs = BlobServer(
            seams.host,
            self.store,
            interest=interest,
            max_uploads=MAX_UPLOADS,
            max_bytes_per_s=bytes_per_s(config.max_upload_mbit),
        )
        self.policies = self._make_policies()
        self.link = self._make_link()
        self._trust.attach(self.fetcher, self.policies, self.link)
        self.heartbeat = Heartbeat(
            link=self.link,
            clock=seams.clock,
            activity=self.activity,
            compose=lambda: self.report.beat(),
            heard=self.policies.heard,
            renewed=lambda _named, _expired, _sent_s: None,
            probe_due=lambda: None,
            run_finished=lambda: self._finish(Outcome.FINISHED),
        )
        self.report = self._make_report()
        self._record = OwnRecord(seams.directory, invite.run, self.report.peer_record)

    def _make_policies(self) -> PolicySync:
        return PolicySync(
            store=self.store,
            fetcher=self.fetcher,
            heads=self._trust.heads,
            new_epoch=lambda: self.link.check_epoch(),
            peers=self._peers,
            clock=self._seams.clock,
            activity=self.activity,
            swaps=Swaps(self._seams.clock, lambda _line: None),
            changed=self._on_versions_changed,
            needed=tuple,
            version_files=SeederFiles(
                fetcher=self.fetcher,
                store=self.store,
                peers=self._peers,
                activity=self.activity,
                kinds=self._config.hold or ALL_KINDS,
                transfers=self.transfers,
            ),
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
            # What is here already can be served without the coordinator.
            patience_s=self._config.patience(known=self.store.run() is not None),
        )

    def _make_report(self) -> SeederReport:
        return SeederReport(
            invite=self._invite,
            keys=self._trust.keys,
            identity=self._seams.identity,
            host=self._seams.host,
            clock=self._seams.clock,
            activity=self.activity,
            policies=self.policies,
            store=self.store,
            fetcher=self.fetcher,
            transfers=self.transfers,
            blobs=self.blobs,
            link=self.link,
            started_at=self._seams.clock.wall_s(),
            started_up_s=self._seams.clock.monotonic_s(),
        )

    def stop(self) -> None:
        """Leave in an orderly way."""
        self._finish(Outcome.STOPPED)

    async def run(self) -> Outcome:
        """Store and serve until the run is over or `stop` is called.

        Raises:
            RunNotFound, PeerUnreachable: see `Link.run`.
            IdentityInUse: another process with this key is live.
            Banned: the run's owner wants no work from this key.
            PeerFault: what the coordinator says about the run does not fit the invite.

        """
        try:
            with bare_errors():
                async with self.blobs, anyio.create_task_group() as tasks:
                    await recall_run(self.store, self._invite, self._trust.keys, self.policies, self.activity)
                    self.activity.doing("serving")
                    parts = (
                        self.policies.run,
                        self.link.run,
                        self.heartbeat.run,
                        self._record.keep_announced,
                        self._note_status,
                    )
                    for part in parts:
                        tasks.start_soon(part)
                    tasks.start_soon(self._peers.keep_known, self._paths.peers)
                    tasks.start_soon(watch_for_sleep, self._seams.clock, self.link.woken)
                    await self._end.wait()
                    self.activity.doing("leaving")
                    self.heartbeat.be_quiet()
                    await self._say_goodbye()
                    tasks.cancel_scope.cancel()
        finally:
            self.final_status = self.status(running=False)
            with contextlib.suppress(LocalFault):
                write_status(self._paths.status, self.final_status)
        assert self._ending is not None
        return self._ending

    def status(self, *, running: bool = True) -> LocalStatus:
        """Return what the seeder says about itself now."""
        if self.final_status is not None:
            return self.final_status
        ending = "" if running else f"left ({self._ending or self.link.refused or 'it failed'})"
        return self.report.status(beat_s=self.heartbeat.beat_s, standing=self.heartbeat.standing, ending=ending)

    async def _on_join(self, joined: Joined) -> None:
        if not self.link.joins:
            self.activity.say(f"joined {joined.run.name} as a seeder")
        self.heartbeat.beat_s = joined.beat_s
        await self.policies.joined(joined.run, joined.run_envelope, joined.head_manifest, joined.epoch)

    def _on_versions_changed(self) -> None:
        self.activity.doing("serving")
        self._record.change()

    def _finish(self, outcome: Outcome) -> None:
        self._ending = self._ending or outcome
        self._end.set()

    async def _say_goodbye(self) -> None:
        goodbye = Release(lease_ids=(), cause="leaving", leaving=True)
        if self.link.is_up:
            with anyio.move_on_after(FAREWELL_S), contextlib.suppress(PeerUnreachable, RemoteError, MalformedMessage):
                await self.link.call("release", goodbye, Released)

    async def _note_status(self) -> None:
        await keep_status(
            self._paths.status,
            self.status,
            lambda: self.heartbeat.beat_s,
            failed=lambda error: self.activity.waits(Part.DISK, "the status file to be written", str(error)),
            written=lambda: self.activity.done(Part.DISK),
        )
