"""Completion tokens a second of a whole `echo-node` over loopback, against its backend's child process alone.

    alone   the child that the node would start: same options, same files, same niceness; two batches of requests are
            always waiting in it
    node    `echo-node join` as a process, by invite, over hivemind's streams on loopback, with `echo-coordinator start`
            on the other end: leases, signatures, outbox on disk, pushes, verdicts, rewards

For each backend, both stay up and take turns within one run, the order turning from round to round; while one works,
the other has nothing to do. Both make the same completions of each round: prompts, seeds and lengths are those that the
coordinator hands out next. No end token comes, so that all completions have the same length. The ratio of each round is
taken, and their median.

The coordinator is the real one. An update would need more groups than are sampled here, so that its trainer child is
there and computes nothing, and a node that asks gets work at once. The backend computes on `--threads` threads on both
sides; what node and coordinator compute goes to the other cores as far as there are any.
"""

import argparse
import importlib.util
import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anyio

from benchmarks._node_sides import (
    Ledger,
    Span,
    Window,
    as_node_chooses,
    fetched_policy,
    measure_alone,
    measure_node,
    read_run,
    seen_by_coordinator,
    start_node,
)
from benchmarks._report import write_report
from echo_coordinator.commands.init import init_run
from echo_coordinator.config import load_settings
from echo_coordinator.demo.processes import Peer, Peers
from echo_coordinator.demo.run_file import to_toml
from echo_coordinator.demo.swarm import STARTUP_S, Swarm
from echo_coordinator.run_folder import RunFolder
from echo_node.backends.base import GenerationRequest
from echo_node.backends.child import Patience, start_backend
from echo_swarm.work import BackendReport
from tools.make_vllm_env import python_in, up_to_date

ENVIRONMENT = "reasoning_gym:chain_sum"
END_ID = 16
"""An id of SmolLM2's vocabulary that was reserved and never trained, so that it ends nothing."""
GROUP_SIZE = 8
GROUPS = 512
"""Of one update; twice as many are handed out before the coordinator would wait for the trainer."""
CHILD_NICE = 10
"""As a node starts its child."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What is measured how."""

    batch: int
    threads: int
    tokens: int
    rounds: int
    window_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The run that all backends work for, one after the other."""

    swarm: Swarm
    coordinator: Peer
    invite: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One backend; the node's side is evaluated when the coordinator has ended."""

    option: str
    report: BackendReport
    alone: list[Window]
    node: list[Span]


def write_run(root: Path, model: Path, scale: Scale, gguf: str) -> None:
    """Make a run whose trainer never gets enough for an update."""
    init_run(root, model=str(model), environment=ENVIRONMENT, name="node-throughput", mode="async")
    folder = RunFolder(root)
    for name in ("config.json", "generation_config.json"):
        path = folder.model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": END_ID}))
    sections: dict[str, dict[str, Any]] = {
        "run": {"id": load_settings(folder).run.id, "name": "node-throughput"},
        "environment": {"name": ENVIRONMENT, "max_prompt_tokens": 128},
        "environment.settings": {"min_terms": 2, "max_terms": 4, "seed": 0, "eval_size": 8},
        "work": {
            "mode": "async",
            "max_staleness": 1,
            "group_size": GROUP_SIZE,
            "groups_per_update": GROUPS,
            "max_tokens": scale.tokens,
        },
        "optimizer": {"threads": 1},
        "evaluation": {"every": 0},
        "probes": {"prompts": 0},
        "publish": {"gguf": [gguf]} if gguf else {},
        "network": {"listen": ["/ip4/127.0.0.1/tcp/0"]},
    }
    folder.settings.write_text(to_toml(sections), encoding="utf-8")


@asynccontextmanager
async def running_coordinator(folder: Path) -> AsyncGenerator[Running]:
    """Run it, with all groups that it may hold ready to be leased, and paused."""
    swarm = Swarm(folder, Peers(folder / "logs"))
    try:
        coordinator = swarm.start_coordinator()
        invite = await swarm.wait_for_invite(coordinator)
        await _supplied(swarm)
        await swarm.pause()
        yield Running(swarm=swarm, coordinator=coordinator, invite=invite)
    finally:
        await anyio.to_thread.run_sync(lambda: swarm.peers.end(grace_s=30.0))


async def _supplied(swarm: Swarm) -> None:
    with anyio.fail_after(STARTUP_S):
        while True:
            status = await swarm.status()
            if status.buffer.in_flight >= status.buffer.capacity:
                return
            await anyio.sleep(1.0)


async def measure_backend(running: Running, name: str, scale: Scale, requests: list[GenerationRequest]) -> Measured:
    """Run one backend's rounds."""
    python = str(python_in()) if name == "vllm" else sys.executable
    option = f"{name}:batch={scale.batch},threads={scale.threads}"
    flags = ["--backend", option, *(["--backend-python", python] if name == "vllm" else [])]
    node = await start_node(running.swarm, running.invite, name, flags)
    run = read_run(running.swarm, running.invite)
    options = as_node_chooses(option, run, python=python)
    log_path = running.swarm.folder / "logs" / f"{name}-alone.log"
    alone, by_node = list[Window](), list[Span]()
    try:
        async with start_backend(
            options, log_path=log_path, nice=CHILD_NICE, python=python, patience=Patience(start_s=STARTUP_S)
        ) as child:
            await child.load(fetched_policy(node, run))
            for number in range(scale.rounds):
                # Those that the node is leased in this round, or was just now.
                accepted = (await running.swarm.status()).accepted
                if number % 2:
                    by_node.append(await measure_node(running.swarm, running.coordinator, node, scale.window_s))
                alone.append(await measure_alone(child, iter(requests[accepted:]), scale.window_s))
                if not number % 2:
                    by_node.append(await measure_node(running.swarm, running.coordinator, node, scale.window_s))
                print(f"  round {number + 1}: alone {alone[-1].tokens_per_s:.1f} tokens/s", file=sys.stderr)
            return Measured(option=option, report=child.report, alone=alone, node=by_node)
    finally:
        node.peer.process.terminate()
        await anyio.to_thread.run_sync(node.peer.process.wait, 60)


def summarise(measured: Measured, ledger: Ledger) -> dict[str, Any]:
    batch = measured.report.batch
    node = [seen_by_coordinator(ledger, span, batch) for span in measured.node]
    pairs = list(zip(measured.alone, node, strict=True))
    ratios = [b.tokens_per_s / a.tokens_per_s for a, b in pairs]
    figures: dict[str, Any] = {
        "option": measured.option,
        "build": measured.report.build,
        "precision": measured.report.precision,
        "ratio_median": round(statistics.median(ratios), 3),
        "ratio_each_round": [round(ratio, 3) for ratio in ratios],
        "ratio_tokens_per_child_cpu_s": round(
            statistics.median(b.tokens_per_child_cpu_s / a.tokens_per_child_cpu_s for a, b in pairs), 3
        ),
        "ratio_child_busy_share": round(
            statistics.median(b.cpu_shares["child"] / a.cpu_shares["child"] for a, b in pairs), 3
        ),
    }
    for side, windows in {"alone": measured.alone, "node": node}.items():
        figures[f"{side}_tokens_per_s"] = [round(window.tokens_per_s, 1) for window in windows]
        figures[f"{side}_completions"] = [window.completions for window in windows]
        figures[f"{side}_cpus_used"] = {
            name: round(statistics.median(window.cpu_shares[name] for window in windows), 3)
            for name in windows[0].cpu_shares
        }
    return figures


async def measure(arguments: argparse.Namespace, scale: Scale, folder: Path) -> dict[str, Any]:
    write_run(folder / "run", arguments.model, scale, arguments.gguf if "llama_cpp" in arguments.backends else "")
    print("filling the run with prompts ...", file=sys.stderr)
    async with running_coordinator(folder):
        pass
    ledger = Ledger(folder / "run" / "state.db", load_settings(RunFolder(folder / "run")))
    requests = ledger.requests()
    measured: list[tuple[str, Measured]] = []
    async with running_coordinator(folder) as running:
        for name in arguments.backends:
            print(f"{name} ...", file=sys.stderr)
            measured.append((name, await measure_backend(running, name, scale, requests)))
    return {name: summarise(found, ledger) for name, found in measured}


def installed() -> list[str]:
    """Return the backends that this machine can measure."""
    llama = importlib.util.find_spec("llama_cpp") is not None
    return ["torch", *(["llama_cpp"] if llama else []), *(["vllm"] if up_to_date() else [])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2"), help="made by docs/recipes/smollm2.md")
    parser.add_argument("--backends", nargs="+", default=installed(), choices=["torch", "llama_cpp", "vllm"])
    parser.add_argument("--gguf", default="q8_0", help="precision of the file for llama.cpp")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1, help="of the backend, on both sides")
    parser.add_argument("--tokens", type=int, default=64, help="of each completion")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--window", type=float, default=40.0, help="seconds measured of each side in each round")
    parser.add_argument("--keep", type=Path, help="work in this folder and leave it there")
    arguments = parser.parse_args()
    if not (arguments.model / "model.safetensors").exists():
        parser.error(f"{arguments.model} holds no model; docs/recipes/smollm2.md says how to make it")
    scale = Scale(
        batch=arguments.batch,
        threads=arguments.threads,
        tokens=arguments.tokens,
        rounds=arguments.rounds,
        window_s=arguments.window,
    )
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="echo-node-throughput-"))
    try:
        figures = anyio.run(measure, arguments, scale, folder)
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    common = {"model": arguments.model.name, **asdict(scale)}
    write_report("node_throughput", common | figures, packages=("torch", "transformers", "llama-cpp-python"))


if __name__ == "__main__":
    main()
