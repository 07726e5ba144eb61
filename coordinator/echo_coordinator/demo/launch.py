"""`echo-coordinator demo`: a whole swarm on loopback, start to finish.

    warm-up child ──► model folder (cached)
    init            ──► runs/demo/run
    coordinator process ◄── hivemind DHT and streams ──► three node processes
         │ control socket: status, once a second
         ▼
    live display, then a table and summary.json

Every process is ours: started here, ended here, and looked for at the end.
"""

import shutil
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
from echo_coordinator.demo.recipe import write_demo_run
from rich.console import Console
from rich.live import Live

from echo_coordinator.control import NotRunning, ask
from echo_coordinator.demo.processes import Peer, Peers
from echo_coordinator.demo.summary import node_counters, render_summary, summarise
from echo_coordinator.progress import progress_line
from echo_coordinator.run_folder import RunFolder, write_json
from echo_swarm.children import start_child
from echo_swarm.errors import BackendFailed, EchoError, LocalFault, Unavailable
from echo_swarm.render import render_run_status
from echo_swarm.status import RunStatus

STARTUP_S = 120.0
"""For the coordinator to publish version 0 on a slow machine."""
WHOLE_RUN_S = 1800.0
"""A demo that takes longer than this is broken."""
LEAVING_S = 60.0
"""For nodes to leave after the run has ended."""


class DemoFailed(LocalFault):
    """The demo did not do what it promises."""

    exit_code = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Demo:
    folder: Path
    run: RunFolder
    peers: Peers
    console: Console


def run_demo(folder: Path, *, seed: int, nodes: int) -> int:
    """Run the demo. Returns 0 when the model improved and every process ended cleanly."""
    console = Console()
    if folder.exists():
        if any(folder.iterdir()) and not (folder / "demo.json").exists():
            raise DemoFailed(f"{folder} holds something that is no demo; choose another with --folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    write_json(folder / "demo.json", {"seed": seed, "nodes": nodes})
    demo = _Demo(folder=folder, run=RunFolder(folder / "run"), peers=Peers(folder / "logs"), console=console)
    started = time.monotonic()
    try:
        anyio.run(_prepare, demo, seed)
        final = anyio.run(_run_swarm, demo, nodes)
    finally:
        demo.peers.end(grace_s=20.0)
    problems = [c for c in (peer.complaint() for peer in demo.peers.peers) if c]
    problems += [f"still running: {process}" for process in demo.peers.left_behind()]
    counters = node_counters(folder / "nodes")
    summary, found = summarise(final, counters, wall_s=time.monotonic() - started, run=demo.run)
    problems += found
    summary["problems"] = problems
    summary["ok"] = not problems
    write_json(folder / "summary.json", summary)
    console.print(render_summary(summary))
    console.print(f"summary: {folder / 'summary.json'}")
    for problem in problems:
        print(f"echo-coordinator demo: {problem}", file=sys.stderr)
    return DemoFailed.exit_code if problems else 0


async def _prepare(demo: _Demo, seed: int) -> None:
    model = demo.folder.parent / "models"
    demo.console.print("Preparing the demo's model (made and warmed up once, then cached) ...")
    async with start_child(
        "echo_coordinator.demo.warmup",
        ["--cache", str(model), "--seed", str(seed)],
        name="the model's warm-up",
        log_path=demo.folder / "logs" / "warmup.log",
    ) as child:
        while True:
            message = await child.receive(timeout_s=300)
            if message["op"] == "done":
                break
            demo.console.print(f"  {message['text']}")
    write_demo_run(demo.run.root, model=Path(message["model"]), seed=seed)


async def _run_swarm(demo: _Demo, nodes: int) -> RunStatus:
    demo.console.print("Starting the coordinator ...")
    coordinator = demo.peers.start("coordinator", "echo_coordinator.cli", ["start", str(demo.run.root), "--plain"])
    invite = await _wait_for_invite(demo, coordinator)
    demo.console.print(f"Starting {nodes} nodes with the invite {invite[:24]}… ...")
    for number in range(nodes):
        state = demo.folder / "nodes" / f"node-{number}"
        listen = "/ip4/127.0.0.1/tcp/0"
        demo.peers.start(
            f"node-{number}",
            "echo_node.cli",
            ["join", "--role", "inference", "--state-dir", str(state), "--listen", listen, "--threads", "1", invite],
        )
    await _watch(demo, coordinator)
    await _wait_for_exits(demo)
    return _final_status(demo)


async def _wait_for_invite(demo: _Demo, coordinator: Peer) -> str:
    with anyio.move_on_after(STARTUP_S):
        while coordinator.exit_code is None:
            demo.peers.look()
            with suppress(Unavailable, EchoError):
                reply = await ask(demo.run, "invite")
                return str(reply["invite"])
            await anyio.sleep(0.3)
    raise BackendFailed(coordinator.complaint() or f"the coordinator was not ready within {STARTUP_S:.0f} s")


async def _watch(demo: _Demo, coordinator: Peer) -> None:
    """Show the status until the coordinator has ended."""
    last_line_at, lines = -60.0, not demo.console.is_terminal
    with anyio.move_on_after(WHOLE_RUN_S), Live(console=demo.console, refresh_per_second=4, transient=True) as live:
        while coordinator.exit_code is None:
            demo.peers.look()
            for peer in demo.peers.peers:
                complaint = peer.complaint()
                if complaint:
                    raise BackendFailed(complaint)
            with suppress(NotRunning, Unavailable):
                reply: dict[str, Any] = await ask(demo.run, "status")
                status = RunStatus.model_validate(reply["status"])
                if not lines:
                    live.update(render_run_status(status))
                elif time.monotonic() - last_line_at > 5:
                    last_line_at = time.monotonic()
                    print(progress_line(status), flush=True)
            await anyio.sleep(0.5)


async def _wait_for_exits(demo: _Demo) -> None:
    with anyio.move_on_after(LEAVING_S):
        while any(peer.exit_code is None for peer in demo.peers.peers):
            demo.peers.look()
            await anyio.sleep(0.2)


def _final_status(demo: _Demo) -> RunStatus:
    """Return what the coordinator wrote when it ended."""
    try:
        return RunStatus.model_validate_json(demo.run.last_status.read_bytes())
    except (OSError, ValueError) as e:
        raise DemoFailed(f"the coordinator left no status ({e}); see {demo.peers.log_folder}") from e
