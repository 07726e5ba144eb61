"""Keeps the newest model version on this machine, and others that leases ask for.

    heard(version) ◄── replies to lease, push, beat · HeadRecord in the directory
        │
        ▼
    manifest (coordinator or peers) ─► TrustedHead ─► saved ─► Fetcher (coordinator and peers) ─► header ─► usable
                                                                                                       │
    Sampler ◄── changed, files(version) ───────────────────────────────────────────────────────────────┘

Hints only say that there is something to look for; what counts is decided by `TrustedHead`. A download that has become
worth nothing (its version over-stale before it was here) is given up for the newest one; equal pieces are kept.

A higher epoch (another coordinator has taken over) may take versions away again: what the earlier coordinator published
after the other one's base is dropped, files and all, and `takeovers` tells the sampler to load anew.

A version without a file for this node's backend (a conversion that failed, say) is passed over for the newest one that
has one, as long as work of that one is not over-stale.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import anyio
from anyio import to_thread

from echo_node.activity import Activity, Part
from echo_node.backends.base import PolicyFiles
from echo_node.backoff import Backoff
from echo_node.heads import Heads
from echo_node.mirrors import take_mirrors
from echo_node.peers import Peers
from echo_node.swaps import Swaps
from echo_node.transfer_view import TransferView
from echo_node.version_files import NotUsable, VersionFiles
from echo_node.wanted import Wanted
from echo_swarm.checkpoint.delta.route import ManifestOf
from echo_swarm.checkpoint.fetch import Fetcher
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.clock import Clock
from echo_swarm.envelope import Signed
from echo_swarm.epoch import Epoch
from echo_swarm.errors import EchoError, LocalFault, PeerFault, Unavailable
from echo_swarm.manifest import CheckpointManifest, RunManifest

WATCH_S = 60.0
"""How often every node looks there, however busy: whether another coordinator has taken over."""
LOOK_S = 20.0
"""How often an idle node looks into the directory for a head that the coordinator did not tell it."""


class ObtainsFiles(Protocol):
    """Gets a version's files; see `VersionFiles.obtain`."""

    async def obtain(
        self, signed: Signed[CheckpointManifest], run: RunManifest, manifest_of: ManifestOf
    ) -> PolicyFiles:
        """Return them once they are whole, verified and checked."""
        ...


class PolicySync:
    """The versions of one node. One task runs `run`; the sampler reads and asks."""

    def __init__(
        self,
        *,
        store: VersionStore,
        fetcher: Fetcher,
        heads: Heads,
        peers: Peers,
        clock: Clock,
        activity: Activity,
        swaps: Swaps,
        changed: Callable[[], None],
        needed: Callable[[], Collection[int]],
        wanted_files: Wanted | None = None,
        version_files: ObtainsFiles | None = None,
        transfers: TransferView | None = None,
        backoff: Callable[[], Backoff] = lambda: Backoff(first_s=0.5, limit_s=30.0),
        new_epoch: Callable[[], None] = lambda: None,
    ) -> None:
        self._new_epoch = new_epoch
        self._store = store
        self._heads = heads
        self._trusted = heads.trusted
        heads.replaced = self._on_replaced
        self._mirrors = fetcher.mirrors
        self._clock = clock
        self._activity = activity
        self._swaps = swaps
        self._changed = changed
        self._needed = needed
        self._version_files = version_files or VersionFiles(
            fetcher=fetcher,
            store=store,
            peers=peers,
            activity=activity,
            swaps=swaps,
            transfers=transfers or TransferView(),
            wanted=wanted_files or Wanted(),
        )
        self._backoff = backoff
        self._run: RunManifest | None = None
        self._hint: int | None = None
        self._told_expired: int | None = None
        self._files: dict[int, PolicyFiles] = {}
        self._refused: dict[int, str] = {}
        self._wanted: set[int] = set()
        self._in_use: frozenset[int] = frozenset()
        self._retries: dict[int, tuple[Backoff, float]] = {}
        self._wake = anyio.Event()
        self._fetching: int | None = None
        self.takeovers = 0
        """How often versions were dropped because another coordinator took over."""
        self._fetch_scope = anyio.CancelScope()

    # What the sampler uses (see `sampler.Policies`).

    @property
    def usable(self) -> Collection[int]:
        """Versions that could be loaded now."""
        return self._files.keys()

    @property
    def newest(self) -> int | None:
        """The newest of them."""
        return max(self._files, default=None)

    def files(self, version: int) -> PolicyFiles:
        """Return a usable version's files."""
        return self._files[version]

    def want(self, versions: Collection[int]) -> None:
        """Ask for versions that are not usable yet."""
        wanted = {version for version in versions if version not in self._refused}
        if wanted != self._wanted:
            self._wanted = wanted
            self._wake.set()

    def refuse(self, version: int, reason: str) -> None:
        """Note that the backend cannot use a version."""
        self._refused[version] = reason
        self._files.pop(version, None)
        self._wanted.discard(version)
        self._wake.set()
        self._changed()

    @property
    def refused(self) -> Collection[int]:
        """Versions that can never be used here."""
        return self._refused.keys()

    @property
    def left_behind(self) -> bool:
        """Whether every version whose work would still count is unusable here: asking for work is in vain."""
        lowest = self.lowest_useful()
        return (self.newest is None or self.newest < lowest) and self._best() is None

    def set_in_use(self, versions: Collection[int]) -> None:
        """Say which versions must not be deleted."""
        self._in_use = frozenset(versions)

    # What the rest of the node uses.

    @property
    def known_head(self) -> int | None:
        """The newest version that we heard of or trust."""
        return max((v for v in (self._hint, self._trusted.version) if v is not None), default=None)

    @property
    def run_manifest(self) -> RunManifest | None:
        """What the run is; None before the first hello."""
        return self._run

    @property
    def max_staleness(self) -> int:
        """Of the run; 0 before it is known."""
        return self._run.max_staleness if self._run else 0

    def lowest_useful(self) -> int:
        """Return the oldest version of which trajectories are not yet over-stale."""
        return max(0, (self.known_head or 0) - self.max_staleness)

    def heard(self, version: int | None) -> None:
        """Take a hint that a version exists."""
        if version is None or version <= (self.known_head if self.known_head is not None else -1):
            return
        self._hint = version
        self._swaps.heard(version)
        self._tell_gap()
        self._wake.set()
        fetching = self._fetching
        if fetching is not None and fetching not in self._wanted and version - fetching > self.max_staleness:
            self._fetch_scope.cancel()

    async def joined(
        self, run: RunManifest, run_envelope: bytes, head_manifest: bytes | None, epoch: bytes | None = None
    ) -> None:
        """Take what a hello brought: the checked run and epoch, and the head manifest, not yet checked."""
        self._run = run
        take_mirrors(self._mirrors, run, self._activity)
        await to_thread.run_sync(self._store.save_run, run_envelope)
        await self._heads.hear(epoch)
        if head_manifest is not None:
            try:
                self._swaps.heard((await self._heads.trust(head_manifest)).message.policy_version)
            except (PeerFault, LocalFault) as e:
                self._activity.say(f"the coordinator's head is refused ({e}); staying with what is trusted")
        self._wake.set()

    async def run(self) -> None:
        """Follow the head for ever. No fault of peers or of the disk ends it: they are told and tried again."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch)
            await self._follow()

    async def _watch(self) -> None:
        while True:
            await anyio.sleep(WATCH_S)
            self.heard(await self._heads.look())

    async def _follow(self) -> None:
        while True:
            self._wake = anyio.Event()
            version = self._next_target()
            if version is None:
                await self._idle()
                continue
            try:
                await self._obtain(version)
            except (PeerFault, Unavailable, LocalFault) as e:
                self._failed(version, e)

    def _next_target(self) -> int | None:
        """Return what to get now: anything to sample with, then what leases wait for, then the newest."""
        if self._run is None:
            return None
        head = self._best()
        wanted = sorted(version for version in self._wanted if version not in self._files)
        order = [head, *wanted] if self.newest is None else [*wanted, head]
        now_s = self._clock.monotonic_s()
        for version in order:
            if version is None or version in self._files or version in self._refused:
                continue
            if version in self._retries and now_s < self._retries[version][1]:
                continue
            if version == head and self.newest is not None and version <= self.newest:
                continue
            return version
        return None

    def _best(self) -> int | None:
        """Return the newest version that is not refused and whose work would count; the head, as a rule."""
        head = self.known_head
        versions = range(-1 if head is None else head, self.lowest_useful() - 1, -1)
        return next((version for version in versions if version not in self._refused), None)

    def _tell_gap(self) -> None:
        """Say in the status that the head cannot be used here, whether or not there is still work to do."""
        head = self.known_head
        reason = self._refused.get(head) if head is not None else None
        self._activity.note("" if reason is None else reason)
        if reason is not None and self.left_behind:
            self._activity.waits(Part.POLICY, "a version that this backend can use", reason)

    async def _idle(self) -> None:
        """Wait until something is asked for, a retry is due, or it is time to look around."""
        now_s = self._clock.monotonic_s()
        due_s = [at_s - now_s for _, at_s in self._retries.values() if at_s > now_s]
        pause_s = min([LOOK_S, *(max(0.05, s) for s in due_s)])
        with anyio.move_on_after(pause_s):
            await self._wake.wait()
            return
        self.heard(await self._heads.look())
        if self._trusted.is_expired(self._clock.wall_s()) and self._told_expired != self._trusted.version:
            self._told_expired = self._trusted.version
            self._activity.say("the newest version's manifest has expired: the coordinator has gone quiet")

    def _on_replaced(self, epoch: Epoch, fallen: Sequence[int]) -> None:
        """Forget what fell to a higher epoch."""
        self._new_epoch()
        why = "dropped what the one before it had published after the other began"
        self._drop(epoch.base_version, fallen, f"another coordinator has taken over (epoch {epoch.number}): {why}")

    def key_changed(self, fallen: Sequence[int]) -> None:
        """Forget what an earlier key of the run signed and the run does not stand for, and all hints from then."""
        self._drop(
            self._trusted.version, fallen, "dropped what the run's old key had signed and its owner did not confirm"
        )

    def _drop(self, base: int | None, fallen: Sequence[int], said: str) -> None:
        if self._hint is None or base is None or self._hint > base:
            self._hint = base
        fetching = self._fetching
        if fetching is not None and (base is None or fetching > base or fetching in fallen):
            self._fetch_scope.cancel()
        if not fallen:
            return
        self.takeovers += 1
        for version in fallen:
            self._files.pop(version, None)
            self._refused.pop(version, None)
            self._retries.pop(version, None)
        self._activity.say(f"{said} ({', '.join(f'version {version}' for version in fallen)})")
        self._wake.set()
        self._changed()

    def _failed(self, version: int, error: EchoError) -> None:
        backoff, _ = self._retries.get(version, (self._backoff(), 0.0))
        self._retries[version] = (backoff, self._clock.monotonic_s() + backoff.next_s())
        self._activity.waits(Part.POLICY, f"version {version} of the model", str(error))

    async def _obtain(self, version: int) -> None:
        signed = await self._heads.manifest(version)
        found = signed.message.policy_version
        self._swaps.heard(found)
        assert self._run is not None
        self._fetching = found
        try:
            with anyio.CancelScope() as self._fetch_scope:
                files = await self._version_files.obtain(signed, self._run, self._heads.manifest)
                if not self._trusted.falls(signed):
                    self._files[found] = files
        except NotUsable as e:
            # A version never changes, so there is nothing to try again.
            self._pass_over(found, str(e))
            return
        finally:
            self._fetching = None
        self._retries.pop(version, None)
        if found in self._files:
            self._retries = {v: retry for v, retry in self._retries.items() if v > found}
            self._wanted.discard(found)
            self._activity.done(Part.POLICY)
            self._tell_gap()
            self._changed()
            await self._tidy()

    def _pass_over(self, version: int, reason: str) -> None:
        staying = "" if self.newest is None else f"; staying with version {self.newest}"
        self._activity.say(f"{reason}{staying}")
        self.refuse(version, reason)
        self._tell_gap()

    async def _tidy(self) -> None:
        in_use = self._in_use | self._wanted | set(self._needed())
        deleted = await to_thread.run_sync(self._store.retain, self.max_staleness + 1, in_use)
        for version in deleted:
            self._files.pop(version, None)
