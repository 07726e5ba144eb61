"""Which key is the run's: a chain of successions, each signed by the key before and the key after it. No IO.

    key in the invite ──L1──► second key ──L2──► … ──► the run's key now

A link names what the old key signed that stays good, by digest; nothing else that the old key signed counts once a peer
has followed. A peer follows the first chain that it sees and remembers it: another successor of a key that was
succeeded is a rival, refused whoever shows it. Whoever has the old key can sign one: see
docs/adr/0019-successions.md for what that means.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from echo_swarm import codec
from echo_swarm.codec import Limits
from echo_swarm.envelope import OVERHEAD_BYTES, Signed, seal, unseal
from echo_swarm.errors import MalformedMessage, Untrusted
from echo_swarm.identity import Identity, PeerId, peer_id_of
from echo_swarm.wire import U32, Digest, Message, PublicKeyBytes, RunId, Seconds

MAX_SUCCESSIONS = 32
"""Of one run, ever."""
MAX_KEPT = 256
SUCCESSION_LIMITS = Limits(max_bytes=12 * 1024, max_items=MAX_KEPT + 32, max_depth=2)
_ENVELOPE_BYTES = SUCCESSION_LIMITS.max_bytes + OVERHEAD_BYTES
CHAIN_LIMITS = Limits(max_bytes=MAX_SUCCESSIONS * 2 * (_ENVELOPE_BYTES + 64), max_items=256, max_depth=3)


class Rival(Untrusted):
    """Another successor of a key whose successor is known: somebody else has the old key."""


class Succession(Message):
    """A key of a run gives way to the next. Signed by both."""

    run_id: RunId
    sequence: Annotated[int, Field(ge=1, le=MAX_SUCCESSIONS)]
    """1 for the successor of the run's first key."""
    old_key: PublicKeyBytes
    new_key: PublicKeyBytes
    epoch: U32
    """Number of the last epoch under the old key; those under the new one are higher."""
    made_at: Seconds
    """By the coordinator's clock, for people: it decides nothing."""
    kept: Annotated[tuple[Digest, ...], Field(strict=False, max_length=MAX_KEPT)]
    """Digests of the manifests under the old key that stay good: the run's, and those of versions."""


class SuccessionLink(Message):
    """The same Succession in two envelopes."""

    by_old: Annotated[bytes, Field(max_length=_ENVELOPE_BYTES)]
    by_new: Annotated[bytes, Field(max_length=_ENVELOPE_BYTES)]


class KeyChain(Message):
    """All successions of a run, the first one first; on the wire and on disk."""

    links: Annotated[tuple[SuccessionLink, ...], Field(strict=False, max_length=MAX_SUCCESSIONS)]

    @property
    def raw(self) -> bytes:
        """The canonical encoding."""
        return codec.encode(self.to_wire())


def read_chain(raw: bytes) -> KeyChain:
    """Return an encoded chain, not yet checked. Raises MalformedMessage."""
    return KeyChain.from_wire(codec.decode(raw, CHAIN_LIMITS))


def make_link(old: Identity, new: Identity, succession: Succession) -> SuccessionLink:
    """Sign a succession with both keys."""
    return SuccessionLink(by_old=seal(old, succession), by_new=seal(new, succession))


@dataclass(frozen=True, slots=True)
class CheckedChain:
    """A chain whose signatures and order hold. Whether it is the run's, `RunKeys` says."""

    chain: KeyChain
    links: tuple[Signed[Succession], ...]

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The keys in order; none of an empty chain."""
        if not self.links:
            return ()
        return (self.links[0].message.old_key, *(link.message.new_key for link in self.links))


def check_chain(chain: KeyChain, *, run_id: str) -> CheckedChain:
    """Check a chain in itself.

    Raises:
        MalformedMessage: a link is none, or its two halves differ, or the order is wrong, or a key comes twice.
        BadSignature: a signature does not fit.
        Untrusted: another key signed a half, or it is about another run.

    """
    links = tuple(_opened(link, run_id) for link in chain.links)
    checked = CheckedChain(chain, links)
    for number, link in enumerate(links, start=1):
        if link.message.sequence != number:
            raise MalformedMessage(f"succession {link.message.sequence} stands where {number} belongs")
        if number > 1 and link.message.old_key != links[number - 2].message.new_key:
            raise MalformedMessage(f"succession {number} does not begin with the key that the one before ended with")
    if len(set(checked.keys)) != len(checked.keys):
        raise MalformedMessage("a chain of successions leads back to a key that was succeeded")
    return checked


def _opened(link: SuccessionLink, run_id: str) -> Signed[Succession]:
    by_old = unseal(link.by_old, Succession, SUCCESSION_LIMITS)
    by_new = unseal(link.by_new, Succession, SUCCESSION_LIMITS)
    if by_old.digest != by_new.digest:
        raise MalformedMessage("the two halves of a succession differ")
    if (by_old.signer, by_new.signer) != (by_old.message.old_key, by_old.message.new_key):
        raise Untrusted("a succession signed by other keys than those it names")
    if by_old.message.run_id != run_id:
        raise Untrusted(f"a succession of run {by_old.message.run_id}, expected {run_id}")
    return by_old


class RunKeys:
    """The keys of a run as this peer knows them. What it has followed, it never leaves.

    Args:
        run_id: the run.
        pinned: the key in the invite. A chain counts only if it has this key, in whatever place: what comes before it
            was signed by its holder too.

    """

    def __init__(self, run_id: str, pinned: bytes) -> None:
        self.run_id = run_id
        self.pinned = pinned
        self._known = CheckedChain(KeyChain(links=()), ())

    @property
    def chain(self) -> KeyChain:
        """What is known, to be handed on."""
        return self._known.chain

    @property
    def key(self) -> bytes:
        """The run's key now."""
        return self._known.keys[-1] if self._known.links else self.pinned

    @property
    def coordinator(self) -> PeerId:
        """The coordinator's peer id."""
        return peer_id_of(self.key)

    @property
    def last(self) -> Succession | None:
        """The newest succession."""
        return self._known.links[-1].message if self._known.links else None

    def after(self, key: bytes) -> Succession | None:
        """Return how a key of the run was succeeded; None of the newest, and of any other key."""
        return next((link.message for link in self._known.links if link.message.old_key == key), None)

    def has_been(self, peer: str) -> bool:
        """Say whether that is the peer id of one of the run's keys."""
        return any(peer_id_of(key) == peer for key in (self.pinned, *self._known.keys))

    def address(self, address: str) -> str:
        """Return a multiaddress; one that names an earlier key of the run, with the key of now."""
        where, _, peer = address.rpartition("/p2p/")
        return f"{where}/p2p/{self.coordinator}" if self.has_been(peer) else address

    def judge(self, chain: KeyChain) -> CheckedChain | None:
        """Return a chain that leads on from what is known, for `adopt`; None when it says nothing new.

        Raises:
            MalformedMessage, BadSignature: see `check_chain`.
            Rival: it names another successor of a key whose successor is known.
            Untrusted: it is of another run, or does not have the key of the invite.

        """
        checked = check_chain(chain, run_id=self.run_id)
        for known, told in zip(self._known.links, checked.links, strict=False):
            if known.digest != told.digest:
                raise Rival(_rival(known.message, told.message))
        if len(checked.links) <= len(self._known.links):
            return None
        if self.pinned not in checked.keys:
            raise Untrusted("a chain of successions without the key in the invite")
        return checked

    def adopt(self, checked: CheckedChain) -> None:
        """Follow what `judge` returned. It must be durable before."""
        self._known = checked

    def check(self, signer: bytes, digest: bytes) -> None:
        """Raise Untrusted unless what has this digest counts under that key."""
        if signer == self.key:
            return
        gone = self.after(signer)
        if gone is None:
            raise Untrusted("signed by another key than the run's")
        if digest not in gone.kept:
            raise Untrusted(
                f"signed by a key that the run's owner replaced on {day(gone.made_at)} ({peer_id_of(signer)}): whoever "
                "signs with it is not the run"
            )

    def accepts(self, signer: bytes, digest: bytes) -> bool:
        """Say the same as `check`."""
        try:
            self.check(signer, digest)
        except Untrusted:
            return False
        return True


def day(at_s: float) -> str:
    """Return a time for people."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at_s))


def _rival(known: Succession, told: Succession) -> str:
    return (
        f"a second successor of the run's key was shown: {peer_id_of(told.new_key)}, signed {day(told.made_at)}. This "
        f"peer stays with {peer_id_of(known.new_key)}, of {day(known.made_at)}, which it saw first. Somebody else has "
        "the old key; if in doubt which one is the owner's, join with a fresh invite from the owner"
    )


def kept_of(run_manifest: bytes | None, versions: Sequence[tuple[int, bytes]]) -> tuple[bytes, ...]:
    """Return what a succession keeps of digests: the run's manifest, version 0, then the newest versions.

    Args:
        run_manifest: digest of the run's manifest.
        versions: (version, digest) of each manifest, ascending.

    """
    first = [digest for version, digest in versions if version == 0]
    newest = [digest for version, digest in reversed(versions) if version > 0]
    found = [*([] if run_manifest is None else [run_manifest]), *first, *newest]
    return tuple(found[:MAX_KEPT])
