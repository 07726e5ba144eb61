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

from benchmarks._intake_peers import ARTIFACT, END, GROUP, RUN_ID, TOKENS, VOCABULARY, made_up
from benchmarks._report import write_report
from echo_coordinator.commands.start import LOOP
from echo_coordinator.state import rows
from echo_coordinator.state.batch import Prompt
from echo_coordinator.state.database import open_database
from echo_coordinator.state.intake_rules import Demand, judge
from echo_coordinator.state.run_state import RunFacts, RunState, open_run
from echo_coordinator.state.service import MAX_REQUEST_BYTES, Published, WorkService
from echo_coordinator.state.work_settings import WorkSettings
from echo_swarm import codec
from echo_swarm.collector import calm_collector
from echo_swarm.envelope import seal, unseal
from echo_swarm.identity import Identity
from echo_swarm.trajectory import (
    SUBMISSION_LIMITS,
    Reason,
    Submission,
    prompt_digest,
)
from echo_swarm.transport.hivemind import open_hivemind_host
from echo_swarm.transport.rpc import RpcServer
from echo_swarm.work import (
    WORK_PROTOCOL,
    Lease,
)

FACTS = RunFacts(run_id=RUN_ID, vocabulary_size=VOCABULARY, end_token_ids=(END,))


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
        probe_members=1 << 20,  # All is leased before anything is pushed.
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
        WorkService(state, published=lambda: manifests).register(server)
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
                "benchmarks._intake_peers",
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
    calm_collector()
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
    path = folder / f"floor-{groups_per_commit}.sqlite"
    connection = open_database(path)
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
        signed = unseal(raw, Submission, SUBMISSION_LIMITS)
        peer, trajectories = signed.peer_id, signed.message.trajectories
        assert all(judge(t, demand, t.member).reason is Reason.ACCEPTED for t in trajectories)
        rows.insert_trajectories(connection, [rows.trajectory_row(t, peer, 0.0) for t in trajectories])
        if (number + 1) % groups_per_commit == 0 or number + 1 == groups:
            connection.execute("COMMIT")
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - start_cpu
    connection.close()
    path.unlink()
    return groups * GROUP / seconds, groups * GROUP / cpu_s


async def main(scale: Scale) -> None:
    """Measure the floor before and after the streams, and report."""
    calm_collector()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = floor(folder, scale.total, 1), floor(folder, scale.total, 64)
        measured = await over_streams(folder, scale)
        after = floor(folder, scale.total, 1), floor(folder, scale.total, 64)
    # The machine may be busier during one than during the other.
    one, many = ((a[0] / 2 + b[0] / 2, a[1] / 2 + b[1] / 2) for a, b in zip(before, after, strict=True))
    results = {
        **measured,
        "floor_commit_each_per_s": one[0],
        "floor_commit_64_per_s": many[0],
        "cpu_us_per_push": GROUP * 1e6 / measured["trajectories_per_cpu_s"],
        "floor_commit_each_cpu_us_per_push": GROUP * 1e6 / one[1],
        "floor_commit_64_cpu_us_per_push": GROUP * 1e6 / many[1],
        "share_of_floor_commit_each": measured["trajectories_per_s"] / one[0],
        "share_of_floor_commit_64": measured["trajectories_per_s"] / many[0],
        "share_of_floor_commit_each_by_cpu": measured["trajectories_per_cpu_s"] / one[1],
        "share_of_floor_commit_64_by_cpu": measured["trajectories_per_cpu_s"] / many[1],
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
    return parser.parse_args()


if __name__ == "__main__":
    given = parse()
    scale = Scale(peers=given.peers, processes=given.processes, groups=given.groups)
    anyio.run(main, scale, backend_options=LOOP)
