"""The error tree. The type says whose fault it is; `exit_code` is what a command line returns.

EchoError                     1   anything of ours
├── UsageError                2   the person gave something that cannot work; the message says what to change
│   ├── SettingsError         2
│   └── InviteError           2
├── Unavailable                   somebody else is not there (now); trying later may help
│   ├── BootstrapFailed       3   no bootstrap address answered; names each and why
│   ├── PeerUnreachable       4   one named peer did not answer
│   │   ├── Unanswered        4   it was reached, and a call was not answered in time
│   │   ├── HeldBack          4   it was tried a moment ago in vain, and is not tried again yet
│   │   └── AnotherPeer       4   another one answers at its address
│   └── RunNotFound           4   reached a peer, but it does not serve this run
├── LocalFault                    this machine cannot do it
│   ├── DaemonFailed          5   the libp2p helper did not start or died
│   ├── BackendFailed         6   the sampling backend, the trainer or a scorer failed
│   ├── StorageFull           7   not enough room, with both figures
│   ├── IdentityInUse         9   this key is already live elsewhere
│   └── TakenOver            11   another coordinator with this run's key has begun later
├── Banned                   10   the run's owner wants no work from this key
└── PeerFault                     a peer sent something wrong; never ends a process
    ├── MalformedMessage          undecodable, mistyped, out of range, too large
    ├── BadSignature
    ├── Untrusted                 validly signed, but refused (rollback, wrong run, wrong key, expired)
    └── RemoteError               the peer answered with an error code
"""

from typing import ClassVar


class EchoError(Exception):
    """Base of all errors raised on purpose by this project."""

    exit_code: ClassVar[int] = 1
    advice: ClassVar[str] = ""
    """What to do next, said once, when a command ends with it: for causes whose message is repeated while it tries."""


class UsageError(EchoError):
    """The person gave something that cannot work."""

    exit_code = 2


class SettingsError(UsageError):
    """A run's settings do not fit together, or one is out of range."""


class InviteError(UsageError):
    """The invite cannot be read."""


class Unavailable(EchoError):
    """Somebody else is not there; trying later may help."""

    exit_code = 4


class BootstrapFailed(Unavailable):
    """No bootstrap address answered. `failures` maps each address to its reason.

    `held_back` are those that were not tried this time (see HeldBack): their reasons say only that.
    """

    exit_code = 3
    advice = "is this machine online? If it is, the run may have stopped or moved: ask who gave you the invite"

    def __init__(self, failures: dict[str, str], *, held_back: frozenset[str] = frozenset()) -> None:
        self.failures = failures
        self.held_back = held_back
        listed = "; ".join(f"{address}: {reason}" for address, reason in failures.items())
        super().__init__(f"none of {len(failures)} bootstrap addresses answered ({listed})")


class PeerUnreachable(Unavailable):
    """One named peer did not answer, or its connection was lost."""


class Unanswered(PeerUnreachable):
    """A call was sent to a peer, and no answer came in time."""


class HeldBack(PeerUnreachable):
    """The host has just tried this peer in vain, and does not yet try again: why it failed, an earlier error said."""


class AnotherPeer(PeerUnreachable):
    """At the address of a peer another one answers. `found` is the peer id that it proved to have."""

    def __init__(self, address: str, found: str) -> None:
        self.address = address
        self.found = found
        super().__init__(f"{address}: another identity answers there")


class RunNotFound(Unavailable):
    """A peer was reached but does not serve this run."""


class LocalFault(EchoError):
    """What is asked cannot be done on this machine."""


class DaemonFailed(LocalFault):
    """The libp2p helper process did not start or died."""

    exit_code = 5


class BackendFailed(LocalFault):
    """A child process (sampling backend, trainer, scorer) failed; carries its own last message."""

    exit_code = 6


class StorageFull(LocalFault):
    """Not enough room on disk, or over the quota; the message has both figures."""

    exit_code = 7


class IdentityInUse(LocalFault):
    """The key of this peer is already live in another process."""

    exit_code = 9


class Banned(EchoError):
    """The run's owner has banned this node's key."""

    exit_code = 10


class TakenOver(LocalFault):
    """Another coordinator with this run's key has begun later, or is live where this one would begin."""

    exit_code = 11


class PeerFault(EchoError):
    """A peer sent something wrong."""


class MalformedMessage(PeerFault):
    """Undecodable, mistyped, out of range or too large."""


class BadSignature(PeerFault):
    """A signature does not fit."""


class Untrusted(PeerFault):
    """Validly signed, but refused: rollback, wrong run, wrong key, expired."""


class RemoteError(PeerFault):
    """The peer answered with an error. `code` is one word, for programs; `message` is without it."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        self.message = message
        super().__init__(f"{code}: {message}")
