"""Which manifests count. Bytes in, a verified object or an exception out; no IO.

An envelope becomes the trusted head only if, in this order,

1. it is no larger than MANIFEST_LIMITS allow,
2. it decodes canonically,
3. it is of the type CheckpointManifest,
4. its signature fits,
5. the signer is the run's key (the one in the invite, or its newest successor), or a key that was succeeded, and the
   succession names this very manifest (`succession.RunKeys.check`),
6. it is about this run,
7. no two of its artifacts have one file name (`Artifact.file_name`); adapters and deltas, and no others, name a base;
   deltas, and no others, a target in the same manifest and a version below,
8. no higher epoch that this peer has heard of excludes it (`epoch.Epoch.refuses`), nor does it lie below its base,
9. its version is not below the highest ever trusted: no rollback, also not after a restart, also not when the newer
   manifest has expired,
10. at the same version its digest is the same: one version, one content.

So the newest signed version of the highest epoch wins, whatever the order of arrival and the expiry times. A head that
falls to a higher epoch is no head any more, and what 9 and 10 compare with is gone. Not checked, on purpose:

- Expiry: it means that the coordinator has gone quiet, which is worth a warning; an older version is never better.
- `issued_at`: clocks differ, and time never decides between versions.
- `parent_digest`: a delta's base is bound by the delta's own `base_digest`, and a run that was restored from a backup
  must be able to move on with a higher version.
"""

from collections.abc import Iterable

from echo_swarm.envelope import Signed, unseal
from echo_swarm.epoch import NO_EPOCH, HighestEpoch, Rank, rank_of
from echo_swarm.errors import MalformedMessage, PeerFault, Untrusted
from echo_swarm.manifest import (
    ADAPTER_KINDS,
    DELTA_TARGETS,
    MANIFEST_LIMITS,
    Artifact,
    ArtifactKind,
    CheckpointManifest,
    RunManifest,
)
from echo_swarm.succession import RunKeys

_OVER_A_BASE = (*ADAPTER_KINDS, ArtifactKind.DELTA)


class TrustedHead:
    """The newest manifest that this peer trusts. Only ever moves up.

    Args:
        run_id: the run's id, from the invite.
        publisher_key: the run's public key, from the invite.
        persisted: envelopes found on this peer's disk (`VersionStore.known_manifests`), in any order; the newest
            good one is where trust starts. Damaged ones are described in `damaged` and otherwise ignored.
        epoch: the envelope of the highest epoch on this peer's disk (`VersionStore.epoch`), if there is one.
        keys: the run's keys, as far as they are known; None for `publisher_key` alone.

    """

    def __init__(
        self,
        *,
        run_id: str,
        publisher_key: bytes,
        persisted: Iterable[bytes] = (),
        epoch: bytes | None = None,
        keys: RunKeys | None = None,
    ) -> None:
        self._run_id = run_id
        self.keys = keys or RunKeys(run_id, publisher_key)
        """The run's keys. After they changed, call `keys_changed`."""
        self._head: Signed[CheckpointManifest] | None = None
        self.epochs = HighestEpoch(
            run_id=run_id, run_key=publisher_key, persisted=() if epoch is None else (epoch,), keys=self.keys
        )
        """The highest epoch of the run that this peer has heard of."""
        damaged: list[str] = []
        good: list[Signed[CheckpointManifest]] = []
        for raw in persisted:
            try:
                good.append(self._checked(raw))
                self.epochs.hear(self._epoch_of(good[-1]))
            except PeerFault as e:
                damaged.append(str(e))
        for signed in good:
            if not self.falls(signed) and (self.version is None or signed.message.policy_version > self.version):
                self._head = signed
        self.damaged = tuple(damaged)
        """What was wrong with persisted envelopes, for a warning."""

    @property
    def head(self) -> Signed[CheckpointManifest] | None:
        """The newest trusted manifest."""
        return self._head

    @property
    def version(self) -> int | None:
        """The highest trusted version."""
        return None if self._head is None else self._head.message.policy_version

    def hear(self, raw: bytes | None) -> bool:
        """Take the envelope of an epoch, from wherever. Returns whether it is a new, higher one.

        Persist it (`VersionStore.take_epoch`) before acting on it. Raises MalformedMessage, BadSignature, Untrusted.
        """
        if not self.epochs.hear(raw):
            return False
        if self._head is not None and self.falls(self._head):
            self._head = None
        return True

    def falls(self, signed: Signed[CheckpointManifest]) -> bool:
        """Say whether a checked manifest falls to the highest epoch: a coordinator published it that was replaced."""
        return self.epochs.refuses(self._rank_of(signed), signed.message.policy_version, signed.digest)

    def keys_changed(self) -> bool:
        """Give up a head that counts no more under the run's keys. Returns whether there was one."""
        falls = self._head is not None and not self.keys.accepts(self._head.signer, self._head.digest)
        if falls:
            self._head = None
        return falls

    def update(self, raw: bytes, now_s: float) -> Signed[CheckpointManifest]:
        """Check an envelope by the rules above and make it the head.

        The same manifest again is fine and changes nothing. Persist what is returned (`VersionStore.save_head`) before
        acting on it. `now_s` is wall-clock time; it decides nothing here, see `is_expired`.

        Raises:
            MalformedMessage: rules 1, 2, 3, 7.
            BadSignature: rule 4.
            Untrusted: rules 5, 6, 8 to 10.

        """
        del now_s
        signed = self._checked(raw)
        self.hear(self._epoch_of(signed))
        self._check_epoch(signed)
        version = signed.message.policy_version
        epoch = self.epochs.signed
        base = None if epoch is None else epoch.message.base_version
        if base is not None and version < base and (self._head is None or signed.digest != self._head.digest):
            raise Untrusted(f"version {version} was offered, and the newest coordinator began with version {base}")
        if self._head is not None:
            highest = self._head.message.policy_version
            if version < highest:
                raise Untrusted(f"rollback: version {version} was offered, version {highest} is already trusted")
            if version == highest and signed.digest != self._head.digest:
                raise Untrusted(f"equivocation: a second, different manifest for version {version}")
            if version == highest:
                return self._head
        self._head = signed
        return signed

    def check_past(self, raw: bytes) -> Signed[CheckpointManifest]:
        """Check a manifest of a version at or below the head, for work that names one. Never moves the head.

        Raises:
            MalformedMessage, BadSignature, Untrusted: rules 1 to 8 (it may lie below the base) and 10, or it is above
                the head.

        """
        signed = self._checked(raw)
        self._check_epoch(signed)
        version = signed.message.policy_version
        if self._head is None or version > self._head.message.policy_version:
            raise Untrusted(f"version {version} is above the trusted head {self.version}")
        if version == self._head.message.policy_version and signed.digest != self._head.digest:
            raise Untrusted(f"equivocation: a second, different manifest for version {version}")
        return signed

    def is_expired(self, now_s: float) -> bool:
        """Return whether the head's time has run out: the coordinator has gone quiet. A warning, nothing more."""
        return self._head is not None and self._head.message.expires_at <= now_s

    def _epoch_of(self, signed: Signed[CheckpointManifest]) -> bytes | None:
        """Return a manifest's epoch; none under a key that was succeeded, whose epochs are below all others."""
        return signed.message.epoch if signed.signer == self.keys.key else None

    def _rank_of(self, signed: Signed[CheckpointManifest]) -> Rank:
        epoch = self._epoch_of(signed)
        return NO_EPOCH if epoch is None else rank_of(epoch, run_id=self._run_id, run_key=self.keys.key)

    def _check_epoch(self, signed: Signed[CheckpointManifest]) -> None:
        if self.falls(signed):
            assert self.epochs.signed is not None
            raise Untrusted(
                f"version {signed.message.policy_version} was published by a coordinator that another one has "
                f"replaced (epoch {self.epochs.signed.message.number})"
            )

    def _checked(self, raw: bytes) -> Signed[CheckpointManifest]:
        signed = unseal(raw, CheckpointManifest, MANIFEST_LIMITS)
        self.keys.check(signed.signer, signed.digest)
        _check_run(signed.message.run_id, self._run_id)
        names = [artifact.file_name for artifact in signed.message.artifacts]
        if len(set(names)) != len(names):
            raise MalformedMessage(f"version {signed.message.policy_version} has two artifacts with one file name")
        for artifact in signed.message.artifacts:
            if (artifact.base_digest is None) == (artifact.kind in _OVER_A_BASE):
                wrong = "no base" if artifact.base_digest is None else "a base"
                raise MalformedMessage(
                    f"version {signed.message.policy_version} has a file of kind {artifact.kind.value} with {wrong}"
                )
        for delta in signed.message.artifacts:
            _check_delta(signed.message, delta)
        self._rank_of(signed)
        return signed


def _check_delta(manifest: CheckpointManifest, delta: Artifact) -> None:
    """Only a delta has a target, in its own version, and a base in an earlier one."""
    fields = (delta.target_digest, delta.base_version)
    if delta.kind is not ArtifactKind.DELTA:
        fits = fields == (None, None)
    else:
        target = next((a for a in manifest.artifacts if a.digest == delta.target_digest), None)
        fits = target is not None and target.kind in DELTA_TARGETS and target.precision == delta.precision
        fits = fits and delta.base_version is not None and delta.base_version < manifest.policy_version
    if not fits:
        raise MalformedMessage(
            f"version {manifest.policy_version} has a {delta.kind.value} with a wrong base or target"
        )


def check_run_manifest(
    raw: bytes, *, run_id: str, publisher_key: bytes, keys: RunKeys | None = None
) -> Signed[RunManifest]:
    """Check the description of a run against its invite. Order: envelope, key, run, then what must fit together.

    Raises:
        MalformedMessage, BadSignature: the envelope is wrong, or the fields contradict each other.
        Untrusted: another key signed it, or it is about another run.

    """
    signed = unseal(raw, RunManifest, MANIFEST_LIMITS)
    run = signed.message
    (keys or RunKeys(run_id, publisher_key)).check(signed.signer, signed.digest)
    _check_run(run.run_id, run_id)
    if run.publisher_key != signed.signer:
        raise Untrusted("the run manifest names another publisher key than the one that signed it")
    if (run.mode == "sequential") != (run.max_staleness == 0):
        raise MalformedMessage(f"mode {run.mode!r} does not go with max_staleness {run.max_staleness}")
    if max(run.end_token_ids) >= run.vocabulary_size:
        raise MalformedMessage("an end token lies outside the vocabulary")
    return signed


def _check_run(run_id: str, expected_run: str) -> None:
    if run_id != expected_run:
        raise Untrusted(f"about run {run_id}, expected {expected_run}")
