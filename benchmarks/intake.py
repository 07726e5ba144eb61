"""How much intake takes over real streams, beside the floor: the same work in one loop without a network.

16 peers in other processes push signed groups of 8 trajectories x 256 tokens, each group one submission, over
hivemind streams. Measured: trajectories and MB a second, time from push to verdict (p50, p99), memory of the
coordinator's process. The floor decodes, verifies, validates and inserts in one loop in the same process, once with
one commit a submission (each is durable before the next) and once with one commit for 64.

    python -m benchmarks.intake [--peers 16] [--processes 4] [--groups 100]

    coordinator (this process): hivemind host · RpcServer · WorkService · SQLite
    worker processes: peers that lease, sample made-up tokens, sign all; then push as fast as they are answered
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import psutil

from benchmarks._report import write_report
from echo_coordinator import rows
from echo_coordinator.batch import Prompt
from echo_coordinator.database import open_database
from echo_coordinator.intake_rules import Demand, judge
from echo_coordinator.runstate import RunFacts, RunState, open_run
from echo_coordinator.service import MAX_REQUEST_BYTES, Published, WorkService
from echo_coordinator.work_settings import WorkSettings
from echo_swarm import codec
from echo_swarm.envelope import seal, unseal
from echo_swarm.identity import Identity
from echo_swarm.trajectory import (
    SUBMISSION_LIMITS,
    BehaviourPolicy,
    FinishReason,
    Reason,
    Submission,
    Trajectory,
    prompt_digest,
)
from echo_swarm.transport.hivemind import open_hivemind_host
from echo_swarm.transport.rpc import RpcClient, RpcServer, call_message
from echo_swarm.work import (
    WORK_PROTOCOL,
    BackendReport,
    Hello,
    Lease,
    LeaseReply,
    LeaseRequest,
    Push,
    PushReply,
    Role,
    Welcome,
)

RUN_ID = "ab" * 16
GROUP = 8
TOKENS = 256
VOCABULARY = 50_000
END = 2
ARTIFACT = b"a" * 32
FACTS = RunFacts(run_id=RUN_ID, vocabulary_size=VOCABULARY, end_token_ids=(END,))
PUSHES_AT_ONCE = 4
"""Of one peer; a node pushes on while it waits for verdicts."""
POLICY = BehaviourPolicy(
    oldest_version=0, newest_version=0, artifact_digest=ARTIFACT, backend="scripted", build="1", precision="float32"
)


def made_up(lease: Lease) -> Submission:
    """Return a group's completions, all valid, no two alike."""
    source = np.random.default_rng(lease.group_id)
    trajectories: list[Trajectory] = []
    for member in lease.members:
        ids = source.integers(3, VOCABULARY, TOKENS, dtype=np.uint32)
        ids[-1] = END
        trajectories.append(
            Trajectory(
                lease_id=lease.lease_id,
                group_id=lease.group_id,
                member=member.member,
                prompt_digest=prompt_digest(lease.prompt_ids),
                policy=POLICY,
                temperature=lease.sampling.temperature,
                seed=member.seed,
                finish_reason=FinishReason.STOP,
                token_ids=ids.astype("<u4").tobytes(),
                logprobs=(-source.random(TOKENS)).astype("<f4").tobytes(),
            )
        )
    return Submission(run_id=RUN_ID, trajectories=tuple(trajectories))


# The pushing side, in processes of its own.


async def peer_main(number: int, address: str, groups: int, ready: "Barrier", seconds: list[float]) -> None:
    """Lease and sign everything, wait for the start, push everything."""
    identity = Identity.from_seed(number.to_bytes(32, "big"))
    async with open_hivemind_host(identity, listen=(), bootstrap=[address]) as host:
        coordinator = await host.connect(address, timeout_s=30)
        async with RpcClient(host, coordinator, WORK_PROTOCOL, max_reply_bytes=4 << 20) as client:
            backend = BackendReport(backend="scripted", build="1", precision="float32", device="cpu", batch=4096)
            hello = Hello(
                run_id=RUN_ID,
                software="benchmark",
                role=Role.INFERENCE,
                instance=number.to_bytes(16, "big"),
                wall_s=time.time(),
                backend=backend,
                addresses=(),
            )
            await call_message(client, "hello", hello, Welcome, timeout_s=60)
            leases = await _lease_all(client, groups)
            envelopes = [seal(identity, made_up(lease)) for lease in leases]
            await ready.wait()
            queue = iter(envelopes)
            async with anyio.create_task_group() as tasks:
                for _ in range(PUSHES_AT_ONCE):
                    tasks.start_soon(_push_all, client, queue, seconds)


async def _lease_all(client: RpcClient, groups: int) -> list[Lease]:
    leases: list[Lease] = []
    while len(leases) < groups:
        capacity = min(4096, GROUP * (groups - len(leases)))
        request = LeaseRequest(capacity=capacity, held_version=0, tokens_per_s=1e8, wait_s=5)
        leases += (await call_message(client, "lease", request, LeaseReply, timeout_s=60)).leases
    return leases


async def _push_all(client: RpcClient, envelopes: Any, seconds: list[float]) -> None:
    for envelope in envelopes:
        start = time.perf_counter()
        while True:
            reply = await call_message(client, "push", Push(envelope=envelope), PushReply, timeout_s=120)
            if reply.verdicts:
                break
            await anyio.sleep(reply.retry_after_s)
        assert all(verdict.reason is Reason.ACCEPTED for verdict in reply.verdicts)
        seconds.append(time.perf_counter() - start)


class Barrier:
    """Says `ready` to the parent when all peers of this process are, and lets them go when the parent says so."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._go = anyio.Event()

    async def wait(self) -> None:
        """Wait for the start."""
        self._missing -= 1
        if self._missing == 0:
            print("ready", flush=True)
            await anyio.to_thread.run_sync(sys.stdin.readline)
            self._go.set()
        await self._go.wait()


async def worker_main(first: int, count: int, address: str, groups: int) -> None:
    """Run some peers and print their times to verdict."""
    seconds: list[float] = []
    barrier = Barrier(count)
    async with anyio.create_task_group() as tasks:
        for number in range(first, first + count):
            tasks.start_soon(peer_main, number, address, groups, barrier, seconds)
    print(json.dumps(seconds), flush=True)


# The coordinator's side.


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is pushed."""

    peers: int
    processes: int
    groups: int
    """Of each peer."""

    @property
    def total(self) -> int:
        """Groups in all."""
        return self.peers * self.groups


def settings(groups: int) -> WorkSettings:
    """Return settings with room for all groups at once."""
    return WorkSettings(
        group_size=GROUP,
        groups_per_update=min(4096, groups),
        max_staleness=max(1, groups // 4096 + 1),
        max_tokens=TOKENS,
        beat_s=600,
        lease_s=3600,
        lease_max_s=3600,
        max_in_flight_per_peer=1 << 20,
        buffer_bytes=1 << 40,
    )


async def prepared(state: RunState, groups: int) -> None:
    """Publish a version and add the groups."""
    await state.updates.publish(0, [ARTIFACT])
    await state.admission.add([Prompt(index=i, prompt_ids=codec.pack_u32(range(64))) for i in range(groups)])


async def over_streams(folder: Path, scale: Scale) -> dict[str, Any]:
    """Serve the pushing processes and return what was measured."""
    identity = Identity.generate()
    async with (
        open_run(folder / "streams.sqlite", settings(scale.total), FACTS) as state,
        open_hivemind_host(identity, listen=("/ip4/127.0.0.1/tcp/0",), many_peers=True) as host,
        RpcServer(host, WORK_PROTOCOL, max_request_bytes=MAX_REQUEST_BYTES) as server,
    ):
        manifests = Published(run_manifest=b"", head_manifest=None)
        WorkService(state, published=lambda: manifests, status=dict).register(server)
        await prepared(state, scale.total)
        return await _drive(state, host.addresses[0], scale)


async def _drive(state: RunState, address: str, scale: Scale) -> dict[str, Any]:
    process = psutil.Process()
    each = scale.peers // scale.processes
    workers = [
        await anyio.open_process(
            [
                sys.executable,
                "-m",
                "benchmarks.intake",
                "--worker",
                str(n * each),
                str(each),
                address,
                str(scale.groups),
            ],
            stdin=subprocess.PIPE,
            stderr=None,
        )
        for n in range(scale.processes)
    ]
    outputs = [LineReader(worker.stdout) for worker in workers]
    for output in outputs:
        assert await output.line() == "ready"
    rss_before, cpu_before = process.memory_info().rss, _cpu_s(process)
    start = time.perf_counter()
    for worker in workers:
        assert worker.stdin is not None
        await worker.stdin.send(b"go\n")
    while state.accepted() < scale.total * GROUP or state.rewards.unscored < scale.total * GROUP:
        await state.wait_changed(60)
    wall_s = time.perf_counter() - start
    cpu_s = _cpu_s(process) - cpu_before
    rss = process.memory_info().rss
    seconds = [value for output in outputs for value in json.loads(await output.line())]
    for worker in workers:
        await worker.wait()
    return {
        "trajectories_per_s": scale.total * GROUP / wall_s,
        "megabytes_per_s": scale.total * submission_bytes() / wall_s / 1e6,
        "wall_s": wall_s,
        "verdict_p50_ms": float(np.percentile(seconds, 50)) * 1e3,
        "verdict_p99_ms": float(np.percentile(seconds, 99)) * 1e3,
        "coordinator_cpu_share": cpu_s / wall_s,
        "trajectories_per_cpu_s": scale.total * GROUP / cpu_s,
        "rss_mb": rss / 1e6,
        "rss_growth_mb": (rss - rss_before) / 1e6,
    }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


class LineReader:
    """Lines of a child's output."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._rest = b""

    async def line(self) -> str:
        """Return the next line."""
        with anyio.fail_after(600):
            while b"\n" not in self._rest:
                self._rest += await self._stream.receive()
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode()


def _lease(number: int) -> Lease:
    members = tuple({"member": m, "seed": m} for m in range(GROUP))
    return Lease.model_validate(
        {
            "lease_id": number.to_bytes(16, "big"),
            "group_id": number,
            "prompt_ids": codec.pack_u32(range(64)),
            "members": members,
            "sampling": {"temperature": 1.0, "max_tokens": TOKENS},
            "min_version": 0,
            "max_version": None,
            "expires_in_s": 60.0,
        }
    )


def submission_bytes() -> int:
    """Return the size of one signed group."""
    return len(seal(Identity.generate(), made_up(_lease(1))))


def floor(folder: Path, groups: int, groups_per_commit: int) -> tuple[float, float]:
    """Return trajectories a second, and a second of processor time, of the bare loop."""
    identity = Identity.generate()
    raws = [seal(identity, made_up(_lease(number))) for number in range(groups)]
    connection = open_database(folder / f"floor-{groups_per_commit}.sqlite")
    demand = Demand(
        trains=True,
        trained_version=0,
        published_version=0,
        artifacts={0: frozenset({ARTIFACT})},
        max_staleness=1,
        min_version=0,
        max_version=None,
        temperature=1.0,
        max_tokens=TOKENS,
        prompt_digest=prompt_digest(codec.pack_u32(range(64))),
        vocabulary_size=VOCABULARY,
        end_token_ids=(END,),
    )
    start, start_cpu = time.perf_counter(), time.process_time()
    for number, raw in enumerate(raws):
        if number % groups_per_commit == 0:
            connection.execute("BEGIN")
        trajectories = unseal(raw, Submission, SUBMISSION_LIMITS).message.trajectories
        assert all(judge(t, demand, t.member).reason is Reason.ACCEPTED for t in trajectories)
        rows.insert_trajectories(connection, [rows.trajectory_row(t, identity.peer_id, 0.0) for t in trajectories])
        if (number + 1) % groups_per_commit == 0 or number + 1 == groups:
            connection.execute("COMMIT")
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
    connection.close()
    return groups * GROUP / seconds, groups * GROUP / cpu_s


async def main(scale: Scale) -> None:
    """Measure the floor before and after the streams, and report."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one, many = floor(folder, scale.total, 1), floor(folder, scale.total, 64)
        measured = await over_streams(folder, scale)
    results = {
        **measured,
        "floor_commit_each_per_s": one[0],
        "floor_commit_64_per_s": many[0],
        "floor_commit_64_per_cpu_s": many[1],
        "share_of_floor_commit_each": measured["trajectories_per_s"] / one[0],
        "share_of_floor_commit_64": measured["trajectories_per_s"] / many[0],
        "share_of_floor_by_cpu": measured["trajectories_per_cpu_s"] / many[1],
        "peers": scale.peers,
        "groups": scale.total,
        "submission_bytes": submission_bytes(),
    }
    write_report("intake", results)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--groups", type=int, default=100, help="of each peer")
    parser.add_argument("--worker", nargs=4, metavar=("FIRST", "COUNT", "ADDRESS", "GROUPS"), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    given = parse()
    if given.worker:
        anyio.run(worker_main, int(given.worker[0]), int(given.worker[1]), given.worker[2], int(given.worker[3]))
    else:
        anyio.run(main, Scale(peers=given.peers, processes=given.processes, groups=given.groups))
