"""A swarm of real processes on loopback around one run folder: what the demo shows and benchmarks measure.

    FOLDER/run      the run, made beforehand (`run_file`)
    FOLDER/nodes    one state folder a node
    FOLDER/logs     one log a process

Use, in this order: start_coordinator, wait_for_invite, start_nodes, (pause, wait_for_nodes, resume,) watch,
wait_for_exits, final_status; and `peers.end` whatever happened.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from echo_coordinator.control import NotRunning, ask
from echo_coordinator.demo.processes import Peer, Peers
from echo_coordinator.run_folder import RunFolder
from echo_swarm.children import start_child
from echo_swarm.errors import BackendFailed, EchoError, LocalFault, Unavailable
from echo_swarm.status import RunStatus

STARTUP_S = 300.0
"""For the coordinator to publish version 0, and for nodes to load it, on a slow machine."""
WHOLE_RUN_S = 1800.0
"""A run of this size that takes longer is broken."""
LEAVING_S = 60.0
"""For nodes to leave after the run has ended."""
WARM_UP_S = 300.0
"""Between two signs of life of the model's warm-up."""
LOOK_AGAIN_S = 0.5

Show = Callable[[RunStatus], None]


async def prepare_model(cache: Path, *, seed: int, log_path: Path, say: Callable[[str], None]) -> Path:
    """Return the folder of the demo's model, made and warmed up by a child process if the cache has none."""
    async with start_child(
        "echo_coordinator.demo.warmup",
        ["--cache", str(cache), "--seed", str(seed)],
        name="the model's warm-up",
        log_path=log_path,
    ) as child:
        while True:
            message = await child.receive(timeout_s=WARM_UP_S)
            if message["op"] == "done":
                return Path(message["model"])
            say(str(message["text"]))


@dataclass(frozen=True, slots=True)
class Swarm:
    """One coordinator and its nodes."""

    folder: Path
    peers: Peers
    """Where every process is accounted for."""

    @property
    def run(self) -> RunFolder:
        """The run it works on."""
        return RunFolder(self.folder / "run")

    def start_coordinator(self) -> Peer:
        """Start `echo-coordinator start`."""
        return self.peers.start("coordinator", "echo_coordinator.cli", ["start", str(self.run.root), "--plain"])

    def start_nodes(self, invite: str, backends: Sequence[Sequence[str]]) -> None:
        """Start a node for each of `backends`, which are the flags that choose it (`recipe.TORCH`)."""
        for number, backend in enumerate(backends):
            state = self.folder / "nodes" / f"node-{number}"
            options = ["--state-dir", str(state), "--listen", "/ip4/127.0.0.1/tcp/0", *backend]
            self.peers.start(f"node-{number}", "echo_node.cli", ["join", "--role", "inference", *options, invite])

    async def wait_for_invite(self, coordinator: Peer) -> str:
        """Return the invite once version 0 is published. Raises BackendFailed when that does not come about."""
        with anyio.move_on_after(STARTUP_S):
            while coordinator.exit_code is None:
                self.peers.look()
                with suppress(Unavailable, EchoError):
                    reply = await ask(self.run, "invite")
                    return str(reply["invite"])
                await anyio.sleep(0.3)
        raise BackendFailed(coordinator.complaint() or f"the coordinator was not ready within {STARTUP_S:.0f} s")

    async def wait_for_nodes(self, count: int) -> None:
        """Return when so many nodes hold a version. Raises BackendFailed when they do not within STARTUP_S."""
        with anyio.move_on_after(STARTUP_S):
            while True:
                self.look()
                status = await self.status()
                ready = [node for node in status.nodes if node.role == "inference" and node.held_version is not None]
                if len(ready) >= count:
                    return
                await anyio.sleep(LOOK_AGAIN_S)
        raise BackendFailed(f"{count} nodes were not ready within {STARTUP_S:.0f} s (logs: {self.peers.log_folder})")

    async def pause(self) -> None:
        """Let the coordinator hand out nothing until `resume`."""
        await ask(self.run, "pause")

    async def resume(self) -> None:
        """Undo `pause`."""
        await ask(self.run, "resume")

    async def status(self) -> RunStatus:
        """Return the run's status. Raises NotRunning or Unavailable when the coordinator does not answer."""
        reply: dict[str, Any] = await ask(self.run, "status")
        return RunStatus.model_validate(reply["status"])

    async def watch(self, coordinator: Peer, show: Show) -> None:
        """Show the status until the coordinator has ended, WHOLE_RUN_S at most. Raises BackendFailed if one fails."""
        with anyio.move_on_after(WHOLE_RUN_S):
            while coordinator.exit_code is None:
                self.look()
                with suppress(NotRunning, Unavailable):
                    show(await self.status())
                await anyio.sleep(LOOK_AGAIN_S)

    def look(self) -> None:
        """Remember the processes there are. Raises BackendFailed when one of ours ended with an error."""
        self.peers.look()
        for peer in self.peers.peers:
            complaint = peer.complaint()
            if complaint:
                raise BackendFailed(complaint)

    async def wait_for_exits(self) -> None:
        """Give all processes LEAVING_S to end by themselves."""
        with anyio.move_on_after(LEAVING_S):
            while any(peer.exit_code is None for peer in self.peers.peers):
                self.peers.look()
                await anyio.sleep(0.2)

    def final_status(self) -> RunStatus:
        """Return what the coordinator wrote when it ended. Raises LocalFault when there is nothing."""
        try:
            return RunStatus.model_validate_json(self.run.last_status.read_bytes())
        except (OSError, ValueError) as e:
            raise LocalFault(f"the coordinator left no status ({e}); see {self.peers.log_folder}") from e
