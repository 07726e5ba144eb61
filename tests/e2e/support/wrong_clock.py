"""A node on a machine whose clock is hours off: `python -m tests.e2e.support.wrong_clock SECONDS join …`."""

import sys
import time


def main() -> None:
    ahead_s = float(sys.argv.pop(1))
    right = time.time
    time.time = lambda: right() + ahead_s

    from echo_node.cli import main as node

    node()


if __name__ == "__main__":
    main()
