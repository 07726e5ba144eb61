"""Does it cost time when providers lie? Real hosts on loopback, honest providers alone and with liars among them.

`python -m benchmarks.liars`: a coordinator and one more provider with limited uplinks, and three nodes that fetch one
artifact from them and each other. Then the same with five liars: one serves wrong bytes, one says nothing after the
handshake, one says that it has all and gives nothing, one gives half and hangs up, one claims pieces that it lacks.
"""

import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import anyio

from benchmarks._report import write_report
from echo_swarm.checkpoint.blob import BLOB_PROTOCOL, NOT_FOUND, HaveReply, HaveRequest, PieceReply, PieceRequest
from echo_swarm.checkpoint.fetch import Fetcher, FetchReport
from echo_swarm.checkpoint.interest import InterestBook
from echo_swarm.checkpoint.pieces import PieceMap
from echo_swarm.checkpoint.serve import BlobServer
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.envelope import Signed, seal, unseal
from echo_swarm.errors import RemoteError
from echo_swarm.identity import Identity, PeerId
from echo_swarm.manifest import (
    MANIFEST_LIMITS,
    Artifact,
    ArtifactKind,
    CheckpointManifest,
    digest_of_pieces,
    sha256,
)
from echo_swarm.transport.hivemind import HivemindHost, open_hivemind_host
from echo_swarm.transport.rpc import RpcServer, typed

RUN_ID = "0123456789abcdef" * 2
PIECE_BYTES = 1 << 18
PIECES = 128
UPLINK_BYTES_PER_S = 4 << 20
NODES = 3
ROUNDS = 3
LIARS = ("wrong bytes", "silent after the handshake", "gives nothing", "hangs up at half", "lacks what it claims")


def make_version(number: int) -> tuple[Signed[CheckpointManifest], bytes]:
    """Return a signed version of random content."""
    data = Random(number).randbytes(PIECE_BYTES * PIECES)
    artifact = Artifact(
        kind=ArtifactKind.GGUF,
        precision="float32",
        size_bytes=len(data),
        digest=sha256(data),
        piece_bytes=PIECE_BYTES,
        piece_digests=digest_of_pieces(
            [sha256(data[at : at + PIECE_BYTES]) for at in range(0, len(data), PIECE_BYTES)]
        ),
        layout_digest=bytes(32),
    )
    manifest = CheckpointManifest(
        run_id=RUN_ID, policy_version=number, parent_digest=None, issued_at=1.0, expires_at=2.0, artifacts=(artifact,)
    )
    raw = seal(Identity.from_seed(bytes(32)), manifest)
    return unseal(raw, CheckpointManifest, MANIFEST_LIMITS), data


class Swarm:
    """Hosts and stores of one round."""

    def __init__(self, folder: Path, stack: AsyncExitStack, number: int) -> None:
        self.folder = folder
        self.stack = stack
        self.signed, self.data = make_version(number)
        self.artifact = self.signed.message.artifacts[0]
        self.hosts = 0
        self.coordinator: HivemindHost

    async def host(self) -> HivemindHost:
        """Start a host that knows the coordinator."""
        self.hosts += 1
        host = await self.stack.enter_async_context(
            open_hivemind_host(
                Identity.generate(),
                listen=["/ip4/127.0.0.1/tcp/0"],
                bootstrap=self.coordinator.addresses[:1] if self.hosts > 1 else (),
            )
        )
        if self.hosts == 1:
            self.coordinator = host
        return host

    def store(self, host: HivemindHost) -> VersionStore:
        """Return the store of a host."""
        store = VersionStore(self.folder / host.peer_id, RUN_ID)
        self.stack.callback(store.close)
        return store

    async def seeder(self, **options: Any) -> PeerId:
        """Start a provider that has everything."""
        host = await self.host()
        store = self.store(host)
        store.add(self.signed)
        partial = store.open_partial(self.signed.message.policy_version, self.artifact)
        for index in range(PIECES):
            partial.write(index, self.piece(index))
        store.finish_partial(partial)
        store.close_partial(partial)
        await self.stack.enter_async_context(BlobServer(host, store, max_bytes_per_s=UPLINK_BYTES_PER_S, **options))
        return host.peer_id

    def piece(self, index: int) -> bytes:
        """Return the content of a piece."""
        return self.data[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]

    async def liar(self, kind: str) -> PeerId:
        """Start one that lies."""
        host = await self.host()
        server = RpcServer(host, BLOB_PROTOCOL, max_request_bytes=1 << 16)
        answer = self._answers(kind, server)

        async def have(_peer: PeerId, _request: HaveRequest) -> HaveReply:
            if kind == LIARS[1]:
                await anyio.sleep_forever()
            return HaveReply(pieces=PieceMap.full(PIECES).pack(), peers=())

        async def piece(_peer: PeerId, request: PieceRequest) -> PieceReply:
            return PieceReply(data=await answer(request.index))

        server.method("have", typed(HaveRequest, have))
        server.method("piece", typed(PieceRequest, piece))
        await self.stack.enter_async_context(server)
        return host.peer_id

    def _answers(self, kind: str, server: RpcServer) -> Callable[[int], Awaitable[bytes]]:
        given = 0

        async def answer(index: int) -> bytes:
            nonlocal given
            given += 1
            if kind == LIARS[0]:
                return bytes(PIECE_BYTES)
            if kind == LIARS[4]:
                raise RemoteError(NOT_FOUND, "no such piece")
            if kind == LIARS[3]:
                if given <= PIECES // 2:
                    return self.piece(index)
                await server.__aexit__(None, None, None)
            await anyio.sleep_forever()
            return b""

        return answer


async def measure(number: int, lying: bool) -> dict[str, Any]:
    """Let three nodes fetch a version, and return how long it took and whom they named."""
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack:
            swarm = Swarm(Path(folder), stack, number)
            providers = [await swarm.seeder(allocates=True), await swarm.seeder()]
            liars = {await swarm.liar(kind): kind for kind in (LIARS if lying else ())}
            fetchers: list[Fetcher] = []
            for _ in range(NODES):
                host, book = await swarm.host(), InterestBook()
                store = swarm.store(host)
                await stack.enter_async_context(BlobServer(host, store, interest=book))
                fetchers.append(Fetcher(host, store, coordinator=providers[0], interest=book))
            return await _fetch_all(swarm, fetchers, [*liars, *providers], liars)


async def _fetch_all(
    swarm: Swarm, fetchers: list[Fetcher], sources: list[PeerId], liars: dict[PeerId, str]
) -> dict[str, Any]:
    reports: list[FetchReport] = []

    async def fetch(fetcher: Fetcher) -> None:
        async def known() -> list[PeerId]:
            return sources

        reports.append(await fetcher.fetch(swarm.signed, swarm.artifact, known))

    began_s = anyio.current_time()
    with anyio.fail_after(170):
        async with anyio.create_task_group() as tasks:
            for fetcher in fetchers:
                tasks.start_soon(fetch, fetcher)
    named = [{liars[peer]: reason for peer, reason in report.faults if peer in liars} for report in reports]
    now_s = anyio.current_time()
    return {
        "seconds": round(now_s - began_s, 2),
        "whole": len(reports),
        "named": named,
        "honest_named": sum(peer not in liars for report in reports for peer in report.liars),
        "avoided": [sorted(liars[p] for p in fetcher.grudges.listed(now_s) if p in liars) for fetcher in fetchers],
    }


async def main() -> None:
    """Measure both in turns and write the report."""
    alone: list[dict[str, Any]] = []
    among: list[dict[str, Any]] = []
    for number in range(ROUNDS):
        for lying, results in ((False, alone), (True, among)):
            results.append(await measure(number + 1, lying))
            print(f"round {number + 1}, {'with liars' if lying else 'honest alone'}: {results[-1]}", file=sys.stderr)
    medians = [statistics.median(result["seconds"] for result in results) for results in (alone, among)]
    figures = {
        "nodes": NODES,
        "artifact_mb": PIECE_BYTES * PIECES / 1e6,
        "uplink_of_each_of_two_providers_mb_per_s": UPLINK_BYTES_PER_S / 1e6,
        "honest_alone": alone,
        "with_liars": among,
        "median_s_honest_alone": medians[0],
        "median_s_with_liars": medians[1],
        "ratio": round(medians[1] / medians[0], 3),
    }
    write_report("liars", figures, packages=("hivemind",))


if __name__ == "__main__":
    anyio.run(main)
