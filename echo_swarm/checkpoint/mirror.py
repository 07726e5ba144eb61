"""HTTP mirrors as sources of pieces: plain file servers that hold a run's files under their digests.

    <base>/<run id>/<sha256 of the file, 64 hex digits>

To a download a mirror is a source like a peer that has every piece; its name is its base URL. Pieces that lie side by
side are asked for in one request. All that comes is verified like anybody's pieces, and a mirror that sends wrong bytes
is avoided and named in the same way. One that fails is set aside for a while, over all downloads together.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio

from echo_swarm.checkpoint.blob import BlobClient, HaveReply
from echo_swarm.checkpoint.mirror_http import MirrorFault, RangeReader
from echo_swarm.checkpoint.pieces import PieceMap
from echo_swarm.checkpoint.reach import Reach, is_mirror, is_mirror_url
from echo_swarm.errors import RemoteError
from echo_swarm.identity import PeerId
from echo_swarm.manifest import Artifact
from echo_swarm.transport.base import Host

FIRST_REST_S = 2.0
LAST_REST_S = 600.0
"""A mirror that fails rests for 2, 4, 8, … seconds, or as long as it says; ten minutes at most."""
MAX_CONNECTIONS = 4
MAX_RANGE_BYTES = 4 << 20
MAX_RANGE_PIECES = 16
"""Of one request; one piece may be larger."""

TakePiece = Callable[[int, bytes], Awaitable[None]]


def file_url(base: str, run_id: str, digest: bytes) -> str:
    """Return where a mirror has a file."""
    return f"{base.rstrip('/')}/{run_id}/{digest.hex()}"


@dataclass(frozen=True, slots=True)
class _Rest:
    failures: int
    """In a row."""
    until_s: float
    why: str


class Mirrors:
    """The mirrors of a run, as its manifest names them now.

    Args:
        run_id: the run's.
        limit: how near they may be (`reach_of_run`).

    """

    def __init__(self, run_id: str, limit: Reach) -> None:
        self.run_id = run_id
        self.limit = limit
        self._urls: tuple[str, ...] = ()
        self._rests: dict[str, _Rest] = {}

    @property
    def urls(self) -> tuple[str, ...]:
        """All of them."""
        return self._urls

    def set(self, urls: Sequence[str]) -> list[str]:
        """Take what the run's manifest says; return those that are no mirror's URL, which are left out."""
        self._urls = tuple(dict.fromkeys(url for url in urls if is_mirror_url(url)))
        self._rests = {url: rest for url, rest in self._rests.items() if url in self._urls}
        return [url for url in urls if url not in self._urls]

    def names(self) -> list[PeerId]:
        """Return the mirrors, as sources of a download, but for those set aside."""
        return [PeerId(url) for url in self._urls if self.rest_s(url) <= 0]

    def resting(self) -> dict[PeerId, str]:
        """Return those set aside, and why."""
        return {PeerId(url): self._rests[url].why for url in self._urls if self.rest_s(url) > 0}

    def rest_s(self, url: str) -> float:
        """Return for how long a mirror is still set aside."""
        rest = self._rests.get(url)
        return 0.0 if rest is None else rest.until_s - anyio.current_time()

    def check(self, url: str) -> None:
        """Raise MirrorFault if a mirror is set aside."""
        if (rest_s := self.rest_s(url)) > 0:
            raise MirrorFault(f"{self._rests[url].why}; set aside for {rest_s:.0f} s", again=True)

    def failed(self, url: str, fault: MirrorFault) -> None:
        """Set a mirror aside, unless only one of its files is at fault; failures meanwhile are the same one."""
        if fault.of_file or self.rest_s(url) > 0:
            return
        failures = self._rests[url].failures + 1 if url in self._rests else 1
        rest_s = min(LAST_REST_S, max(FIRST_REST_S * 2 ** min(failures - 1, 16), fault.rest_s))
        self._rests[url] = _Rest(failures, anyio.current_time() + rest_s, str(fault))

    def answered(self, url: str) -> None:
        """It works."""
        if self.rest_s(url) <= 0:
            self._rests.pop(url, None)


class MirrorClient:
    """One mirror's copy of one artifact, in place of a `BlobClient`. Use as `async with`."""

    def __init__(self, mirrors: Mirrors, source: PeerId, artifact: Artifact) -> None:
        self.peer = source
        self.at_once = min(MAX_RANGE_PIECES, max(1, MAX_RANGE_BYTES // artifact.piece_bytes))
        """Pieces of one request, if they lie side by side."""
        self._mirrors = mirrors
        self._artifact = artifact
        self._url = file_url(source, mirrors.run_id, artifact.digest)
        self._reader = RangeReader(mirrors.limit, connections=MAX_CONNECTIONS)
        self._is_there = False

    async def __aenter__(self) -> "MirrorClient":
        """Start; connections open with the first call."""
        await self._reader.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close the connections."""
        await self._reader.__aexit__(None, None, None)

    async def have(
        self, digest: bytes, *, known: int = 0, wait_s: float = 0.0, addresses: tuple[str, ...] = (), timeout_s: float
    ) -> HaveReply:
        """Return that it has every piece, once it has shown that it gives ranges of a file of that size."""
        del digest, known, wait_s, addresses
        if not self._is_there:
            await self._read(0, [1], _forget, timeout_s)
            self._is_there = True
        return HaveReply(pieces=PieceMap.full(self._artifact.piece_count).pack(), peers=())

    async def offer(self, digest: bytes, wanted: bytes, count: int, *, timeout_s: float) -> tuple[int, ...]:
        """Leave the choice to whoever asks."""
        raise RemoteError("unknown_method", "a mirror does not choose")

    async def pieces(self, digest: bytes, run: Sequence[int], take: TakePiece, *, timeout_s: float) -> None:
        """Hand over what the mirror says are these pieces, which lie side by side; `timeout_s` is for each."""
        del digest
        indexes = iter(run)

        async def take_next(data: bytes) -> None:
            await take(next(indexes), data)

        lengths = [self._artifact.piece_length(index) for index in run]
        await self._read(run[0] * self._artifact.piece_bytes, lengths, take_next, timeout_s)
        self._mirrors.answered(self.peer)

    async def _read(
        self, start: int, lengths: Sequence[int], take: Callable[[bytes], Awaitable[None]], timeout_s: float
    ) -> None:
        self._mirrors.check(self.peer)
        try:
            await self._reader.read(self._url, start, lengths, self._artifact.size_bytes, take, timeout_s=timeout_s)
        except MirrorFault as e:
            self._mirrors.failed(self.peer, e)
            if e.of_file and self._is_there:
                raise MirrorFault(f"had this file at first and now {e}", of_file=True) from e
            raise


async def _forget(data: bytes) -> None:
    del data


def open_source(host: Host, mirrors: Mirrors | None, source: PeerId, artifact: Artifact) -> "BlobClient | MirrorClient":
    """Return a source of an artifact's pieces: a mirror if it is one, else a peer."""
    if mirrors is not None and is_mirror(source):
        return MirrorClient(mirrors, source, artifact)
    return BlobClient(host, source)
