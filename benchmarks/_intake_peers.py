"""The pushing side of the intake benchmark: peers that lease, sample made-up tokens, sign all, then push.

Run by `benchmarks.intake` as `python -m benchmarks._intake_peers FIRST COUNT ADDRESS GROUPS`: says `ready`, waits for a
line, pushes, prints the seconds from each push to its verdict.
"""

import json
import sys
import time
from collections.abc import Iterator

import anyio
import numpy as np

from echo_swarm.collector import calm_collector
from echo_swarm.envelope import seal
from echo_swarm.identity import Identity
from echo_swarm.trajectory import BehaviourPolicy, FinishReason, Reason, Submission, Trajectory, prompt_digest
from echo_swarm.transport.hivemind import open_hivemind_host
from echo_swarm.transport.rpc import RpcClient, call_message
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


async def _push_all(client: RpcClient, envelopes: Iterator[bytes], seconds: list[float]) -> None:
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
            calm_collector()
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


if __name__ == "__main__":
    numbers = int(sys.argv[1]), int(sys.argv[2])
    anyio.run(worker_main, *numbers, sys.argv[3], int(sys.argv[4]), backend_options={"use_uvloop": True})
