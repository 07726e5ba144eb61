"""Who a peer is: one Ed25519 key. Its libp2p peer id is the same under every host implementation.

The key file holds the 32-byte seed as 64 hex digits and a newline, so that a person can back it up by hand. It is
created with mode 0600 and refused when others can read it.
"""

import contextlib
import functools
import hashlib
import os
import secrets
import stat
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import NewType, Self

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from echo_swarm.errors import BadSignature, UsageError

PeerId = NewType("PeerId", str)
"""Base58 libp2p peer id of an Ed25519 key, such as 12D3KooW…"""

_PEER_ID_PREFIX = b"\x00\x24\x08\x01\x12\x20"
"""Identity multihash of a protobuf {1: Ed25519, 2: 32-byte key} (libp2p peer-ids specification)."""
_SHORT_BYTES = 4096
"""Records and heads; longer messages come once."""
_MAX_GOOD = 4096
_good: OrderedDict[bytes, None] = OrderedDict()
"""Digests of (key, signature, message) that fit, oldest first."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A private key with its public forms."""

    private_key: Ed25519PrivateKey

    @classmethod
    def generate(cls) -> Self:
        """Return a fresh identity."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Self:
        """Return the identity of a 32-byte seed."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @property
    def seed(self) -> bytes:
        """The 32 secret bytes."""
        return self.private_key.private_bytes_raw()

    @property
    def public_key(self) -> bytes:
        """The 32 public bytes."""
        return self.private_key.public_key().public_bytes_raw()

    @property
    def peer_id(self) -> PeerId:
        """The libp2p peer id."""
        return peer_id_of(self.public_key)

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature of `message`."""
        return self.private_key.sign(message)


@functools.lru_cache(maxsize=4096)
def peer_id_of(public_key: bytes) -> PeerId:
    """Return the peer id of a 32-byte public key."""
    return PeerId(base58.b58encode(_PEER_ID_PREFIX + public_key).decode())


def public_key_of(peer_id: str) -> bytes:
    """Return the 32-byte public key inside an Ed25519 peer id. Raises UsageError for anything else."""
    try:
        raw = base58.b58decode(peer_id) if len(peer_id) <= 64 else b""
    except ValueError:
        raw = b""
    key = raw[len(_PEER_ID_PREFIX) :]
    # The comparison refuses a second spelling: the library ignores white space at the end.
    if len(raw) != 38 or peer_id_of(key) != peer_id:
        raise UsageError(f"{peer_id[:64]!r} is no Ed25519 peer id (12D3KooW…)")
    return key


def verify(public_key: bytes, message: bytes, signature: bytes) -> None:
    """Raise BadSignature unless `signature` is that of `message` under `public_key`.

    A short one that was good before is recognised: each search of the directory brings every record several times.
    """
    short = len(message) <= _SHORT_BYTES and len(public_key) == 32 and len(signature) == 64
    seen = hashlib.sha256(b"".join((public_key, signature, message))).digest() if short else None
    if seen in _good:
        return
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError) as e:
        raise BadSignature("signature does not fit its key and content") from e
    if seen is not None:
        _good[seen] = None
        if len(_good) > _MAX_GOOD:
            _good.popitem(last=False)


def load_or_create(path: Path) -> tuple[Identity, bool]:
    """Read the key at `path`, or make one there. Returns the identity and whether it is new.

    Raises:
        UsageError: the file is no key, others may read it, or it cannot be created.

    """
    if path.exists():
        return load(path), False
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as e:
        raise UsageError(f"cannot create the folder {path.parent}: {e.strerror}") from e
    identity = Identity.generate()
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        _write_key(temporary, identity)
        # The name appears with its content or not at all, and never replaces a key that is already there.
        try:
            os.link(temporary, path)
        except FileExistsError:
            raise
        except OSError:
            # A file system without hard links: a kill in this moment leaves a damaged key, which nobody has seen yet.
            _write_key(path, identity)
    except FileExistsError:
        # Another process of this person made it between our look and our attempt.
        return load(path), False
    except OSError as e:
        raise UsageError(f"cannot create the key {path}: {e.strerror}") from e
    finally:
        temporary.unlink(missing_ok=True)
    return identity, True


def _write_key(path: Path, identity: Identity) -> None:
    """Make a file that is not there yet. Raises FileExistsError, OSError."""
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        try:
            file.write(identity.seed.hex() + "\n")
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            path.unlink()  # Ours, and half a key.
            raise


def load(path: Path) -> Identity:
    """Read the key at `path`. Raises UsageError when it is missing, damaged or open to others."""
    try:
        mode = path.stat().st_mode
        text = path.read_text(encoding="ascii", errors="replace")[:256].strip()
    except OSError as e:
        raise UsageError(f"cannot read the key {path}: {e.strerror}") from e
    if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
        raise UsageError(f"the key {path} can be read by others; run: chmod 600 {path}")
    seed = b""
    with contextlib.suppress(ValueError):
        seed = bytes.fromhex(text)
    if len(seed) != 32:
        raise UsageError(f"{path} holds no key (expected 64 hex digits); restore it from your backup or move it away")
    return Identity.from_seed(seed)
