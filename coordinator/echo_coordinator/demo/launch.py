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
from collections.abc import Sequence
from pathlib import Path

import anyio
from rich.console import Console
from rich.live import Live

from echo_coordinator.commands.progress import progress_line
from echo_coordinator.demo.processes import Peers
from echo_coordinator.demo.recipe import MIXED_PUBLISH
from echo_coordinator.demo.run_file import write_demo_run
from echo_coordinator.demo.summary import node_counters, render_summary, summarise
from echo_coordinator.demo.swarm import Show, Swarm, prepare_model
from echo_coordinator.run_folder import write_json
from echo_swarm.errors import LocalFault
from echo_swarm.render import render_run_status
from echo_swarm.status import RunStatus

LINE_EVERY_S = 5.0
"""Between two lines of progress where there is no terminal."""


class DemoFailed(LocalFault):
    """The demo did not do what it promises."""

    exit_code = 8


def run_demo(folder: Path, *, seed: int, backends: Sequence[Sequence[str]], gguf: bool = False) -> int:
    """Run the demo. Returns 0 when the model improved and every process ended cleanly.

    Args:
        folder: where it works; a demo that is there already is replaced.
        seed: of model, prompts and sampling.
        backends: for each node the flags that choose its backend.
        gguf: whether versions are published for llama.cpp, too.

    """
    nodes = len(backends)
    console = Console()
    if folder.exists():
        if any(folder.iterdir()) and not (folder / "demo.json").exists():
            raise DemoFailed(f"{folder} holds something that is no demo; choose another with --folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    write_json(folder / "demo.json", {"seed": seed, "nodes": nodes})
    swarm = Swarm(folder, Peers(folder / "logs"))
    started = time.monotonic()
    try:
        anyio.run(_prepare, swarm, seed, gguf, console)
        final = anyio.run(_run_swarm, swarm, backends, console)
    finally:
        swarm.peers.end(grace_s=20.0)
    problems = [c for c in (peer.complaint() for peer in swarm.peers.peers) if c]
    problems += [f"still running: {process}" for process in swarm.peers.left_behind()]
    counters = node_counters(folder / "nodes")
    summary, found = summarise(final, counters, started=nodes, wall_s=time.monotonic() - started, run=swarm.run)
    problems += found
    summary["problems"] = problems
    summary["ok"] = not problems
    write_json(folder / "summary.json", summary)
    console.print(render_summary(summary))
    console.print(f"summary: {folder / 'summary.json'}")
    for problem in problems:
        print(f"echo-coordinator demo: {problem}", file=sys.stderr)
    return DemoFailed.exit_code if problems else 0


async def _prepare(swarm: Swarm, seed: int, gguf: bool, console: Console) -> None:
    console.print("Preparing the demo's model (made and warmed up once, then cached) ...")
    cache, log_path = swarm.folder.parent / "models", swarm.folder / "logs" / "warmup.log"
    model = await prepare_model(cache, seed=seed, log_path=log_path, say=lambda text: console.print(f"  {text}"))
    changes = {"publish": MIXED_PUBLISH} if gguf else {}
    write_demo_run(swarm.run.root, model=model, seed=seed, changes=changes)


async def _run_swarm(swarm: Swarm, backends: Sequence[Sequence[str]], console: Console) -> RunStatus:
    console.print("Starting the coordinator ...")
    coordinator = swarm.start_coordinator()
    invite = await swarm.wait_for_invite(coordinator)
    console.print(f"Starting {len(backends)} nodes with the invite {invite[:24]}… ...")
    # Held back until all are ready: one that starts fast would leave little for the others.
    await swarm.pause()
    swarm.start_nodes(invite, backends)
    await swarm.wait_for_nodes(len(backends))
    await swarm.resume()
    if console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            await swarm.watch(coordinator, lambda status: live.update(render_run_status(status)))
    else:
        await swarm.watch(coordinator, _lines())
    await swarm.wait_for_exits()
    return swarm.final_status()


def _lines() -> Show:
    last_at = -LINE_EVERY_S

    def show(status: RunStatus) -> None:
        nonlocal last_at
        if time.monotonic() - last_at > LINE_EVERY_S:
            last_at = time.monotonic()
            print(progress_line(status), flush=True)

    return show
