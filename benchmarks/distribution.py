"""How long a version takes to reach every node over links of 20 Mbit/s, as multiples of one plain TCP copy.

    host 0: coordinator ──┐
    host 1: node ─────────┤ bridge        each link 20 Mbit/s in each direction (tbf); namespaces made and removed here
    host N: node ─────────┘

In one run and on the same links: this project's swarm (a cold start, a version without likeness to the one before, one
of which 1 % is changed), the star (the same nodes fetch from the coordinator alone), shardcast, and libtorrent with its
defaults, with TCP only, and tuned. Last, one link without a limit: what a fetch is over a bare copy on its stream.

Needs root. Nodes are `echo-node join` processes with the scripted backend against a real coordinator.
"""

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks._distribution_echo import run_echo
from benchmarks._distribution_environment import others_python
from benchmarks._distribution_files import write_version
from benchmarks._distribution_net import Net, lacking, open_net
from benchmarks._distribution_others import plain_copy, run_shardcast, run_torrent
from benchmarks._distribution_spread import Scale, say
from benchmarks._distribution_unshaped import run_unshaped
from benchmarks._distribution_workers import PartFailed
from benchmarks._report import write_report

NOT_HERE = 3
"""Exit code where the machine lacks what is needed."""
PARTS = ("echo", "star", "shardcast", "libtorrent", "libtorrent-tcp", "libtorrent-tuned", "unshaped")
ECHO_STEPS = ("cold", "step", "small_step")


def measure(nodes: int, arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure all wanted parts with so many nodes, in namespaces of their own."""
    found: dict[str, Any] = {"nodes": nodes}
    with open_net(nodes + 1) as net:
        net.shape(arguments.rate_mbit)
        file = folder / "copied"
        write_version(file, megabytes=arguments.megabytes, seed=0)
        copy_s = plain_copy(net, folder / "copy", file)
        ideal_s = 8 * file.stat().st_size / (arguments.rate_mbit * 1e6)
        say(f"{nodes} nodes: one plain TCP copy takes {copy_s:.2f} s, {copy_s / ideal_s:.3f} of size over rate")
        found["plain_copy"] = {"seconds": round(copy_s, 2), "over_size_by_rate": round(copy_s / ideal_s, 3)}
        scale = Scale(nodes=nodes, size_bytes=file.stat().st_size, rate_mbit=arguments.rate_mbit, copy_s=copy_s)
        for name, part in _parts(net, scale, folder, arguments.only).items():
            try:
                found |= part()
            except PartFailed as e:
                say(f"  {name} failed: {e}")
                found[name] = {"failed": str(e)}
    return found


def _parts(net: Net, scale: Scale, folder: Path, only: list[str]) -> dict[str, Callable[[], dict[str, Any]]]:
    """Return the wanted parts in order."""
    steps = (ECHO_STEPS if "echo" in only else ()) + (("star",) if "star" in only else ())
    parts: dict[str, Callable[[], dict[str, Any]]] = {}
    if steps:
        parts["echo"] = lambda: run_echo(net, scale, folder / "echo", steps)
    if "shardcast" in only:
        parts["shardcast"] = lambda: {"shardcast": run_shardcast(net, scale, folder / "shardcast")}
    for name, style in (("libtorrent", "defaults"), ("libtorrent-tcp", "tcp"), ("libtorrent-tuned", "tuned")):
        if name in only:
            parts[name] = lambda n=name, s=style: {n: run_torrent(net, scale, folder / n, s)}
    return parts


def show(cases: list[dict[str, Any]]) -> None:
    """Print a table: copies, and who sent how much."""
    titles = " ".join(f"{title:>7}" for title in ("copies", "median", "coord.", "nodes", "waste", "cpu s"))
    say(f"\nnodes {'':18} {titles}  busy")
    for case in cases:
        for name, part in case.items():
            if isinstance(part, dict) and "copies" in part:
                median = part["copies"] * part["median_node_s"] / part["seconds"]
                sent = f"{part['wire_coordinator_copies']:7.2f} {part['wire_nodes_copies']:7.2f}"
                cost = f"{part.get('wasted_copies', 0):7.3f} {part['cpu_s']:7.1f} {part['machine_busy']:5.0%}"
                say(f"{case['nodes']:5} {name:18} {part['copies']:7.2f} {median:7.2f} {sent} {cost}")


def main() -> int:
    """Run the wanted parts."""
    arguments = _arguments()
    if missing := lacking():
        print(f"benchmarks.distribution needs {missing}", file=sys.stderr)
        return NOT_HERE
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, _interrupt)
    if any(name in arguments.only for name in PARTS[2:6]):
        others_python()
    root = Path(tempfile.mkdtemp(prefix="echo-distribution-", dir=arguments.folder))
    began = time.monotonic()
    cases: list[dict[str, Any]] = []
    shaped = [name for name in arguments.only if name != "unshaped"]
    for nodes in arguments.nodes if shaped else ():
        folder = root / str(nodes)
        folder.mkdir()
        cases.append(measure(nodes, arguments, folder))
        if not any("failed" in part for part in cases[-1].values() if isinstance(part, dict)):
            shutil.rmtree(folder)
    unshaped: dict[str, Any] | None = None
    if "unshaped" in arguments.only:
        with open_net(2) as net:
            unshaped = run_unshaped(net, root / "unshaped", megabytes=arguments.unshaped_megabytes)
        shutil.rmtree(root / "unshaped")
    show(cases)
    figures = {
        "megabytes": arguments.megabytes,
        "rate_mbit": arguments.rate_mbit,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "cases": cases,
        "unshaped": unshaped,
    }
    scratch = {} if not arguments.scratch else {"folder": root}
    write_report("distribution", figures, packages=("hivemind",), **scratch)
    if not any(root.iterdir()):
        root.rmdir()
    return int(any("failed" in part for case in cases for part in case.values() if isinstance(part, dict)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=_numbers, default=[2, 4, 8], help="such as 2,4,8")
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--rate-mbit", type=float, default=20.0, help="of each link, in each direction")
    parser.add_argument("--unshaped-megabytes", type=int, default=200)
    parser.add_argument("--only", type=_names, default=list(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--folder", type=Path, default=None, help="where files and logs go; on a disk, not in memory")
    parser.add_argument("--scratch", action="store_true", help="leave the results of the repository alone")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(PARTS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: none of {', '.join(PARTS)}")
    return names


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
