"""Others on the same links: libtorrent in three styles, shardcast, and one plain TCP copy."""

import time
from pathlib import Path
from typing import Any

from benchmarks._distribution_environment import others_python
from benchmarks._distribution_files import write_version
from benchmarks._distribution_net import Net
from benchmarks._distribution_spread import Scale, Spread, say, watched
from benchmarks._distribution_workers import Event, Worker, Workers

READY_S = 60.0
COPY_S = 3600.0
CONNECT_S = 3.0
"""For peers that have nothing yet to find each other."""
SHARDCAST_PATIENCE = {"SHARDCAST_HTTP_TIMEOUT": "3600"}
"""Its origin serves one request at a time: with its 30 s, clients whose turn comes late would begin again."""


def plain_copy(net: Net, folder: Path, path: Path) -> float:
    """Copy a file from host 0 to host 1 over one TCP connection. Returns seconds, flushing to disk included."""
    with Workers(net, folder) as workers:
        address = net.address(1)
        target = str(folder / "copy")
        receiver = workers.start("receiver", 1, _module("copy", "receive", address, target))
        workers.wait("listening", [receiver], limit_s=READY_S)
        workers.start("sender", 0, _module("copy", "send", address, str(path)))
        found: dict[str, Event] = {}

        def hear(event: Event) -> None:
            found[event.name] = event

        workers.until(lambda: {"sent", "whole"} <= found.keys(), limit_s=COPY_S, what="the copy", also=hear)
    assert found["whole"].values["bytes"] == path.stat().st_size
    return found["whole"].at - float(found["sent"].values["began"])


def run_torrent(net: Net, scale: Scale, folder: Path, style: str) -> dict[str, Any]:
    """Spread one file among libtorrent peers that are connected to each other already."""
    path, torrent = folder / "seed" / "version.safetensors", folder / "version.torrent"
    path.parent.mkdir(parents=True)
    write_version(path, megabytes=scale.size_bytes // 1_000_000, seed=0)
    spread = Spread(what=f"libtorrent, {style}")
    with Workers(net, folder) as workers:
        peers = [
            workers.start(name, host, _module("torrent", net.address(host), style))
            for host, name in enumerate(["seed", *[f"peer{n}" for n in range(1, scale.nodes + 1)]])
        ]
        workers.wait("ready", peers, limit_s=READY_S)
        seed, nodes = peers[0], peers[1:]
        made = workers.ask(seed, "made", do="make", path=str(path), torrent=str(torrent))
        addresses = [net.address(host) for host in range(1, scale.nodes + 1)]
        for host, node in enumerate(nodes):
            mine = folder / node.name
            mine.mkdir()
            _add(node, torrent, mine, addresses[:host], seed=False)
        workers.wait("added", nodes, limit_s=READY_S)
        time.sleep(CONNECT_S)
        _measure(net, workers, spread, scale, nodes, lambda: _add(seed, torrent, path.parent, addresses, seed=True))
    say(f"  {spread.summary(scale)}")
    wasted = sum(event.values["wasted_bytes"] for event in spread.whole.values())
    own = {"piece_bytes": made["piece_bytes"], "wasted_copies": round(wasted / scale.size_bytes, 4)}
    return spread.figures(scale) | own


def run_shardcast(net: Net, scale: Scale, folder: Path) -> dict[str, Any]:
    """Let clients that wait for a version fetch it from shardcast's origin."""
    folder.mkdir(parents=True)
    path = folder / "version.safetensors"
    write_version(path, megabytes=scale.size_bytes // 1_000_000, seed=0)
    spread = Spread(what="shardcast")
    with Workers(net, folder) as workers:
        origin = workers.start("origin", 0, _module("shardcast", "origin", net.address(0), str(folder / "data")))
        workers.wait("ready", [origin], limit_s=READY_S)
        nodes: list[Worker] = []
        for n in range(1, scale.nodes + 1):
            # One after the other: all of a machine try the origin out by way of one and the same temporary file.
            command = _module("shardcast", "client", net.address(0), str(folder / f"client{n}"))
            nodes.append(workers.start(f"client{n}", n, command, **SHARDCAST_PATIENCE))
            workers.wait("ready", nodes[-1:], limit_s=READY_S)
        _measure(net, workers, spread, scale, nodes, lambda: origin.order(do="broadcast", path=str(path)))
    say(f"  {spread.summary(scale)}")
    return spread.figures(scale)


def _measure(net: Net, workers: Workers, spread: Spread, scale: Scale, nodes: list[Worker], begin: Any) -> None:
    """Let the file be had, and wait until everybody has it."""

    def hear(event: Event) -> None:
        if event.name in ("added", "broadcast") and event.worker not in nodes:
            spread.began_at = event.at
        spread.hear(event)
        if event.name == "whole":
            spread.whole[event.worker.name] = event

    with watched(spread, net, workers):
        begin()
        workers.until(
            lambda: len(spread.whole) == len(nodes), limit_s=scale.limit_s, what="everybody has the file", also=hear
        )


def _add(peer: Worker, torrent: Path, folder: Path, peers: list[str], *, seed: bool) -> None:
    peer.order(do="add", torrent=str(torrent), folder=str(folder), peers=peers, seed=seed)


def _module(name: str, *arguments: str) -> list[str]:
    return [str(others_python()), "-m", f"benchmarks._distribution_{name}", *arguments]
