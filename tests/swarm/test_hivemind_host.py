"""The hivemind host as a process among processes: joining, dying, and what it leaves behind."""

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE

import anyio
import psutil
import pytest
from anyio.abc import ByteStream, Process, SocketAttribute, SocketStream

from echo_swarm.errors import BootstrapFailed, DaemonFailed, HeldBack, PeerUnreachable
from echo_swarm.identity import Identity, PeerId
from echo_swarm.transport.hivemind import open_hivemind_host
from echo_swarm.transport.rpc import RpcClient, RpcServer

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
PROTOCOL = "/test/1"

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def closed_ports() -> Iterator[list[int]]:
    """Two ports that refuse connections for as long as the test runs."""
    with socket.socket() as one, socket.socket() as two:
        ports = []
        for held in (one, two):
            held.bind(("127.0.0.1", 0))
            ports.append(held.getsockname()[1])
        yield ports


def address(port: int, peer: PeerId) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"


def port_of(multiaddress: str) -> int:
    return int(multiaddress.split("/")[4])


@dataclass(frozen=True)
class LateProxy:
    """Accepts TCP for a host, and passes on what it is sent only once `answering` is set."""

    address: str
    answering: anyio.Event


@asynccontextmanager
async def late_proxy(target: str) -> AsyncGenerator[LateProxy]:
    answering = anyio.Event()

    async def copy(source: SocketStream, sink: SocketStream, scope: anyio.CancelScope) -> None:
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for chunk in source:
                await sink.send(chunk)
        scope.cancel()

    async def serve(client: SocketStream) -> None:
        await answering.wait()
        server = await anyio.connect_tcp("127.0.0.1", port_of(target))
        async with client, server, anyio.create_task_group() as both:
            both.start_soon(copy, client, server, both.cancel_scope)
            both.start_soon(copy, server, client, both.cancel_scope)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        port = listener.extra(SocketAttribute.local_port)
        yield LateProxy(address(port, PeerId(target.rpartition("/")[2])), answering)
        tasks.cancel_scope.cancel()


async def echo(peer: PeerId, payload: dict[str, object]) -> dict[str, object]:
    return payload


async def test_the_peer_id_is_that_of_the_key() -> None:
    identity = Identity.from_seed(bytes(range(32)))
    async with open_hivemind_host(identity, listen=LOOPBACK) as host:
        assert host.peer_id == "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
        assert host.addresses[0].endswith(host.peer_id)
        async with open_hivemind_host(Identity.generate(), listen=()) as other:
            # The helper proves it: a dial to another id would have been refused.
            assert await other.connect(host.addresses[0], timeout_s=10) == host.peer_id


async def test_one_living_bootstrap_among_dead_ones_is_enough(closed_ports: list[int]) -> None:
    async with open_hivemind_host(Identity.generate(), listen=LOOPBACK) as good:
        dead = [address(port, Identity.generate().peer_id) for port in closed_ports]
        with anyio.fail_after(120):
            async with open_hivemind_host(
                Identity.generate(), listen=(), bootstrap=[dead[0], *good.addresses, dead[1]]
            ) as host:
                assert host.addresses == ()
                with pytest.raises(PeerUnreachable, match="not supported"):
                    await host.open_stream(good.peer_id, PROTOCOL, timeout_s=5)


async def test_dead_bootstraps_only_are_named_each_with_its_reason(closed_ports: list[int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        # Accepts TCP and then says nothing, as an overloaded machine does.
        ports = [*closed_ports, mute.getsockname()[1]]
        dead = [address(port, Identity.generate().peer_id) for port in ports]
        with anyio.fail_after(120), pytest.raises(BootstrapFailed) as caught:
            async with open_hivemind_host(Identity.generate(), listen=(), bootstrap=dead, dial_timeout_s=3):
                pytest.fail("joined nobody")
    assert set(caught.value.failures) == set(dead)
    assert caught.value.failures[dead[0]] == "connection refused"
    assert "within 3 s" in caught.value.failures[dead[2]] or "timed out" in caught.value.failures[dead[2]]
    assert caught.value.exit_code == 3


async def test_an_address_that_is_not_tried_again_yet_is_told_from_one_that_was(
    closed_ports: list[int],
) -> None:
    dead = address(closed_ports[0], Identity.generate().peer_id)
    async with open_hivemind_host(Identity.generate(), listen=()) as host:
        with pytest.raises(PeerUnreachable, match="connection refused") as first:
            await host.connect(dead, timeout_s=20)
        with pytest.raises(HeldBack):
            await host.connect(dead, timeout_s=20)
    assert not isinstance(first.value, HeldBack)


async def test_a_bootstrap_that_accepts_and_answers_only_much_later_is_waited_for() -> None:
    retries: list[str] = []
    async with open_hivemind_host(Identity.generate(), listen=LOOPBACK) as good, late_proxy(good.addresses[0]) as proxy:

        def on_retry(error: BootstrapFailed, pause_s: float) -> None:
            retries.append(str(error))
            if len(retries) == 2:
                proxy.answering.set()

        with anyio.fail_after(120):
            async with open_hivemind_host(
                Identity.generate(),
                listen=(),
                bootstrap=[proxy.address],
                dial_timeout_s=1,
                patience_s=50,
                on_retry=on_retry,
            ):
                assert len(retries) >= 2 and proxy.address in retries[0]


async def test_a_helper_that_does_not_start_is_told_from_a_bootstrap_that_does_not_answer(tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    with anyio.fail_after(120), pytest.raises(DaemonFailed, match=r"did not start within 0\.5 s"):
        async with open_hivemind_host(Identity.generate(), helper=silent, start_timeout_s=0.5):
            pytest.fail("started")


async def test_a_helper_that_ends_at_once_is_quoted(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho the reason why\nexit 1\n")
    broken.chmod(0o755)
    with anyio.fail_after(120), pytest.raises(DaemonFailed, match="the reason why"):
        async with open_hivemind_host(Identity.generate(), helper=broken):
            pytest.fail("started")


async def test_a_helper_for_another_platform_is_named_as_such(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"\xcf\xfa\xed\xfe" + bytes(100))
    foreign.chmod(0o755)
    with anyio.fail_after(120), pytest.raises(DaemonFailed, match="platform"):
        async with open_hivemind_host(Identity.generate(), helper=foreign):
            pytest.fail("started")
    with pytest.raises(DaemonFailed, match="platform"):
        async with open_hivemind_host(Identity.generate(), helper=tmp_path / "missing"):
            pytest.fail("started")


async def test_the_death_of_the_helper_cancels_the_block_and_is_named() -> None:
    with anyio.fail_after(120), pytest.raises(DaemonFailed, match="died while in use"):
        async with open_hivemind_host(Identity.generate(), listen=LOOPBACK) as host:
            os.kill(host.daemon.pid, signal.SIGKILL)
            await anyio.sleep_forever()


async def test_what_the_block_raises_comes_out_as_it_is_and_the_helper_is_gone() -> None:
    pid = 0
    with pytest.raises(ZeroDivisionError):
        async with open_hivemind_host(Identity.generate(), listen=LOOPBACK) as host:
            pid = host.daemon.pid
            raise ZeroDivisionError
    assert not psutil.pid_exists(pid)


async def test_a_peer_that_restarts_on_its_port_is_reached_by_the_next_calls() -> None:
    identity = Identity.generate()
    async with open_hivemind_host(Identity.generate(), listen=()) as node:
        listen: tuple[str, ...] = LOOPBACK
        async with RpcClient(node, identity.peer_id, PROTOCOL, max_reply_bytes=1000) as client:
            for attempt in range(2):
                async with open_hivemind_host(identity, listen=listen) as coordinator:
                    listen = (f"/ip4/127.0.0.1/tcp/{port_of(coordinator.addresses[0])}",)
                    if attempt == 0:
                        await node.connect(coordinator.addresses[0], timeout_s=10)
                    async with RpcServer(coordinator, PROTOCOL, max_request_bytes=1000) as server:
                        server.method("echo", echo)
                        assert await _call_until_answered(client) == {"n": 1}
                        seen = coordinator.seen_at(node.peer_id)
                        assert seen is not None and seen.startswith("/ip4/127.0.0.1/tcp/")
                        assert coordinator.seen_at(Identity.generate().peer_id) is None
                with pytest.raises(PeerUnreachable):
                    await client.call("echo", {"n": 1}, timeout_s=2)


async def _call_until_answered(client: RpcClient) -> dict[str, object]:
    # The helper does not dial again for some 5 s after a failed attempt.
    with anyio.fail_after(120):
        while True:
            try:
                return await client.call("echo", {"n": 1}, timeout_s=5)
            except PeerUnreachable:
                await anyio.sleep(0.2)


async def test_a_burst_of_streams_is_served_completely() -> None:
    async with (
        open_hivemind_host(Identity.generate(), listen=LOOPBACK, many_peers=True) as a,
        open_hivemind_host(Identity.generate(), listen=(), bootstrap=a.addresses) as b,
    ):

        async def answer(stream: ByteStream, _peer: PeerId) -> None:
            await stream.send(await stream.receive())

        await a.serve(PROTOCOL, answer)
        answered = 0

        async def ask() -> None:
            nonlocal answered
            async with await b.open_stream(a.peer_id, PROTOCOL, timeout_s=30) as stream:
                await stream.send(b"x")
                with anyio.fail_after(120):
                    assert await stream.receive() == b"x"
            answered += 1

        async with anyio.create_task_group() as tasks:
            for _ in range(400):
                tasks.start_soon(ask)
            # A loop that is busy elsewhere must not cost streams: they wait in the backlog.
            await anyio.lowlevel.checkpoint()
            time.sleep(0.2)  # noqa: ASYNC251 - blocks on purpose
        assert answered == 400


CHILD = """
import anyio, sys
from echo_swarm.identity import Identity
from echo_swarm.transport.hivemind import open_hivemind_host

async def main():
    async with open_hivemind_host(Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",)) as host:
        print(host.daemon.pid, flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


async def start_child() -> tuple[Process, int]:
    process = await anyio.open_process([sys.executable, "-c", CHILD], stdout=PIPE, stderr=None)
    assert process.stdout is not None
    with anyio.fail_after(120):
        pid = int(await process.stdout.receive())
    return process, pid


async def wait_until_gone(pid: int) -> None:
    with anyio.fail_after(120):
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
            await anyio.sleep(0.02)


async def test_nothing_is_left_running_when_we_are_killed_and_our_folder_goes_with_the_next_start() -> None:
    process, helper = await start_child()
    async with process:
        assert psutil.pid_exists(helper)
        process.kill()
        await process.wait()
        await wait_until_gone(helper)
    async with open_hivemind_host(Identity.generate(), listen=()):
        assert not any(name.startswith(f"echo-swarm-p2pd-{process.pid}-") for name in os.listdir(tempfile.gettempdir()))
