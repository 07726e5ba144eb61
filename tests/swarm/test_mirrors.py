"""HTTP mirrors beside peers: good ones relieve the coordinator, bad ones cost nothing but time."""

import datetime
import ipaddress
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random

import anyio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from echo_swarm.checkpoint.blob import BLOB_PROTOCOL, HaveReply, HaveRequest, PieceReply, PieceRequest
from echo_swarm.checkpoint.fetch import Fetcher, FetchReport, FetchSettings
from echo_swarm.checkpoint.fetch_report import Origin, SourcesExhausted
from echo_swarm.checkpoint.mirror import Mirrors, file_url
from echo_swarm.checkpoint.mirror_http import MirrorFault, RangeReader
from echo_swarm.checkpoint.pieces import PieceMap
from echo_swarm.checkpoint.reach import Reach
from echo_swarm.checkpoint.serve import BlobServer
from echo_swarm.checkpoint.store import VersionStore
from echo_swarm.identity import Identity, PeerId
from echo_swarm.manifest import Artifact
from echo_swarm.transfers import FaultReason
from echo_swarm.transport.rpc import RpcServer, typed
from tests.support.hostile_http import Files, serving_files
from tests.swarm.support.fake_coordinator import PIECE
from tests.swarm.support.node_harness import Swarm, make_swarm

pytestmark = pytest.mark.anyio

SIZE = 40 * PIECE + 777
CONTENT = Random(7).randbytes(SIZE)
SETTINGS = FetchSettings(retry_s=0.02, refresh_s=0.05, answer_timeout_s=20.0, min_bytes_per_s=2_000_000, starve_s=1.0)
HASTY = replace(SETTINGS, answer_timeout_s=0.5)
SLOW = ("drip", "silent")
BAD = {
    # How it misbehaves → what is told, and for how long at least it is set aside; 0: only this file is left out.
    "whole": ("whole file instead of a range", 600),
    "other range": ("answers with another range", 1),
    "no range": ("no Content-Range", 1),
    "other size": ("file of another size", 0),
    "other length": ("announces another length", 1),
    "gzip": ("compressed", 1),
    "absent": ("does not have this file", 0),
    "forbidden": ("does not have this file", 0),
    "unsatisfiable": ("shorter file", 0),
    "error": ("status 500", 1),
    "odd": ("status 299", 1),
    "away": ("status 503", 70),
    "too many": ("status 429", 600),
    "truncated": ("broke off before all had come", 1),
    "short": ("ended after", 1),
    "drip": ("gave nothing whole within", 1),
    "silent": ("gave nothing whole within", 1),
    "endless": ("sends more than the range", 1),
    "endless head": ("breaks the rules of HTTP", 1),
    "no HTTP": ("broke off before all had come", 1),
    "hangs up": ("broke off before all had come", 1),
}


class Case:
    """A coordinator with one version, whose file mirrors have too, and a node's fetcher."""

    def __init__(self, folder: Path, limit: Reach = Reach.LOOPBACK, settings: FetchSettings = SETTINGS) -> None:
        self.swarm: Swarm = make_swarm(folder)
        self.swarm.coordinator.publish(0, gguf={"f32": CONTENT})
        self.coordinator = self.swarm.coordinator.identity.peer_id
        signed = self.swarm.coordinator.store.manifest(0)
        assert signed is not None
        self.signed = signed
        self.artifact: Artifact = signed.message.artifacts[1]
        self.store = VersionStore(folder / "copy", self.swarm.coordinator.run_id)
        self.mirrors = Mirrors(self.swarm.coordinator.run_id, limit)
        self.settings = settings
        self.fetcher: Fetcher | None = None

    @property
    def path(self) -> str:
        return file_url("", self.swarm.coordinator.run_id, self.artifact.digest)

    def put(self, files: Files, content: bytes = CONTENT) -> str:
        files.content[self.path] = content
        return files.url

    async def fetch(self, urls: Sequence[str], sources: Sequence[PeerId] = ()) -> FetchReport:
        self.mirrors.set(urls)
        async with self.swarm.network.host(Identity.generate(), outbound_only=True) as host:
            fetcher = self.fetcher or Fetcher(host, self.store, coordinator=self.coordinator, settings=self.settings)
            fetcher._host = host
            fetcher.mirrors, self.fetcher = self.mirrors, fetcher
            with anyio.fail_after(60):
                report = await fetcher.fetch(self.signed, self.artifact, sources)
        assert report.path is not None and report.path.read_bytes() == CONTENT
        return report


async def test_a_mirror_alone_gives_a_whole_version_in_few_requests(tmp_path: Path):
    case = Case(tmp_path)
    with serving_files() as files:
        report = await case.fetch([case.put(files)])
        assert case.fetcher is not None and case.fetcher.bytes_from(Origin.MIRROR) == SIZE == report.mirrors
        assert case.fetcher.bytes_from(Origin.PEER) == case.fetcher.bytes_from(Origin.COORDINATOR) == 0
        sizes = [1 + last - first for first, last in files.ranges]
        assert sum(sizes) == SIZE + 1 and max(sizes) > PIECE
        assert len(sizes) < case.artifact.piece_count // 2


async def test_a_mirror_relieves_the_coordinator(tmp_path: Path):
    case = Case(tmp_path)
    async with (
        case.swarm.network.host(case.swarm.coordinator.identity) as host,
        # Slow enough that the mirror has the time to say that it is there.
        BlobServer(host, case.swarm.coordinator.store, max_bytes_per_s=SIZE / 8),
    ):
        with serving_files() as files:
            report = await case.fetch([case.put(files)], [case.coordinator])
    assert report.mirrors > SIZE // 2
    assert sum(report.bytes_by_source.values()) == SIZE


@pytest.mark.parametrize("at_first", [False, True])
@pytest.mark.parametrize("manner", BAD)
async def test_a_mirror_that_misbehaves_is_named_and_set_aside_and_the_coordinator_gives_the_rest(
    tmp_path: Path, manner: str, at_first: bool
):
    case, (told, rest_s) = Case(tmp_path, settings=HASTY if manner in SLOW else SETTINGS), BAD[manner]
    if at_first and manner in ("truncated", "short", "other length", "endless", "drip"):
        return  # A single byte cannot be cut.
    with serving_files(manner=manner, at_first=at_first) as files:
        url = PeerId(case.put(files))
        with pytest.raises(SourcesExhausted) as caught:
            await case.fetch([url])
        assert told in caught.value.report.failures[url]
        assert not caught.value.report.liars
        left_s = case.mirrors.rest_s(url)
        # Of a short rest, nothing may be left on a busy machine; without one there never was anything.
        assert (left_s != 0 if rest_s <= 1 else left_s > rest_s - 60) if rest_s else left_s == 0
        async with case.swarm.serving():
            report = await case.fetch([url], [case.coordinator])
        assert report.resumed_bytes + report.bytes_by_source[case.coordinator] + report.mirrors == SIZE
        if rest_s > 1:
            assert told in report.failures[url]


@pytest.mark.parametrize(
    ("manner", "told", "reason"),
    [
        ("absent", "had this file at first and now does not have this file (status 404)", None),
        ("other size", "had this file at first and now has a file of another size", None),
        ("error", "answers with status 500", FaultReason.BAD_SERVER),
        ("whole", "whole file instead of a range", FaultReason.BAD_SERVER),
        ("endless", "sends more than the range", FaultReason.BAD_SERVER),
        ("endless head", "breaks the rules of HTTP (", FaultReason.BAD_SERVER),
        ("short", "ended after", FaultReason.HUNG_UP),
        ("truncated", "broke off before all had come", FaultReason.HUNG_UP),
        ("hangs up", "broke off before all had come", FaultReason.HUNG_UP),
        ("silent", "gave nothing whole within", FaultReason.SILENT),
        ("drip", "gave nothing whole within", FaultReason.SILENT),
        ("wrong bytes", "another digest", FaultReason.WRONG_BYTES),
    ],
)
async def test_a_mirror_that_turns_bad_half_way_is_told_for_what_it_did(
    tmp_path: Path, manner: str, told: str, reason: FaultReason | None
):
    case = Case(tmp_path, settings=HASTY if manner in SLOW else SETTINGS)
    with serving_files(manner=manner, after=3) as files:
        url = PeerId(case.put(files))
        with pytest.raises(SourcesExhausted) as caught:
            await case.fetch([url])
    report = caught.value.report
    assert told in {**report.failures, **report.liars}[url] and report.bytes_by_source.get(url, 0) > 0
    assert report.reasons.get(url) is reason


async def test_what_came_before_a_mirror_failed_is_kept(tmp_path: Path):
    case = Case(tmp_path)
    with serving_files() as files:
        url = case.put(files)
        async with RangeReader(Reach.LOOPBACK, connections=1) as reader:
            parts: list[bytes] = []

            async def take(data: bytes) -> None:
                parts.append(data)

            files.manner = "truncated"
            with pytest.raises(MirrorFault):
                await reader.read(url + case.path, 100, [50, 60, 70], SIZE, take, timeout_s=5)
    assert parts == [CONTENT[100:150], CONTENT[150:210]]


async def test_a_mirror_that_sends_wrong_bytes_is_avoided_and_named(tmp_path: Path):
    case = Case(tmp_path)
    async with case.swarm.serving():
        with serving_files(manner="wrong bytes") as files:
            url = PeerId(case.put(files))
            with pytest.raises(SourcesExhausted):
                await case.fetch([url])
            report = await case.fetch([url], [case.coordinator])
            assert "digest" in report.liars[url] and report.mirrors == 0
            assert len(files.ranges) == 2  # Where it begins, and the first piece.


async def test_a_mirror_that_does_not_listen_is_told(tmp_path: Path):
    case = Case(tmp_path)
    with serving_files() as gone:
        pass
    urls = [gone.url, "http://no-such-host.invalid", "http://[::1]:1"]
    with pytest.raises(SourcesExhausted, match="cannot be reached"):
        await case.fetch(urls)
    assert case.mirrors.names() == [] and set(case.mirrors.resting()) == set(urls)


def self_signed(folder: Path) -> tuple[str, str]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now.replace(year=2099))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(certificate.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(private)
    return str(folder / "cert.pem"), str(folder / "key.pem")


async def test_a_certificate_that_nobody_vouches_for_is_refused_and_a_good_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    case = Case(tmp_path)
    with serving_files(certificate=self_signed(tmp_path)) as files:
        with pytest.raises(SourcesExhausted, match="CERTIFICATE_VERIFY_FAILED"):
            await case.fetch([case.put(files)])
        assert not files.ranges
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "cert.pem"))
        case.mirrors = Mirrors(case.swarm.coordinator.run_id, Reach.LOOPBACK)
        assert (await case.fetch([files.url])).mirrors == SIZE


async def test_redirects_are_followed_a_few_times_and_only_over_http(tmp_path: Path):
    got: list[bytes] = []

    async def take(data: bytes) -> None:
        got.append(data)

    with serving_files(content={"/f": b"x" * 100}) as files, serving_files(manner="redirect") as first:
        async with RangeReader(Reach.LOOPBACK, connections=2) as reader:
            first.target = f"{files.url}PATH"
            await reader.read(f"{first.url}/f", 10, [20], 100, take, timeout_s=5)
            assert got == [b"x" * 20]
            for target in (
                "file:///etc/passwd",
                "gopher://127.0.0.1/",
                "http://user@127.0.0.1/",
                "//[",
                "http://127.0.0.1/?" + "x" * 5000,
                "PATH",
            ):
                first.target = target
                with pytest.raises(MirrorFault, match="redirects"):
                    await reader.read(f"{first.url}/f", 0, [20], 100, take, timeout_s=5)
            first.target = "http://169.254.169.254/latest"
            with pytest.raises(MirrorFault, match="no address that mirrors of this run may have"):
                await reader.read(f"{first.url}/f", 0, [20], 100, take, timeout_s=5)


@pytest.mark.parametrize("limit", [Reach.GLOBAL, Reach.PRIVATE])
async def test_a_public_run_has_no_mirror_on_loopback_by_address_or_by_name(tmp_path: Path, limit: Reach):
    case = Case(tmp_path, limit)
    async with case.swarm.serving():
        with serving_files() as files:
            url = case.put(files)
            report = await case.fetch([url, url.replace("127.0.0.1", "localhost")], [case.coordinator])
    assert report.bytes_by_source == {case.coordinator: SIZE}
    assert not files.ranges


async def test_a_limit_on_downloads_holds_for_mirrors(tmp_path: Path):
    limit = 2_000_000
    case = Case(tmp_path, settings=replace(SETTINGS, max_bytes_per_s=limit))
    with serving_files() as files:
        report = await case.fetch([case.put(files)])
        # What is asked for in one request takes half a second at most.
        assert max(1 + last - first for first, last in files.ranges) <= limit // 2
    assert report.seconds > (SIZE - limit // 2 - limit // 4) / limit


async def test_a_fetch_with_liars_among_mirrors_and_peers_completes_without_the_coordinator(tmp_path: Path):
    case = Case(tmp_path)
    manners = ("wrong bytes", "truncated", "away", "endless", "absent", "drip", "good")
    async with AsyncExitStack() as stack, AsyncExitStack() as late:
        files = [stack.enter_context(serving_files(manner=manner)) for manner in manners]
        urls = [case.put(each) for each in files]
        liar = await stack.enter_async_context(case.swarm.network.host(Identity.generate()))
        good = await stack.enter_async_context(case.swarm.network.host(Identity.generate()))
        rpc = RpcServer(liar, BLOB_PROTOCOL, max_request_bytes=1 << 16)

        async def have(_peer: PeerId, request: HaveRequest) -> HaveReply:
            return HaveReply(pieces=PieceMap.full(case.artifact.piece_count).pack(), peers=())

        async def piece(_peer: PeerId, request: PieceRequest) -> PieceReply:
            return PieceReply(data=bytes(case.artifact.piece_length(request.index)))

        rpc.method("have", typed(HaveRequest, have))
        rpc.method("piece", typed(PieceRequest, piece))
        await late.enter_async_context(rpc)
        await late.enter_async_context(BlobServer(good, case.swarm.coordinator.store))
        report = await case.fetch(urls, [liar.peer_id, good.peer_id])
    assert set(report.liars) <= {liar.peer_id, PeerId(urls[0])}
    assert set(report.bytes_by_source) <= {good.peer_id, *map(PeerId, urls[1:])}
    assert sum(report.bytes_by_source.values()) == SIZE


async def test_a_slow_mirror_does_not_hold_up_a_fast_one(tmp_path: Path):
    case = Case(tmp_path, settings=replace(SETTINGS, answer_timeout_s=60.0))
    with ExitStack() as stack:
        fast, slow = (stack.enter_context(serving_files(manner=manner)) for manner in ("good", "drip"))
        report = await case.fetch([case.put(slow), case.put(fast)])
    assert report.bytes_by_source == {PeerId(fast.url): SIZE}
