"""`echo-node join`: from an invite to an orderly end."""

import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import anyio
from anyio import to_thread
from rich.console import Console

from echo_node.activity import Activity
from echo_node.backends.base import Backend
from echo_node.backends.child import ChildBackend
from echo_node.backends.options import read_option
from echo_node.backends.renewing import open_renewing
from echo_node.backends.survey import survey
from echo_node.backends.tested import Verdicts, open_tested
from echo_node.bare_errors import bare_errors
from echo_node.config import NodeConfig, StatePaths
from echo_node.display import Display
from echo_node.hardware import BackendChoice, choose, probe, require_backend
from echo_node.hosts import Network, open_network
from echo_node.instance import Instance, claim_identity
from echo_node.introduction import learn_head, learn_run
from echo_node.node import Node, NodeSeams, Outcome
from echo_node.signals import Stop, listen
from echo_node.status import summary_lines
from echo_node.wanted import Wanted
from echo_swarm.clock import Clock, SystemClock
from echo_swarm.collector import calm_collector
from echo_swarm.invite import Invite


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
    clock = SystemClock()
    with anyio.CancelScope() as starting:
        async with anyio.create_task_group() as tasks:
            stop = Stop(starting.cancel)
            tasks.start_soon(listen, stop)
            elsewhere = config.backend_python is not None
            require_backend(_option(config), await to_thread.run_sync(probe), elsewhere=elsewhere)
            display.emit("connecting")
            async with open_network(
                instance.identity,
                invite,
                listen=config.listen,
                outbound_only=config.outbound_only,
                patience_s=config.patience_s,
                on_retry=lambda e, pause_s: display.emit(f"{e}; trying again in {pause_s:.0f} s"),
            ) as network:
                calm_collector()
                activity = Activity(clock, display.emit)
                run = await learn_run(
                    network.host, invite, clock=clock, activity=activity, patience_s=config.patience_s
                )
                # Looked at again: waiting for the coordinator can take long, and memory come and go.
                choice = choose(
                    _option(config),
                    run,
                    await to_thread.run_sync(probe),
                    elsewhere=elsewhere,
                    survey=await to_thread.run_sync(survey, _python(config)),
                    head=await learn_head(network.host, invite, clock=clock),
                )
                open_backend = _backend_opener(config, choice, invite, display)
                seams = _seams(network, instance, clock, open_backend, choice.options.wanted(), display)
                node = Node(config, invite, seams)
                stop.call = node.stop
                async with display.progress(node.status, clock):
                    outcome = await node.run()
                for line in _farewell(outcome, node):
                    display.emit(line)
            tasks.cancel_scope.cancel()


def _backend_opener(
    config: NodeConfig, choice: BackendChoice, invite: Invite, display: Display
) -> Callable[[], AbstractAsyncContextManager[Backend]]:
    for reason in choice.reasons:
        display.emit(f"--backend auto: {reason}")
    display.emit(f"sampling with {choice.text}")
    log_path = StatePaths(state_dir=config.state_dir, run_id=invite.run).backend_log
    python = _python(config)
    verdicts = Verdicts(config.state_dir)

    def open_child() -> AbstractAsyncContextManager[ChildBackend]:
        return open_tested(choice.options, log_path=log_path, verdicts=verdicts, emit=display.emit, python=python)

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
