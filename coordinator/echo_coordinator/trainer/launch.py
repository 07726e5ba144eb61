"""Starts the ranks: `python -m echo_coordinator.trainer.launch --config trainer.json --socket PATH`.

One rank runs right here, in the environment that torchrun would give it; more are started by torchrun. Either way
nothing outlives the coordinator: this process dies with it, and each rank dies with this process.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from echo_coordinator.trainer import process
from echo_coordinator.trainer.settings import load_config
from echo_swarm.cgroups import cpu_count
from echo_swarm.children import die_with_parent
from echo_swarm.errors import SettingsError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until the trainer ends; return its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        ranks = load_config(_paths(arguments).config).optimizer.ranks
    except SettingsError:
        ranks = 1  # The rank will tell the coordinator what is wrong.
    if ranks == 1:
        return process.main(arguments)
    die_with_parent()
    # The ranks' parent is this process; that is what each of them checks.
    os.environ["ECHO_PARENT_PID"] = str(os.getpid())
    return _torchrun(ranks, arguments)


def _torchrun(ranks: int, arguments: list[str]) -> int:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # All ranks are on this machine: nothing needs to listen beyond loopback.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    os.environ.setdefault("OMP_NUM_THREADS", str(max(cpu_count() // ranks, 1)))
    options = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=0", "--local-addr=127.0.0.1"]
    # It makes a folder even for no logs; beside the socket, the coordinator clears it away.
    options.append(f"--log-dir={_paths(arguments).socket.parent}")
    try:
        run.run(run.parse_args([*options, "-m", "echo_coordinator.trainer.process", *arguments]))
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        print(f"trainer rank {rank} ended: {failure.message or f'exit code {failure.exitcode}'}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as e:
        return 128 + int(e.sigval)
    return 0


def _paths(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="echo_coordinator.trainer.launch")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--socket", type=Path, required=True)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    process.leave(main())
