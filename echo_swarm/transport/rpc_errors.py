"""What a server tells a caller when a call fails."""

from echo_swarm.errors import (
    BadSignature,
    EchoError,
    MalformedMessage,
    RemoteError,
    RunNotFound,
    Unavailable,
    Untrusted,
    UsageError,
)
from echo_swarm.transport.frames import Body, Kind, encode_frame


def error_code(error: EchoError) -> str:
    """Return the word that an error frame carries for `error`; a handler may raise RemoteError to choose its own."""
    if isinstance(error, RemoteError):
        return error.code[:64]
    codes: tuple[tuple[type[EchoError], str], ...] = (
        (MalformedMessage, "malformed"),
        (BadSignature, "bad_signature"),
        (Untrusted, "untrusted"),
        (RunNotFound, "unknown_run"),
        (Unavailable, "unavailable"),
        (UsageError, "refused"),
    )
    return next((code for kind, code in codes if isinstance(error, kind)), "refused")


def error_frame(call_id: int, code: str, message: str) -> Body:
    """Return the frame that tells the caller."""
    return encode_frame(Kind.ERROR, call_id, code, {"message": message[:1000]})
