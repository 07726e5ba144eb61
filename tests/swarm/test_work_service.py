"""The work protocol over in-memory hosts: what nodes see."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import anyio
import pytest

from echo_coordinator.peer_requests import peer_entries
from echo_coordinator.state.batch import Prompt
from echo_coordinator.state.run_state import RunFacts, RunState, open_run
from echo_coordinator.state.service import MAX_REQUEST_BYTES, Published, WorkService
from echo_coordinator.state.work_settings import WorkSettings
from echo_swarm import codec
from echo_swarm.clock import ManualClock
from echo_swarm.envelope import seal
from echo_swarm.errors import RemoteError
from echo_swarm.identity import Identity
from echo_swarm.trajectory import BehaviourPolicy, FinishReason, Reason, Submission, Trajectory, prompt_digest
from echo_swarm.transport.memory import MemoryNetwork
from echo_swarm.transport.rpc import RpcClient, RpcServer, call_message
from echo_swarm.wire import Message
from echo_swarm.work import (
    WORK_PROTOCOL,
    BackendReport,
    Beat,
    BeatReply,
    Hello,
    Lease,
    LeaseReply,
    LeaseRequest,
    Push,
    PushReply,
    Release,
    Released,
    Role,
    StatusReply,
    StatusRequest,
    WaitReason,
    Welcome,
)

pytestmark = pytest.mark.anyio
RUN_ID = "ab" * 16
BACKEND = BackendReport(backend="scripted", build="1", precision="float32", device="cpu", batch=64)
R = TypeVar("R", bound=Message)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Peer:
    """A node's side, by hand."""

    identity: Identity
    client: RpcClient

    async def call(self, method: str, message: Message, reply: type[R]) -> R:
        return await call_message(self.client, method, message, reply, timeout_s=20)

    async def hello(self, instance: int = 1, run_id: str = RUN_ID, role: Role = Role.INFERENCE) -> Welcome:
        hello = Hello(
            run_id=run_id,
            software="test",
            role=role,
            instance=instance.to_bytes(16, "big"),
            wall_s=1_000_000.0,
            backend=BACKEND,
            addresses=(),
        )
        return await self.call("hello", hello, Welcome)

    async def lease(self, capacity: int = 100, wait_s: float = 0, held: int | None = 0) -> LeaseReply:
        request = LeaseRequest(capacity=capacity, held_version=held, tokens_per_s=100, wait_s=wait_s)
        return await self.call("lease", request, LeaseReply)

    async def beat(self, leases: Sequence[Lease] = ()) -> BeatReply:
        beat = Beat(
            lease_ids=tuple(lease.lease_id for lease in leases),
            held_version=0,
            state="sampling",
            tokens_per_s=7.0,
            bytes_served=10,
            bytes_fetched_peers=20,
        )
        return await self.call("beat", beat, BeatReply)

    async def push(self, leases: Sequence[Lease], **changes: Any) -> list[Reason]:
        made = [self.complete(lease, index, **changes) for lease in leases for index in range(len(lease.members))]
        envelope = seal(self.identity, Submission(run_id=RUN_ID, trajectories=tuple(made)))
        return [verdict.reason for verdict in (await self.call("push", Push(envelope=envelope), PushReply)).verdicts]

    def complete(self, lease: Lease, index: int, **changes: Any) -> Trajectory:
        policy = BehaviourPolicy(
            oldest_version=lease.min_version,
            newest_version=lease.min_version,
            artifact_digest=b"a" * 32,
            backend="scripted",
            build="1",
            precision="float32",
        )
        fields: dict[str, Any] = dict(
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            member=lease.members[index].member,
            prompt_digest=prompt_digest(lease.prompt_ids),
            policy=policy,
            temperature=lease.sampling.temperature,
            seed=lease.members[index].seed,
            finish_reason=FinishReason.STOP,
            token_ids=codec.pack_u32([9, 2]),
            logprobs=codec.pack_f32([-0.1, -0.1]),
        )
        return Trajectory(**{**fields, **changes})


@dataclass
class Swarm:
    """A coordinator's work service and the peers that dial it."""

    state: RunState
    clock: ManualClock
    network: MemoryNetwork
    coordinator: Identity
    stack: AsyncExitStack

    async def peer(self, name: str) -> Peer:
        identity = Identity.from_seed(name.encode().ljust(32, b"."))
        host = await self.stack.enter_async_context(self.network.host(identity))
        await host.connect(f"/memory/1/p2p/{self.coordinator.peer_id}", timeout_s=5)
        return Peer(identity, await self.client(host))

    async def client(self, host: Any) -> RpcClient:
        return await self.stack.enter_async_context(
            RpcClient(host, self.coordinator.peer_id, WORK_PROTOCOL, max_reply_bytes=1 << 20)
        )

    async def start(self, groups: int = 2) -> None:
        await self.state.updates.publish(0, [b"a" * 32])
        await self.add(groups)

    async def add(self, groups: int) -> None:
        first = self.state.admission.next_prompt_index
        await self.state.admission.add(
            [Prompt(index=first + i, prompt_ids=codec.pack_u32([first + i])) for i in range(groups)]
        )


async def told_status() -> dict[str, Any]:
    return {"name": "test"}


@asynccontextmanager
async def running(folder: Path, **settings: Any) -> AsyncGenerator[Swarm]:
    values = {"group_size": 4, "groups_per_update": 2, "max_tokens": 8, "beat_s": 0.05, **settings}
    clock, network, coordinator = ManualClock(), MemoryNetwork(), Identity.generate()
    facts = RunFacts(run_id=RUN_ID, vocabulary_size=10, end_token_ids=(2,))
    async with (
        open_run(folder / "run.sqlite", WorkSettings(**values), facts, clock) as state,
        network.host(coordinator) as host,
        RpcServer(host, WORK_PROTOCOL, max_request_bytes=MAX_REQUEST_BYTES) as server,
        AsyncExitStack() as stack,
    ):
        manifests = Published(run_manifest=b"run", head_manifest=None)
        WorkService(state, published=lambda: manifests, status=told_status).register(server)
        yield Swarm(state, clock, network, coordinator, stack)


async def test_a_node_joins_works_and_leaves(tmp_path: Path):
    async with running(tmp_path) as swarm:
        ann = await swarm.peer("ann")
        assert (await ann.hello()).run_manifest == b"run"
        assert (await ann.lease()).wait_reason is WaitReason.STARTING
        await swarm.start()
        reply = await ann.lease()
        assert [(lease.group_id, len(lease.members)) for lease in reply.leases] == [(0, 4), (1, 4)]
        assert (await ann.beat(reply.leases)).expired == ()
        assert await ann.push(reply.leases[:1]) == [Reason.ACCEPTED] * 4
        (node,) = swarm.state.node_statuses()
        assert (node.live, node.accepted, node.in_flight, node.held_version) == (True, 4, 4, 0)
        assert (node.state, node.tokens_per_s, node.bytes_served, node.outbound_only) == ("sampling", 7.0, 10, True)
        release = Release(lease_ids=(), cause="bye", leaving=True)
        assert (await ann.call("release", release, Released)).count == 4
        (node,) = swarm.state.node_statuses()
        assert not node.live and node.state == "left"


async def test_a_push_of_five_mebibytes_passes(tmp_path: Path):
    """Field case 57: what is legal and large is not taken for an attack."""
    tokens = 90_000
    async with running(tmp_path, max_tokens=1 << 17, group_size=8) as swarm:
        ann = await swarm.peer("ann")
        await ann.hello()
        await swarm.start()
        random = Random(1)
        ids = codec.pack_u32([*random.choices([1, *range(3, 10)], k=tokens - 1), 2])
        # One text for all: so probable that it may well be drawn eight times.
        logprobs = codec.pack_f32([-1e-4 * random.expovariate(1) for _ in range(tokens)])
        leases = (await ann.lease()).leases
        assert 8 * (len(ids) + len(logprobs)) > 5 << 20
        assert await ann.push(leases[:1], token_ids=ids, logprobs=logprobs) == [Reason.ACCEPTED] * 8


async def test_a_request_for_work_waits_until_there_is_some(tmp_path: Path):
    async with running(tmp_path) as swarm:
        ann = await swarm.peer("ann")
        await ann.hello()
        await swarm.start(groups=0)
        await ann.beat()  # It knows of the version; that is not what it waits for.
        replies: list[LeaseReply] = []

        async def ask() -> None:
            replies.append(await ann.lease(wait_s=20))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            await swarm.add(1)
        assert [lease.group_id for lease in replies[0].leases] == [0]


@pytest.mark.parametrize("held", [None, 0], ids=["the first one", "a later one"])
async def test_a_request_that_waits_is_answered_when_a_version_is_published(tmp_path: Path, held: int | None):
    async with running(tmp_path, beat_s=30.0) as swarm:
        ann = await swarm.peer("ann")
        await ann.hello()
        if held is not None:
            await swarm.start(groups=0)
            assert (await ann.lease()).head_version == held
        replies: list[LeaseReply] = []

        async def ask() -> None:
            replies.append(await ann.lease(wait_s=20, held=held))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            assert not replies
            await swarm.state.updates.publish(0 if held is None else held + 1, [b"b" * 32])
        assert (replies[0].leases, replies[0].retry_after_s) == ((), 0.0)
        assert replies[0].head_version == (0 if held is None else held + 1)


async def test_a_version_published_between_two_requests_answers_the_second_at_once(tmp_path: Path):
    async with running(tmp_path, beat_s=30.0) as swarm:
        ann = await swarm.peer("ann")
        await ann.hello()
        await swarm.start(groups=0)
        assert (await ann.lease()).head_version == 0
        await swarm.state.updates.publish(1, [b"b" * 32])
        with anyio.fail_after(10):
            assert (await ann.lease(wait_s=20)).head_version == 1


@pytest.mark.parametrize("how", ["left", "replaced"])
async def test_a_request_that_waits_gets_nothing_once_its_process_is_gone(tmp_path: Path, how: str):
    async with running(tmp_path) as swarm:
        ann = await swarm.peer("ann")
        await ann.hello()
        await swarm.start(groups=0)
        await ann.beat()

        async def ask() -> None:
            with pytest.raises(RemoteError, match="hello_first"):
                await ann.lease(wait_s=20)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            if how == "left":
                await ann.call("release", Release(lease_ids=(), cause="bye", leaving=True), Released)
            else:
                await ann.hello(instance=2)
            await swarm.add(1)
        (node,) = swarm.state.node_statuses()
        assert node.in_flight == 0


async def test_a_node_whose_allowance_is_full_is_told_so_and_gets_more_when_its_own_work_is_taken(tmp_path: Path):
    async with running(tmp_path, beat_s=30.0, max_staleness=3, groups_per_update=4) as swarm:
        ann, bob = await swarm.peer("ann"), await swarm.peer("bob")
        await ann.hello()
        await bob.hello()
        await swarm.start(groups=16)
        first = (await ann.lease()).leases
        assert [len(lease.members) for lease in first] == [4]
        refused = await ann.lease()
        assert (refused.leases, refused.wait_reason, refused.retry_after_s) == ((), WaitReason.QUOTA, 0.0)
        replies: list[LeaseReply] = []

        async def ask() -> None:
            replies.append(await ann.lease(wait_s=20))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            assert await ann.push(first) == [Reason.ACCEPTED] * 4
        assert sum(len(lease.members) for lease in replies[0].leases) == 12


@pytest.mark.parametrize("reason", ["staleness_limit", "paused", "stopping", "finished", "starting", "quota"])
async def test_a_node_without_work_is_told_why(tmp_path: Path, reason: str):
    async with running(tmp_path, max_in_flight_per_peer=4) as swarm:
        ann = await swarm.peer("ann")
        await ann.hello()
        await swarm.start(groups=0 if reason == "staleness_limit" else 2)
        if reason == "quota":
            assert (await ann.lease()).leases
        if reason == "paused":
            await swarm.state.set_paused(True)
        if reason in ("stopping", "finished"):
            swarm.state.stop(finished=reason == "finished")
        reply = await ann.lease(held=None if reason == "starting" else 0)
        assert (reply.leases, reply.wait_reason.value) == ((), reason)
        beat = await ann.beat()
        assert (beat.stopping, beat.finished) == (reason in ("stopping", "finished"), reason == "finished")


async def test_refusals_are_counted_alike_on_both_sides(tmp_path: Path):
    async with running(tmp_path) as swarm:
        ann = await swarm.peer("ann")
        await ann.hello()
        await swarm.start()
        first, second = (await ann.lease()).leases
        seen: dict[str, int] = {}
        for leases, changes in (
            ([first], {}),
            ([second], {"temperature": 0.5}),
            ([second], {"seed": 1}),
            ([first], {"lease_id": b"?" * 16}),
        ):
            for answer in await ann.push(leases, **changes):
                seen[answer.value] = seen.get(answer.value, 0) + 1
        with pytest.raises(RemoteError) as refused:
            await ann.call("push", Push(envelope=b"junk"), PushReply)
        seen[refused.value.code] = seen.get(refused.value.code, 0) + 1
        (node,) = swarm.state.node_statuses()
        assert {"accepted": node.accepted, **node.rejected} == seen
        assert seen == {"accepted": 4, "wrong_sampling": 4, "duplicate": 4, "no_lease": 4, "malformed": 1}


async def test_a_node_that_was_counted_dead_gets_work_right_after_its_hello(tmp_path: Path):
    async with running(tmp_path) as swarm:
        ann = await swarm.peer("ann")
        await ann.hello()
        await swarm.start()
        held = (await ann.lease()).leases
        swarm.clock.advance(1)
        await swarm.state.core.tick()
        assert not swarm.state.node_statuses()[0].live
        with pytest.raises(RemoteError, match="hello_first"):
            await ann.lease()
        await ann.hello(instance=2)
        reply = await ann.lease()
        assert [len(lease.members) for lease in reply.leases] == [4, 4]
        assert (await ann.beat([*held, *reply.leases])).expired == tuple(lease.lease_id for lease in held)
        assert len(swarm.state.node_statuses()) == 1


async def test_a_key_that_is_live_twice_is_refused_and_a_quick_restart_is_not(tmp_path: Path):
    async with running(tmp_path) as swarm:
        ann = await swarm.peer("ann")
        await ann.hello(instance=1)
        refused: list[str] = []

        async def newcomer() -> None:
            with pytest.raises(RemoteError) as e:
                await ann.hello(instance=2)
            refused.append(e.value.code)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(newcomer)
            while not refused:
                await ann.beat()
        assert refused == ["identity_in_use"]
        await ann.hello(instance=3)
        assert len(swarm.state.node_statuses()) == 1


async def test_the_leases_of_a_killed_process_do_not_keep_its_successor_from_work(tmp_path: Path):
    async with running(tmp_path, max_in_flight_per_peer=8) as swarm:
        ann = await swarm.peer("ann")
        await ann.hello(instance=1)
        await swarm.start()
        held = (await ann.lease()).leases
        await ann.hello(instance=2)
        # What the killed process had finished is in its outbox.
        assert await ann.push(held[:1]) == [Reason.ACCEPTED] * 4
        await swarm.add(1)
        again = (await ann.lease()).leases
        assert [lease.group_id for lease in again] == [2]
        swarm.clock.advance(0.15)
        await ann.beat(again)
        await swarm.state.core.tick()
        assert [lease.group_id for lease in (await ann.lease()).leases] == [1]


async def test_strangers_and_other_roles_get_no_work_and_other_runs_a_clear_answer(tmp_path: Path):
    async with running(tmp_path) as swarm:
        ann = await swarm.peer("ann")
        for call in (ann.lease(), ann.beat()):
            with pytest.raises(RemoteError, match="hello_first"):
                await call
        with pytest.raises(RemoteError, match="unknown_run"):
            await ann.hello(run_id="cd" * 16)
        with pytest.raises(RemoteError, match="unknown_run"):
            await ann.call("status", StatusRequest(run_id="cd" * 16), StatusReply)
        await ann.hello(role=Role.SEEDER)
        with pytest.raises(RemoteError, match="refused"):
            await ann.lease()
        assert (await ann.call("status", StatusRequest(run_id=RUN_ID), StatusReply)).status == {"name": "test"}


async def test_another_start_of_the_run_that_only_looks_leaves_no_peer_behind(tmp_path: Path):
    async with running(tmp_path) as swarm:
        looker = await swarm.peer("looker")
        assert (await looker.hello(role=Role.COORDINATOR)).beat_s > 0
        with pytest.raises(RemoteError, match="hello_first"):
            await looker.beat()
        leave = Release(lease_ids=(), cause="only looked", leaving=True, failed=False)
        assert (await looker.call("release", leave, Released)).count == 0
        assert swarm.state.node_statuses() == [] and await peer_entries(swarm.state) == []


async def test_many_nodes_share_the_work_and_every_completion_is_taken_once(tmp_path: Path):
    async with running(tmp_path, groups_per_update=16, max_staleness=3, beat_s=30.0) as swarm:
        await swarm.start(groups=64)
        peers = [await swarm.peer(f"node {n}") for n in range(8)]
        accepted: list[Reason] = []

        async def work(peer: Peer) -> None:
            await peer.hello()
            while leases := (await peer.lease(capacity=8)).leases:
                accepted.extend(await peer.push(leases))

        async with anyio.create_task_group() as tasks:
            for peer in peers:
                tasks.start_soon(work, peer)
        assert accepted == [Reason.ACCEPTED] * 256
        assert swarm.state.accepted() == sum(node.accepted for node in swarm.state.node_statuses()) == 256
        assert swarm.state.rewards.unscored == 256
