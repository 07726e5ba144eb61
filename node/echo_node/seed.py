"""`echo-node join --role seeder`: from an invite to an orderly end, without any backend."""

import math

import anyio
from anyio import to_thread
from rich.console import Console

from echo_node.bare_errors import bare_errors
from echo_node.config import NodeConfig, StatePaths, run_dirs
from echo_node.display import Display
from echo_node.early_status import noting
from echo_node.hosts import open_network
from echo_node.instance import Instance, claim_identity
from echo_node.node import Outcome
from echo_node.peers import near_of
from echo_node.recall import known_run
from echo_node.seeder import Seeder, SeederSeams
from echo_node.signals import Stop, listen
from echo_node.status import summary_lines
from echo_swarm.checkpoint.known_peers import read_known
from echo_swarm.clock import SystemClock
from echo_swarm.collector import calm_collector
from echo_swarm.invite import Invite
from echo_swarm.ticker import Ticker


def seed(config: NodeConfig, invite: Invite, console: Console) -> None:
    """Store and serve a run's versions until it is finished or a signal comes. Raises EchoError."""
    display = Display(console)
    with claim_identity(config.state_dir) as instance:
        if instance.is_new:
            display.emit(instance.backup_notice)
        with bare_errors():
            anyio.run(_seed, config, invite, instance, display)


async def _seed(config: NodeConfig, invite: Invite, instance: Instance, display: Display) -> None:
    clock, runs = SystemClock(), run_dirs(config.state_dir)
    patience_s = config.patience(known=await to_thread.run_sync(known_run, runs, invite) is not None)
    with anyio.CancelScope() as starting:
        async with anyio.create_task_group() as tasks:
            stop = Stop(starting.cancel)
            tasks.start_soon(listen, stop, display.emit)
            ticker = Ticker(display.emit, note=noting(config, invite, instance.identity.peer_id, clock))
            tasks.start_soon(ticker.run)
            ticker.begin(f"connecting, through {' or '.join(invite.boot)}")
            async with open_network(
                instance.identity,
                invite,
                listen=config.listen,
                patience_s=patience_s,
                on_retry=lambda e, pause_s: display.emit(f"{e}; trying again in {pause_s:.0f} s"),
                known=read_known(StatePaths(state_dir=config.state_dir, run_id=invite.run).peers),
                alone=math.isinf(patience_s),
                near=near_of(config, invite),
                keys_path=StatePaths(state_dir=config.state_dir, run_id=invite.run).keys,
                say=display.emit,
            ) as network:
                ticker.end()
                calm_collector()
                for address in network.host.addresses:
                    display.emit(f"reached at {address}, which may stand in network.bootstrap of the run")
                seams = SeederSeams(
                    host=network.host,
                    directory=network.directory,
                    identity=instance.identity,
                    clock=clock,
                    emit=display.emit,
                )
                seeder = Seeder(config, invite, seams)
                stop.call = seeder.stop
                async with display.progress(seeder.status, clock, seeder.transfers):
                    outcome = await seeder.run()
                display.emit("the run is finished" if outcome is Outcome.FINISHED else "stopped")
                for line in summary_lines(seeder.status()):
                    display.emit(line)
            tasks.cancel_scope.cancel()
