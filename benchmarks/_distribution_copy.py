"""One plain TCP copy of a file: what everything else is a multiple of. Standard library only.

python -m benchmarks._distribution_copy receive ADDRESS FILE      the file is flushed to the disk
python -m benchmarks._distribution_copy send ADDRESS FILE
"""

import socket
import sys
import time

from benchmarks._distribution_lines import Lines, flush

PORT = 7000
BLOCK_BYTES = 1 << 18
LIMIT_S = 3600.0


def receive(lines: Lines, address: str, path: str) -> None:
    """Take one file; the connection's end is its end."""
    with socket.create_server((address, PORT)) as server:
        server.settimeout(LIMIT_S)
        lines.say("listening")
        connection, _ = server.accept()
    size = 0
    with connection, open(path, "wb", buffering=0) as file:
        while block := connection.recv(BLOCK_BYTES):
            size += file.write(block)
    flush(path)
    lines.say("whole", bytes=size)


def send(lines: Lines, address: str, path: str) -> None:
    """Send one file."""
    began = time.time()
    with socket.create_connection((address, PORT), timeout=LIMIT_S) as connection, open(path, "rb") as file:
        connection.sendfile(file)
    lines.say("sent", began=began)


def main() -> None:
    """Do it, and stay until the benchmark has heard of it."""
    lines = Lines()
    {"receive": receive, "send": send}[sys.argv[1]](lines, sys.argv[2], sys.argv[3])
    for _ in lines.orders():
        pass


if __name__ == "__main__":
    main()
