"""One peer of the distribution benchmark that runs shardcast, in the environment of `_distribution_environment`.

    python -m benchmarks._distribution_shardcast origin ADDRESS FOLDER
    python -m benchmarks._distribution_shardcast client ADDRESS-OF-THE-ORIGIN FOLDER

Clients fetch from the origin. shardcast's own tree needs hosts that serve and want nothing; here every host wants the
file, and a middle node has all of it before it serves a whole version.
"""

import sys
import time
import urllib.request
from pathlib import Path

# pyright: reportMissingImports=false
from shardcast.client_node import ClientNode
from shardcast.origin_server import OriginServer

from benchmarks._distribution_lines import Lines, flush, leave

PORT = 8000
ASK_S = 0.2


class Client(ClientNode):
    """A client whose list of versions does not pass through a file that all processes of a machine share."""

    origin = ""

    def list_available_versions(self) -> dict[str, str]:
        with urllib.request.urlopen(f"{self.origin}/distribution.txt", timeout=600) as answer:
            lines = answer.read().decode().splitlines()
        found = (line.strip().partition(":") for line in lines if ":" in line)
        return {version.strip(): about.strip() for version, _, about in found}


def origin(lines: Lines, folder: str) -> None:
    """Serve, and broadcast a file when told to."""
    Path(folder).mkdir(parents=True)
    # Every client fetches this first, to see how fast the origin is.
    (Path(folder) / "data1.bin").write_bytes(bytes(1000))
    server = OriginServer(folder, PORT)
    lines.say("ready")
    for order in lines.orders():
        lines.say("broadcast", version=server.broadcast(order["path"]))
    leave()


def client(lines: Lines, address: str, folder: str) -> None:
    """Wait for one version and fetch it."""
    node = Client([f"http://{address}:{PORT}"], folder)
    node.origin = f"http://{address}:{PORT}"
    lines.say("ready")
    while not (versions := node.list_available_versions()):
        time.sleep(ASK_S)
    path = node.download_version(*versions)
    if path is None:
        lines.say("failed", reason="shardcast could not fetch the version")
    else:
        flush(path)
        lines.say("whole")
    for _ in lines.orders():
        pass
    leave()


if __name__ == "__main__":
    if sys.argv[1] == "origin":
        origin(Lines(), sys.argv[3])
    else:
        client(Lines(), sys.argv[2], sys.argv[3])
