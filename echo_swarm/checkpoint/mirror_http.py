"""Ranges of one file over HTTP, from a server that may do anything. No proxy, no cookies, no decompression.

Every wait has a deadline, every buffer a bound, and every fault says what the server did. Where a connection may go is
decided for the address that is dialled, for every redirect anew (`reach`).
"""

import contextlib
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import aclosing
from email.utils import parsedate_to_datetime
from typing import cast
from urllib.parse import urljoin, urlsplit

import anyio
import httpcore2

from echo_swarm.checkpoint.reach import Reach, is_mirror_url, reach_of
from echo_swarm.errors import PeerUnreachable, Unanswered
from echo_swarm.wire import clean

MAX_REDIRECTS = 3
MAX_TARGET_CHARS = 4096
KEEP_S = 4.0
"""An idle connection is closed after this: before the server does it at the moment in which we ask it again."""
_REDIRECTS = (301, 302, 303, 307, 308)
_LACKING = (403, 404, 410)
"""Object stores say 403 of what is not there to those who may not list."""

Take = Callable[[bytes], Awaitable[None]]
"""Given each part of a range as it is whole, in order."""


class MirrorFault(PeerUnreachable):
    """A server did not give what it was asked for.

    Args:
        what: what it did.
        rest_s: how long it asked to be left alone, or should be; 0: not known.
        of_file: whether this says something about the one file only.
        again: whether it was not asked, for what it did before.

    """

    def __init__(self, what: str, *, rest_s: float = 0.0, of_file: bool = False, again: bool = False) -> None:
        super().__init__(what)
        self.rest_s = rest_s
        self.of_file = of_file
        self.again = again


class MirrorSilent(MirrorFault, Unanswered):
    """It gave nothing in time."""


class MirrorGone(MirrorFault):
    """It ended the connection before all had come."""


class GuardedBackend(httpcore2.AsyncNetworkBackend):
    """Connects to addresses up to a reach, and to no others."""

    def __init__(self, limit: Reach) -> None:
        self._limit = limit
        self._real = cast("httpcore2.AsyncNetworkBackend", httpcore2.AnyIOBackend())

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Resolve, check, connect to the very address that was checked."""
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        failure: Exception = httpcore2.ConnectError(f"{host} has no address that mirrors of this run may have")
        for *_, where in found[:4]:
            if reach_of(str(where[0])) > self._limit:
                continue
            try:
                return await self._real.connect_tcp(
                    str(where[0]), port, timeout=timeout, local_address=local_address, socket_options=socket_options
                )
            except (httpcore2.NetworkError, httpcore2.TimeoutException) as e:
                failure = e
        raise failure

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Refuse."""
        raise httpcore2.ConnectError("mirrors have no sockets on this machine")

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await anyio.sleep(seconds)


class RangeReader:
    """Reads ranges from one server. Use as `async with`."""

    def __init__(self, limit: Reach, *, connections: int) -> None:
        self._pool = httpcore2.AsyncConnectionPool(
            max_connections=connections,
            keepalive_expiry=KEEP_S,
            network_backend=GuardedBackend(limit),
            retries=0,
        )

    async def __aenter__(self) -> "RangeReader":
        """Connections open with the first range."""
        await self._pool.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close the connections."""
        await self._pool.__aexit__(None, None, None)

    async def read(
        self, url: str, start: int, lengths: Sequence[int], total: int, take: Take, *, timeout_s: float
    ) -> None:
        """Read the bytes from `start` of a file of `total` bytes: parts of these lengths, each given to `take`.

        Args:
            url: of the file.
            start: first byte.
            lengths: of the parts, which follow each other.
            total: length of the file, which the server must confirm.
            take: what it raises ends the reading.
            timeout_s: for the answer to begin, and then for each part to be whole.

        Raises:
            MirrorFault: not all came; says why. What `take` was given before is as good as ever.

        """
        response = await self._open(url, start, sum(lengths), total, timeout_s)
        try:
            # Closed at once, also when it is left half-way: trio takes offence at a generator that is only forgotten.
            async with aclosing(response.aiter_stream()) as body:
                await _split(body, lengths, take, timeout_s)
        finally:
            with _explained():
                await response.aclose()

    async def _open(self, url: str, start: int, length: int, total: int, timeout_s: float) -> httpcore2.Response:
        headers = [
            (b"Accept-Encoding", b"identity"),
            (b"Range", b"bytes=%d-%d" % (start, start + length - 1)),
            (b"User-Agent", b"echo-node"),
        ]
        extensions = {"timeout": dict.fromkeys(("connect", "read", "write", "pool"), timeout_s)}
        with _explained(timeout_s), anyio.fail_after(timeout_s):
            for _ in range(MAX_REDIRECTS + 1):
                host = urlsplit(url).netloc.encode("ascii")
                request = httpcore2.Request("GET", url, headers=[(b"Host", host), *headers], extensions=extensions)
                response = await self._pool.handle_async_request(request)
                try:
                    if response.status not in _REDIRECTS:
                        _check(response, start, length, total)
                        return response
                    url = _redirected(url, _header(response, b"location"))
                except BaseException:
                    await response.aclose()
                    raise
                await response.aclose()
            raise MirrorFault(f"redirects more than {MAX_REDIRECTS} times")


_BROKE_OFF = ("disconnected", "closed connection")
"""What the library says of a server that closes in the middle: to it, that is one more fault of protocol."""


@contextlib.contextmanager
def _explained(timeout_s: float = 0.0) -> Generator[None]:
    """Turn whatever a connection can fail with into MirrorFault."""
    try:
        yield
    except (TimeoutError, httpcore2.TimeoutException) as e:
        raise MirrorSilent(f"gave nothing whole within {timeout_s:.0f} s") from e
    except httpcore2.ProtocolError as e:
        said = _said(e)
        if any(words in said for words in _BROKE_OFF):
            raise MirrorGone(f"broke off before all had come ({said})") from e
        raise MirrorFault(f"breaks the rules of HTTP ({said})") from e
    except (httpcore2.ReadError, httpcore2.WriteError) as e:
        raise MirrorGone(f"broke off before all had come ({_said(e)})") from e
    except (OSError, ValueError, httpcore2.NetworkError, httpcore2.UnsupportedProtocol) as e:
        raise MirrorFault(f"cannot be reached ({_said(e)})") from e


def _said(error: Exception) -> str:
    return clean(str(error) or type(error).__name__)[:200]


async def _split(body: AsyncGenerator[bytes], lengths: Sequence[int], take: Take, timeout_s: float) -> None:
    buffer, came = bytearray(), 0
    for length in lengths:
        with _explained(timeout_s), anyio.fail_after(timeout_s):
            while len(buffer) < length:
                some = await anext(body, None)
                if some is None:
                    raise MirrorGone(f"ended after {came} of {sum(lengths)} bytes")
                buffer += some
                came += len(some)
        data = bytes(memoryview(buffer)[:length])
        del buffer[:length]
        await take(data)
    with _explained(timeout_s), anyio.fail_after(timeout_s):
        # Also reads the end of the answer, so that the connection can be used again.
        if buffer or await anext(body, None) is not None:
            raise MirrorFault("sends more than the range")


def _check(response: httpcore2.Response, start: int, length: int, total: int) -> None:
    status = response.status
    if status in _LACKING:
        raise MirrorFault(f"does not have this file (status {status})", of_file=True)
    if status == 416:
        raise MirrorFault("has a shorter file under this name (status 416)", of_file=True)
    if status == 200:
        raise MirrorFault("answers with the whole file instead of a range", rest_s=float("inf"))
    if status != 206:
        raise MirrorFault(f"answers with status {status}", rest_s=_retry_after_s(_header(response, b"retry-after")))
    found = _header(response, b"content-range")
    if found != f"bytes {start}-{start + length - 1}/{total}":
        other_size = found.startswith(f"bytes {start}-") and not found.endswith(f"/{total}")
        what = "has a file of another size under this name" if other_size else "answers with another range"
        raise MirrorFault(f"{what} ({clean(found)[:80] or 'no Content-Range'})", of_file=other_size)
    if _header(response, b"content-encoding") not in ("", "identity"):
        raise MirrorFault("answers compressed, which was not asked for")
    if _header(response, b"content-length") not in ("", str(length)):
        raise MirrorFault("announces another length than that of the range")


def _retry_after_s(text: str) -> float:
    """Return the seconds of a Retry-After header, a number or a date; 0 for anything else."""
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError, OSError):
        return 0.0


def _redirected(url: str, location: str) -> str:
    try:
        target = urljoin(url, location)
    except ValueError:
        target = ""
    # A query is fine here: object stores redirect to signed addresses.
    if not location or not target or len(target) > MAX_TARGET_CHARS or not is_mirror_url(target.partition("?")[0]):
        raise MirrorFault("redirects to something that is not http or https")
    if url.startswith("https:") and not target.startswith("https:"):
        raise MirrorFault("redirects from https to http")
    return target


def _header(response: httpcore2.Response, name: bytes) -> str:
    found = [value for key, value in response.headers if key.lower() == name]
    return found[0].decode("ascii", "replace").strip() if len(found) == 1 else "" if not found else "twice"
