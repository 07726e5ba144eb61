"""A peer that takes work and never delivers, beside honest nodes: the run goes on."""

from pathlib import Path

import anyio
import pytest

from echo_coordinator.coordinator import Coordinator
from echo_node.backends.options import ScriptedOptions
from echo_swarm.identity import Identity
from echo_swarm.transport.rpc import RpcClient, call_message
from echo_swarm.work import (
    WORK_PROTOCOL,
    BackendReport,
    Beat,
    BeatReply,
    Hello,
    LeaseReply,
    LeaseRequest,
    Release,
    Released,
    Role,
    WaitReason,
    Welcome,
)
from tests.swarm.support.node_harness import until
from tests.swarm.support.whole_run import WholeRun, make_run

pytestmark = pytest.mark.anyio
PROBE = 4
BACKEND = BackendReport(backend="scripted", build="1", precision="float32", device="cpu", batch=4096)


@pytest.fixture
def anyio_backend() -> str:
    """The coordinator runs on asyncio only."""
    return "asyncio"


class Hoarder:
    """Claims a million tokens a second, takes all it is given, names it in beats and delivers nothing."""

    def __init__(self, run: WholeRun, *, fails: bool = False) -> None:
        self.run = run
        self.fails = fails
        self.identity = Identity.from_seed(b"hoarder".ljust(32, b"."))
        self.held: list[bytes] = []
        self.got = 0
        self.told: set[WaitReason] = set()
        self.met = anyio.Event()
        """It has asked for work once."""

    async def act(self) -> None:
        async with self.run.network.host(self.identity) as host:
            await host.connect(f"/memory/1/p2p/{self.run.identity.peer_id}", timeout_s=5)
            async with RpcClient(host, self.run.identity.peer_id, WORK_PROTOCOL, max_reply_bytes=1 << 20) as client:
                hello = Hello(
                    run_id=self.run.settings.run.id,
                    software="hoarder",
                    role=Role.INFERENCE,
                    instance=b"h" * 16,
                    wall_s=1.0,
                    backend=BACKEND,
                    addresses=(),
                )
                await call_message(client, "hello", hello, Welcome, timeout_s=5)
                while True:
                    await self._turn(client)
                    self.met.set()
                    await anyio.sleep(0.02)  # Its own pace, nothing waits for it.

    async def _turn(self, client: RpcClient) -> None:
        request = LeaseRequest(capacity=4096, held_version=0, tokens_per_s=1e6, wait_s=0.0)
        reply = await call_message(client, "lease", request, LeaseReply, timeout_s=5)
        self.told.add(reply.wait_reason)
        self.got += sum(len(lease.members) for lease in reply.leases)
        self.held += [lease.lease_id for lease in reply.leases]
        if self.fails and self.held:
            release = Release(lease_ids=tuple(self.held), cause="no", leaving=False, failed=True)
            await call_message(client, "release", release, Released, timeout_s=5)
            self.held = []
        beat = Beat(
            lease_ids=tuple(self.held),
            held_version=0,
            state="sampling",
            tokens_per_s=1e6,
            bytes_served=0,
            bytes_fetched_peers=0,
        )
        answer = await call_message(client, "beat", beat, BeatReply, timeout_s=5)
        self.held = [lease_id for lease_id in self.held if lease_id not in answer.expired]


async def ended(coordinator: Coordinator) -> None:
    # The hoarder is waited for a few times, each time in proportion to how slow the machine makes the others.
    with anyio.fail_after(120):
        await coordinator.ended.wait()


async def test_a_hoarder_holds_no_more_than_the_probe_and_the_run_goes_on_beside_it(tmp_path: Path):
    run = make_run(tmp_path, probe_members=PROBE)
    hoarder = Hoarder(run)
    options = ScriptedOptions(batch=4, mean_s=0.01)
    async with (
        run.coordinator() as coordinator,
        run.node("a", options=options),
        run.node("b", options=options),
        anyio.create_task_group() as tasks,
    ):
        await until(lambda: coordinator.state.core.roster.live() == 2)
        tasks.start_soon(hoarder.act)
        await until(lambda: hoarder.got > 0)
        before = coordinator.state.updates.count
        await until(lambda: coordinator.state.updates.count >= before + 6)
        assert hoarder.got == coordinator.state.core.leases.in_flight(hoarder.identity.peer_id) == PROBE
        assert WaitReason.QUOTA in hoarder.told
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("settings", [{}, {"mode": "sequential", "max_staleness": 0}])
async def test_a_hoarder_keeps_neither_the_last_update_nor_a_sequential_one_waiting(tmp_path: Path, settings):
    """Each of these needs all the groups there are, the hoarder's too; a deadline of half an hour stays far away."""
    run = make_run(tmp_path, updates=2, probe_members=PROBE, lease_target_s=0.05, **settings)
    hoarder = Hoarder(run)
    async with (
        run.coordinator() as coordinator,
        run.node("a"),
        run.node("b"),
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(hoarder.act)
        await ended(coordinator)
        tasks.cancel_scope.cancel()
    assert hoarder.got > 0
    assert len(run.trainer.trained) == 2


async def test_a_hoarder_that_was_alone_and_took_everything_gives_it_up_to_the_nodes_that_come(tmp_path: Path):
    run = make_run(tmp_path, updates=4, probe_members=PROBE, lease_target_s=0.05)
    hoarder = Hoarder(run)
    async with run.coordinator() as coordinator, anyio.create_task_group() as tasks:
        leases = coordinator.state.core.leases
        tasks.start_soon(hoarder.act)
        await until(lambda: leases.in_flight(hoarder.identity.peer_id) > PROBE)
        async with run.node("a"), run.node("b"):
            await ended(coordinator)
            assert leases.in_flight(hoarder.identity.peer_id) <= PROBE
        tasks.cancel_scope.cancel()
    assert len(run.trainer.trained) == 4


async def test_a_peer_that_hands_everything_back_as_failed_uses_up_no_prompts(tmp_path: Path):
    run = make_run(tmp_path, updates=4, probe_members=PROBE)
    saboteur = Hoarder(run, fails=True)
    async with (
        run.coordinator() as coordinator,
        run.node("a"),
        run.node("b"),
        anyio.create_task_group() as tasks,
    ):
        await until(lambda: coordinator.state.core.roster.live() == 2)
        tasks.start_soon(saboteur.act)
        await ended(coordinator)
        assert coordinator.reporter.status().dropped_groups.get("incomplete_group", 0) == 0
        tasks.cancel_scope.cancel()
    assert len(run.trainer.trained) == 4
    assert saboteur.got <= PROBE + PROBE // 2 + 1
