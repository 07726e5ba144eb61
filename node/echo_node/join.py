"""`echo-node join`: from an invite to an orderly end."""

import math
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
from anyio import to_thread
from rich.console import Console

from echo_node.activity import Activity
from echo_node.backends.base import Backend
from echo_node.backends.child import ChildBackend
from echo_node.backends.options import read_option
from echo_node.backends.renewing import open_renewing
from echo_node.backends.survey import everywhere
from echo_node.backends.tested import Verdicts, open_tested
from echo_node.bare_errors import bare_errors
from echo_node.config import NodeConfig, StatePaths, run_dirs
from echo_node.display import Display
from echo_node.early_status import noting
from echo_node.hardware import BackendChoice, choose, probe, require_backend
from echo_node.hosts import Network, open_network, peers_of
from echo_node.instance import Instance, claim_identity
from echo_node.introduction import learn_head, learn_run
from echo_node.node import Node, NodeSeams, Outcome
from echo_node.peers import near_of
from echo_node.recall import keep_run, known_head, known_run
from echo_node.signals import Stop, listen
from echo_node.status import summary_lines
from echo_node.wanted import Wanted
from echo_swarm.checkpoint.known_peers import read_known
from echo_swarm.clock import Clock, SystemClock
from echo_swarm.collector import calm_collector
from echo_swarm.envelope import Signed
from echo_swarm.invite import Invite
from echo_swarm.manifest import RunManifest
from echo_swarm.ticker import Ticker

LEAST_PATIENCE_S = 3.0
"""For the coordinator to answer, once a bootstrap address has, even if that took all of the patience."""


def join(config: NodeConfig, invite: Invite, console: Console) -> None:
    """Take part in a run until it is finished or a signal comes. Raises EchoError."""
    display = Display(console)
    read_option(_option(config), elsewhere=config.backend_python is not None)
    with claim_identity(config.state_dir) as instance:
        if instance.is_new:
            display.emit(instance.backup_notice)
        with bare_errors():
            anyio.run(_join, config, invite, instance, display)


async def _join(config: NodeConfig, invite: Invite, instance: Instance, display: Display) -> None:
    with anyio.CancelScope() as starting:
        async with anyio.create_task_group() as tasks:
            stop = Stop(starting.cancel)
            tasks.start_soon(listen, stop, display.emit)
            note = noting(config, invite, instance.identity.peer_id, SystemClock())
            ticker = Ticker(display.emit, note=note)
            tasks.start_soon(ticker.run)
            await _take_part(config, invite, instance, display, ticker, stop)
            tasks.cancel_scope.cancel()
    if starting.cancelled_caught:
        display.emit("stopped before it took part")


async def _take_part(
    config: NodeConfig, invite: Invite, instance: Instance, display: Display, ticker: Ticker, stop: Stop
) -> None:
    clock, began_s = SystemClock(), anyio.current_time()
    elsewhere = config.backend_python is not None
    require_backend(_option(config), await to_thread.run_sync(probe), elsewhere=elsewhere)
    ticker.begin(f"connecting, through {' or '.join(invite.boot)}")
    known = await to_thread.run_sync(known_run, run_dirs(config.state_dir), invite)
    patience_s = config.patience(known=known is not None)
    async with open_network(
        instance.identity,
        invite,
        listen=config.listen,
        outbound_only=config.outbound_only,
        patience_s=patience_s,
        on_retry=lambda e, pause_s: display.emit(f"{e}; trying again in {pause_s:.0f} s"),
        known=read_known(StatePaths(state_dir=config.state_dir, run_id=invite.run).peers),
        alone=math.isinf(patience_s),
        near=near_of(config, invite),
        keys_path=StatePaths(state_dir=config.state_dir, run_id=invite.run).keys,
        say=display.emit,
    ) as network:
        calm_collector()
        patience_s = max(LEAST_PATIENCE_S, patience_s - (anyio.current_time() - began_s))
        choice = await _choose(config, network, invite, clock, display, ticker, patience_s, known)
        open_backend = _backend_opener(config, choice, invite, display, ticker)
        seams = _seams(network, instance, clock, open_backend, choice.options.wanted(), display)
        ticker.note = None
        node = Node(config, invite, seams)
        stop.call = node.stop
        async with display.progress(node.status, clock, node.transfers):
            outcome = await node.run()
        for line in _farewell(outcome, node):
            display.emit(line)
        ticker.begin("closing connections")
    ticker.end()


async def _choose(
    config: NodeConfig,
    network: Network,
    invite: Invite,
    clock: Clock,
    display: Display,
    ticker: Ticker,
    patience_s: float,
    known: Signed[RunManifest] | None,
) -> BackendChoice:
    runs, peers = run_dirs(config.state_dir), peers_of(network, invite, clock)
    with ticker.step("asking the coordinator what the run is"):
        activity = Activity(clock, display.emit)
        run = await learn_run(
            network.host,
            invite,
            clock=clock,
            activity=activity,
            patience_s=patience_s,
            peers=peers,
            known=known,
            following=network.following,
        )
        await to_thread.run_sync(keep_run, runs, run)
        head = await learn_head(network.host, invite, clock=clock, peers=peers, keys=network.following.keys)
        head = head or await to_thread.run_sync(known_head, runs, invite)
    with ticker.step(f"choosing a backend for {run.message.name}"):
        # Looked at again: waiting for the coordinator can take long, and memory come and go.
        return choose(
            _option(config),
            run.message,
            await to_thread.run_sync(probe),
            python=_python(config),
            survey=await to_thread.run_sync(everywhere, _python(config)),
            head=head,
        )


def _backend_opener(
    config: NodeConfig, choice: BackendChoice, invite: Invite, display: Display, ticker: Ticker
) -> Callable[[], AbstractAsyncContextManager[Backend]]:
    for reason in choice.reasons:
        display.emit(f"--backend auto: {reason}")
    log_path = StatePaths(state_dir=config.state_dir, run_id=invite.run).backend_log
    verdicts = Verdicts(config.state_dir)

    def tell(line: str) -> None:
        if line.startswith("testing"):
            ticker.begin(line)
        else:
            display.emit(line)

    @asynccontextmanager
    async def open_child() -> AsyncGenerator[ChildBackend]:
        ticker.begin(f"starting {choice.text}")
        try:
            async with open_tested(
                choice.options, log_path=log_path, verdicts=verdicts, emit=tell, python=choice.python
            ) as backend:
                ticker.end()
                display.emit(f"sampling with {choice.text}")
                yield backend
        finally:
            ticker.end()

    return lambda: open_renewing(open_child, emit=display.emit)


def _python(config: NodeConfig) -> str:
    return str(config.backend_python or sys.executable)


def _option(config: NodeConfig) -> str:
    if config.batch is None:
        return config.backend
    return f"{config.backend}{',' if ':' in config.backend else ':'}batch={config.batch}"


def _seams(
    network: Network,
    instance: Instance,
    clock: Clock,
    open_backend: Callable[[], AbstractAsyncContextManager[Backend]],
    wanted_files: Wanted,
    display: Display,
) -> NodeSeams:
    return NodeSeams(
        host=network.host,
        directory=network.directory,
        identity=instance.identity,
        clock=clock,
        open_backend=open_backend,
        emit=display.emit,
        wanted_files=wanted_files,
    )


def _farewell(outcome: Outcome, node: Node) -> list[str]:
    why = "the run is finished" if outcome is Outcome.FINISHED else "stopped"
    return [why, *summary_lines(node.status())]
