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

from benchmarks._distribution_echo import STEPS, run_echo
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
STYLES = {"libtorrent": "defaults", "libtorrent-tcp": "tcp", "libtorrent-tuned": "tuned"}
PARTS = (*STEPS, "shardcast", *STYLES, "unshaped")
ECHO = ("cold", "step", "small_step")
"""What `--only echo` stands for."""


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
        for name, part in _parts(net, scale, folder, arguments.only, found).items():
            try:
                part()
            except PartFailed as e:
                say(f"  {name} failed: {e}")
                found[f"{name} failed"] = str(e)
    return found


def _parts(
    net: Net, scale: Scale, folder: Path, only: list[str], found: dict[str, Any]
) -> dict[str, Callable[[], None]]:
    """Return the wanted parts in order; each puts its figures into `found`."""
    parts: dict[str, Callable[[], None]] = {}
    if steps := tuple(step for step in STEPS if step in only):
        parts["echo"] = lambda: run_echo(net, scale, folder / "echo", steps, found)
    if "shardcast" in only:
        parts["shardcast"] = lambda: found.update(shardcast=run_shardcast(net, scale, folder / "shardcast"))
    for name, style in STYLES.items():
        if name in only:
            parts[name] = lambda n=name, s=style: found.update({n: run_torrent(net, scale, folder / n, s)})
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
    if {"shardcast", *STYLES} & set(arguments.only):
        others_python()
    root = Path(tempfile.mkdtemp(prefix="echo-distribution-", dir=arguments.folder))
    try:
        return _run(arguments, root)
    except KeyboardInterrupt:
        shutil.rmtree(root, ignore_errors=True)
        raise


def _run(arguments: argparse.Namespace, root: Path) -> int:
    """Measure, and write the report."""
    began = time.monotonic()
    cases: list[dict[str, Any]] = []
    figures: dict[str, Any] = {
        "megabytes": arguments.megabytes,
        "rate_mbit": arguments.rate_mbit,
        "cases": cases,
        "unshaped": None,
    }
    scratch = {"folder": root} if arguments.scratch else {}
    for nodes in arguments.nodes if set(arguments.only) - {"unshaped"} else ():
        folder = root / str(nodes)
        folder.mkdir()
        cases.append(measure(nodes, arguments, folder))
        if not _failed(cases[-1:]):
            shutil.rmtree(folder)
    if "unshaped" in arguments.only:
        try:
            with open_net(2) as net:
                figures["unshaped"] = run_unshaped(net, root / "unshaped", megabytes=arguments.unshaped_megabytes)
            shutil.rmtree(root / "unshaped")
        except PartFailed as e:
            say(f"  unshaped failed: {e}")
            cases.append({"unshaped failed": str(e)})
    figures["minutes"] = round((time.monotonic() - began) / 60, 1)
    show(cases)
    write_report("distribution", figures, packages=("hivemind",), **scratch)
    if not any(root.iterdir()):
        root.rmdir()
    return int(_failed(cases))


def _failed(cases: list[dict[str, Any]]) -> bool:
    return any(name.endswith("failed") for case in cases for name in case)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=_numbers, default=[2, 4, 8], help="such as 2,4,8")
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--rate-mbit", type=float, default=20.0, help="of each link, in each direction")
    parser.add_argument("--unshaped-megabytes", type=int, default=200)
    parser.add_argument(
        "--only", type=_names, default=list(PARTS), help=f"some of {','.join(PARTS)}; echo: the first three"
    )
    parser.add_argument("--folder", type=Path, default=None, help="where files and logs go; on a disk, not in memory")
    parser.add_argument("--scratch", action="store_true", help="leave the results of the repository alone")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _names(text: str) -> list[str]:
    names = [name for given in text.split(",") for name in (ECHO if given == "echo" else (given,))]
    if "small_step" in names and "step" not in names:
        names.append("step")  # It is a small one from there.
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
