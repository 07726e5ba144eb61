"""The manifests that a peer trusts: obtained from the coordinator or others, and on disk before anything acts on them.

envelope of a manifest ─► TrustedHead ─┬─► epoch.bin, versions that fall to a higher epoch dropped ─► replaced
envelope of an epoch ───► TrustedHead ─┘       └─► head.bin
"""

import contextlib
from collections.abc import Callable, Sequence

import anyio
from anyio import to_thread

from echo_node.following import Following
from echo_node.peers import Peers
from echo_swarm.checkpoint.blob import ask_manifest
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.checkpoint.trust import TrustedHead
from echo_swarm.clock import Clock
from echo_swarm.directory.base import Directory, head_topic
from echo_swarm.directory.reading import epochs_in, newest_head
from echo_swarm.envelope import Signed
from echo_swarm.epoch import Epoch
from echo_swarm.errors import PeerFault, PeerUnreachable, Unavailable, Untrusted
from echo_swarm.invite import Invite
from echo_swarm.manifest import CheckpointManifest
from echo_swarm.transport.base import Host

MANIFEST_TIMEOUT_S = 10.0

Replaced = Callable[[Epoch, Sequence[int]], None]
"""Told a higher epoch than before, and the versions that were dropped because they fall to it."""


class Heads:
    """See the module."""

    def __init__(
        self,
        *,
        host: Host,
        directory: Directory,
        invite: Invite,
        store: VersionStore,
        trusted: TrustedHead,
        peers: Peers,
        clock: Clock,
        following: Following | None = None,
    ) -> None:
        self._host = host
        self._directory = directory
        self._invite = invite
        self._store = store
        self.trusted = trusted
        """Read it; only what is here changes it."""
        self._peers = peers
        self._clock = clock
        self._following = following
        self.replaced: Replaced = lambda _epoch, _fallen: None
        """Called before anybody can act on what has fallen."""

    async def trust(self, raw: bytes) -> Signed[CheckpointManifest]:
        """Take a manifest as the head. Raises PeerFault (see `TrustedHead.update`), LocalFault."""
        before = self.trusted.epochs.rank
        try:
            signed = self.trusted.update(raw, self._clock.wall_s())
        finally:
            if self.trusted.epochs.rank > before:
                await self._take_epoch()
        await to_thread.run_sync(self._store.save_head, signed)
        return signed

    async def hear(self, epoch: bytes | None) -> None:
        """Take an epoch that somebody told. Raises PeerFault when it is none of this run."""
        if self.trusted.hear(epoch) or self._store.owes_epoch:
            await self._take_epoch()

    async def look(self) -> int | None:
        """Look into the directory: take the epochs there, and return the newest version that is announced.

        Whether the run has another key by now is looked for there, too.
        """
        invite, keys = self._invite, self.trusted.keys
        envelopes = await self._directory.find(head_topic(invite.run))
        if self._following is not None:
            await self._following.look()
            self._following.notice(envelopes)
        for epoch in epochs_in(envelopes, run_id=invite.run, run_key=keys.key):
            with contextlib.suppress(PeerFault):
                await self.hear(epoch)
        if self._store.owes_epoch:
            await self._take_epoch()
        least = self.trusted.epochs.rank
        record = newest_head(envelopes, run_id=invite.run, run_key=keys.key, at_least=least)
        return None if record is None else record.policy_version

    async def _take_epoch(self) -> None:
        signed = self.trusted.epochs.signed
        if signed is None:
            return  # Owed from the time of a key that was succeeded.
        with anyio.CancelScope(shield=True):
            again = self._store.owes_epoch
            fallen = await to_thread.run_sync(self._store.take_epoch, signed)
            if fallen or not again:
                self.replaced(signed.message, fallen)

    async def manifest(self, version: int) -> Signed[CheckpointManifest]:
        """Return a trusted manifest: of `version`, or of a newer head if that is what there is by now.

        Raises:
            Unavailable: nobody has it now.
            LocalFault: it cannot be written.

        """
        head = self.trusted.head
        if head is not None and head.message.policy_version == version:
            kept = self._store.head()
            if kept is None or kept.digest != head.digest:  # The disk was full when it came.
                await to_thread.run_sync(self._store.save_head, head)
            return head
        past = head is not None and version < head.message.policy_version
        kept = self._store.manifest(version) if past else None
        if kept is not None:
            return self.trusted.check_past(kept.raw)
        failures: list[str] = []
        # The coordinator first: it answers without any dialling.
        coordinator = self.trusted.keys.coordinator
        asked = [coordinator]
        for peer in asked:
            try:
                raw = await ask_manifest(
                    self._host, peer, self._invite.run, version if past else None, timeout_s=MANIFEST_TIMEOUT_S
                )
                signed = self.trusted.check_past(raw) if past else await self.trust(raw)
                got = signed.message.policy_version
                if got == version or (got > version and not past):
                    return signed
                failures.append(f"{peer}: has only version {got}")
            except (PeerUnreachable, PeerFault) as e:
                failures.append(f"{peer}: {e}")
                # It may be one that a key signed which this peer knows and we do not.
                if isinstance(e, Untrusted) and self._following is not None and await self._following.ask(peer):
                    asked.append(peer)
            if peer == coordinator:
                asked += await self._peers.holders(version)
        raise Unavailable(f"nobody has the manifest of version {version} ({'; '.join(failures)})")
